// Sixteen lanes of AVX-512 (F, BW, VL, DQ). Operations as in simd_plain.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace simd {

constexpr int W = 16;
using F = __m512;
using U = __m512i;
using M = __mmask16;

inline F f32(float x) { return _mm512_set1_ps(x); }
inline U u32(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline F as_f32(U a) { return _mm512_castsi512_ps(a); }
inline U as_u32(F a) { return _mm512_castps_si512(a); }

inline F load_f32(const void* p) { return _mm512_loadu_ps(p); }
inline U load_u32(const void* p) { return _mm512_loadu_si512(p); }
inline U load_u16(const void* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
inline U load_u8(const void* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline void store_f32(void* p, F a) { _mm512_storeu_ps(p, a); }
inline void store_u32(void* p, U a) { _mm512_storeu_si512(p, a); }
inline void store_u16(void* p, U a) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a));
}
inline __m128i narrow_u8(U a) { return _mm512_cvtepi32_epi8(a); }
inline void store_u8(void* p, U a) { _mm_storeu_si128(static_cast<__m128i*>(p), narrow_u8(a)); }

inline void store_low_u8(void* p, U a) { store_u8(p, a); }

// FP16 in the lower halves of lanes, and FP32.
#define SUBULP_HALF_UNITS 1
inline F half_value(U code) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(code)); }
inline U half_nearest(F a) { return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
// Cut; from 0 to below 2^32.
inline U cvt_u32(F a) { return _mm512_cvttps_epu32(a); }
inline U half_cut(F a, F* value) {
  const __m256i halves = _mm512_cvtps_ph(a, _MM_FROUND_TO_ZERO);
  *value = _mm512_cvtph_ps(halves);
  return _mm512_cvtepu16_epi32(halves);
}
// FP16 in memory; what is stored, is returned.
inline F load_half(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
inline F store_half(void* p, F a) {
  const __m256i halves = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(static_cast<__m256i*>(p), halves);
  return _mm512_cvtph_ps(halves);
}
inline bool any_nan(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0; }

inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F sqrt(F a) { return _mm512_sqrt_ps(a); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F zero_nan(F a) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, a, _CMP_ORD_Q), a); }
inline F cvt_f32(U a) { return _mm512_cvtepi32_ps(a); }
inline U cvt_i32(F a) { return _mm512_cvttps_epi32(a); }

inline U add(U a, U b) { return _mm512_add_epi32(a, b); }
inline U sub(U a, U b) { return _mm512_sub_epi32(a, b); }
inline U and_(U a, U b) { return _mm512_and_si512(a, b); }
inline U or_(U a, U b) { return _mm512_or_si512(a, b); }
inline U min(U a, U b) { return _mm512_min_epu32(a, b); }
inline U max(U a, U b) { return _mm512_max_epu32(a, b); }
inline U shl(U a, U n) { return _mm512_sllv_epi32(a, n); }
inline U shr(U a, U n) { return _mm512_srlv_epi32(a, n); }
template <int n> inline U shl(U a) { return _mm512_slli_epi32(a, n); }
template <int n> inline U shr(U a) { return _mm512_srli_epi32(a, n); }

inline void load_split(const void* p, U* even, U* odd) {
  const U both = load_u32(p);
  *even = _mm512_slli_epi32(both, 16);
  *odd = _mm512_and_si512(both, u32(0xFFFF0000u));
}
inline void store_split(void* p, U even, U odd) {
  // Upper halves of `odd`, and below them those of `even`.
  store_u32(p, _mm512_mask_mov_epi16(_mm512_srli_epi32(even, 16), 0xAAAAAAAAu, odd));
}
inline void load_split_f32(const float* p, F* even, F* odd) {
  const U index = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const F low = load_f32(p), high = load_f32(p + W);
  *even = _mm512_permutex2var_ps(low, index, high);
  *odd = _mm512_permutex2var_ps(low, _mm512_add_epi32(index, u32(1)), high);
}

inline U swap_bytes(U a) { return _mm512_or_si512(_mm512_slli_epi16(a, 8), _mm512_srli_epi16(a, 8)); }
inline U round_half_even_16(U a) {
  const M odd = _mm512_test_epi32_mask(a, u32(0x10000));
  return _mm512_add_epi32(a, _mm512_mask_mov_epi32(u32(0x7FFF), odd, u32(0x8000)));
}

inline M greater(U a, U b) { return _mm512_cmpgt_epu32_mask(a, b); }
inline U select(M m, U a, U b) { return _mm512_mask_mov_epi32(b, m, a); }
inline F add_where(M m, F sum, F x) { return _mm512_mask_add_ps(sum, m, sum, x); }
inline F mul_where(M m, F a, F b, F other) { return _mm512_mask_mul_ps(other, m, a, b); }
inline int count_nonzero(U a) { return __builtin_popcount(_mm512_test_epi32_mask(a, a)); }
inline U add_carry(U n, U a, U b) {
  return _mm512_mask_add_epi32(n, _mm512_cmplt_epu32_mask(add(a, b), a), n, u32(1));
}
inline U split_point(F t, U* whole) {
  *whole = _mm512_cvttps_epi32(t);
  return _mm512_cvttps_epu32(mul(_mm512_reduce_ps(t, _MM_FROUND_TO_ZERO), f32(4294967296.0f)));
}
inline bool any_at_least(U a, uint32_t bound) {
  return _mm512_cmpge_epu32_mask(a, u32(bound)) != 0;
}
inline uint32_t reduce_max(U a) { return _mm512_reduce_max_epu32(a); }
inline float reduce_max(F a) { return _mm512_reduce_max_ps(a); }
inline float reduce_min(F a) { return _mm512_reduce_min_ps(a); }
inline float reduce_halves(F a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
template <class Op>
inline F fold_each(const F* v, Op op) {
  F eight[8], four[4];
  for (int i = 0; i < 8; ++i) {
    const F a = v[2 * i], b = v[2 * i + 1];
    eight[i] = op(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  }
  for (int i = 0; i < 4; ++i) {
    const F a = eight[2 * i], b = eight[2 * i + 1];
    four[i] = op(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  }
  // In each quarter: two halves of one vector, then of another.
  const F c = op(_mm512_shuffle_ps(four[0], four[1], 0x44), _mm512_shuffle_ps(four[0], four[1], 0xEE));
  const F d = op(_mm512_shuffle_ps(four[2], four[3], 0x44), _mm512_shuffle_ps(four[2], four[3], 0xEE));
  const F all = op(_mm512_shuffle_ps(c, d, 0x88), _mm512_shuffle_ps(c, d, 0xDD));
  // Lane 4 q + j holds what came from vector 4 j + q.
  return _mm512_permutexvar_ps(_mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), all);
}
inline uint32_t equal_lanes(U a, U b) { return _mm512_cmpeq_epi32_mask(a, b); }

// Batches of eight counters, four of them interleaved or two: a round is a chain of three dependent operations.
constexpr int PHILOX = 32, PHILOX_FEW = 16;
template <int counters = PHILOX>
inline void philox(uint64_t block, uint32_t step, uint32_t slot, const uint32_t* key, uint32_t* out) {
  // As in simd_avx2.h: one counter per 64-bit lane, upper halves ignored.
  constexpr int xor3 = 0x96;
  const __m512i m0 = _mm512_set1_epi64(0xD2511F53), m1 = _mm512_set1_epi64(0xCD9E8D57);
  constexpr int batches = counters / 8;
  __m512i c[batches][4];
  for (int j = 0; j < batches; ++j) {
    c[j][0] = _mm512_add_epi64(_mm512_set1_epi64(static_cast<long long>(block + 8 * j)),
                               _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
    c[j][1] = _mm512_srli_epi64(c[j][0], 32);
    c[j][2] = _mm512_set1_epi64(step);
    c[j][3] = _mm512_set1_epi64(slot);
  }
  for (int round = 0; round < 10; ++round) {
    const __m512i k0 = _mm512_set1_epi32(static_cast<int>(key[2 * round]));
    const __m512i k1 = _mm512_set1_epi32(static_cast<int>(key[2 * round + 1]));
    for (int j = 0; j < batches; ++j) {
      const __m512i p0 = _mm512_mul_epu32(c[j][0], m0), p1 = _mm512_mul_epu32(c[j][2], m1);
      c[j][0] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), k0, c[j][1], xor3);
      c[j][2] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), k1, c[j][3], xor3);
      c[j][1] = p1;
      c[j][3] = p0;
    }
  }
  const __m512i first = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0);
  const __m512i second = _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4);
  for (int j = 0; j < batches; ++j) {
    const __m512i w01 = _mm512_mask_blend_epi32(0xAAAA, c[j][0], _mm512_slli_epi64(c[j][1], 32));
    const __m512i w23 = _mm512_mask_blend_epi32(0xAAAA, c[j][2], _mm512_slli_epi64(c[j][3], 32));
    store_u32(out + 32 * j, _mm512_permutex2var_epi64(w01, first, w23));
    store_u32(out + 32 * j + 16, _mm512_permutex2var_epi64(w01, second, w23));
  }
}

}  // namespace simd
