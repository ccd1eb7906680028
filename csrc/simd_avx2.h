// Eight lanes of AVX2. Operations as in simd_plain.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace simd {

constexpr int W = 8;
using F = __m256;
using U = __m256i;
using M = __m256i;

inline F f32(float x) { return _mm256_set1_ps(x); }
inline U u32(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline F as_f32(U a) { return _mm256_castsi256_ps(a); }
inline U as_u32(F a) { return _mm256_castps_si256(a); }

inline F load_f32(const void* p) { return _mm256_loadu_ps(static_cast<const float*>(p)); }
inline U load_u32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline U load_u16(const void* p) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline U load_u8(const void* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
}
inline void store_f32(void* p, F a) { _mm256_storeu_ps(static_cast<float*>(p), a); }
inline void store_u32(void* p, U a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a); }
inline __m128i narrow_u16(U a) {
  // packus works within 128-bit halves; the permutation brings their results together.
  const __m256i packed = _mm256_packus_epi32(a, a);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
inline void store_u16(void* p, U a) { _mm_storeu_si128(static_cast<__m128i*>(p), narrow_u16(a)); }
inline __m128i narrow_u8(U a) {
  const __m128i words = narrow_u16(a);
  return _mm_packus_epi16(words, words);
}
inline void store_u8(void* p, U a) { _mm_storel_epi64(static_cast<__m128i*>(p), narrow_u8(a)); }

inline void store_low_u8(void* p, U a) { store_u8(p, _mm256_and_si256(a, u32(0xFF))); }

// FP16 in the lower halves of lanes, and FP32.
#define SUBULP_HALF_UNITS 1
inline F half_value(U code) { return _mm256_cvtph_ps(narrow_u16(code)); }
inline U half_nearest(F a) { return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
inline U half_cut(F a, F* value) {
  const __m128i halves = _mm256_cvtps_ph(a, _MM_FROUND_TO_ZERO);
  *value = _mm256_cvtph_ps(halves);
  return _mm256_cvtepu16_epi32(halves);
}
// FP16 in memory; what is stored, is returned.
inline F load_half(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
inline F store_half(void* p, F a) {
  const __m128i halves = _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(static_cast<__m128i*>(p), halves);
  return _mm256_cvtph_ps(halves);
}
inline bool any_nan(F a, F b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) != 0; }

inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F sqrt(F a) { return _mm256_sqrt_ps(a); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F zero_nan(F a) { return _mm256_and_ps(a, _mm256_cmp_ps(a, a, _CMP_ORD_Q)); }
inline F cvt_f32(U a) { return _mm256_cvtepi32_ps(a); }
inline U cvt_i32(F a) { return _mm256_cvttps_epi32(a); }
// Cut; from 0 to below 2^32.
inline U cvt_u32(F a) {
  // From 2^31 on without it, which has no bits to cut.
  const __m256 high = _mm256_cmp_ps(a, f32(2147483648.0f), _CMP_GE_OQ);
  const __m256i low = _mm256_cvttps_epi32(_mm256_sub_ps(a, _mm256_and_ps(high, f32(2147483648.0f))));
  return _mm256_xor_si256(low, _mm256_slli_epi32(_mm256_castps_si256(high), 31));
}

inline U add(U a, U b) { return _mm256_add_epi32(a, b); }
inline U sub(U a, U b) { return _mm256_sub_epi32(a, b); }
inline U and_(U a, U b) { return _mm256_and_si256(a, b); }
inline U or_(U a, U b) { return _mm256_or_si256(a, b); }
inline U min(U a, U b) { return _mm256_min_epu32(a, b); }
inline U max(U a, U b) { return _mm256_max_epu32(a, b); }
inline U shl(U a, U n) { return _mm256_sllv_epi32(a, n); }
inline U shr(U a, U n) { return _mm256_srlv_epi32(a, n); }
template <int n> inline U shl(U a) { return _mm256_slli_epi32(a, n); }
template <int n> inline U shr(U a) { return _mm256_srli_epi32(a, n); }

inline void load_split(const void* p, U* even, U* odd) {
  const U both = load_u32(p);
  *even = _mm256_slli_epi32(both, 16);
  *odd = _mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u)));
}
inline void store_split(void* p, U even, U odd) {
  store_u32(p, _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xAA));
}
inline void load_split_f32(const float* p, F* even, F* odd) {
  const F low = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + 8), 1);
  const F high = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p + 4)), _mm_loadu_ps(p + 12), 1);
  *even = _mm256_shuffle_ps(low, high, 0x88);
  *odd = _mm256_shuffle_ps(low, high, 0xDD);
}

inline U swap_bytes(U a) { return _mm256_or_si256(_mm256_slli_epi16(a, 8), _mm256_srli_epi16(a, 8)); }
inline U round_half_even_16(U a) {
  const U odd = _mm256_and_si256(_mm256_srli_epi32(a, 16), u32(1));
  return _mm256_add_epi32(_mm256_add_epi32(a, u32(0x7FFF)), odd);
}

inline M greater(U a, U b) { return _mm256_cmpgt_epi32(a, b); }
inline U select(M m, U a, U b) { return _mm256_blendv_epi8(b, a, m); }
inline F add_where(M m, F sum, F x) { return _mm256_add_ps(sum, _mm256_and_ps(x, _mm256_castsi256_ps(m))); }
inline F mul_where(M m, F a, F b, F other) {
  return _mm256_blendv_ps(other, _mm256_mul_ps(a, b), _mm256_castsi256_ps(m));
}
inline int count_nonzero(U a) {
  const U zero = _mm256_cmpeq_epi32(a, _mm256_setzero_si256());
  return 8 - __builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(zero))));
}
inline U add_carry(U n, U a, U b) {
  const U sum = add(a, b);
  // No carry exactly if the sum is still the larger one.
  const U none = _mm256_cmpeq_epi32(_mm256_max_epu32(sum, a), sum);
  return add(add(n, u32(1)), none);
}
inline U split_point(F t, U* whole) {
  // The nearest whole number first: the rest is between -1/2 and 1/2, which a signed conversion
  // takes (1/2 becomes 2^31 by overflow), and below zero it has no bits to cut.
  const U near = _mm256_cvtps_epi32(t);
  const F rest = sub(t, cvt_f32(near));
  *whole = sub(near, shr<31>(as_u32(rest)));
  return _mm256_cvttps_epi32(mul(rest, f32(4294967296.0f)));
}
inline bool any_at_least(U a, uint32_t bound) {
  return _mm256_movemask_epi8(_mm256_cmpeq_epi32(_mm256_max_epu32(a, u32(bound)), a)) != 0;
}
inline uint32_t reduce_max(U a) {
  alignas(32) uint32_t t[W];
  store_u32(t, a);
  uint32_t m = 0;
  for (uint32_t x : t) m = x > m ? x : m;
  return m;
}
inline float reduce_max(F a) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline float reduce_min(F a) {
  const __m128 four = _mm_min_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 two = _mm_min_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_min_ss(two, _mm_movehdup_ps(two)));
}
inline float reduce_halves(F a) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
template <class Op>
inline F fold_each(const F* v, Op op) {
  F four[4], two[2];
  for (int i = 0; i < 4; ++i) {
    const F a = v[2 * i], b = v[2 * i + 1];
    four[i] = op(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  }
  // In each half: two halves of one vector, then of another.
  for (int i = 0; i < 2; ++i) {
    const F a = four[2 * i], b = four[2 * i + 1];
    two[i] = op(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xEE));
  }
  const F all = op(_mm256_shuffle_ps(two[0], two[1], 0x88), _mm256_shuffle_ps(two[0], two[1], 0xDD));
  // Lane 4 h + j holds what came from vector 2 j + h.
  return _mm256_permutevar8x32_ps(all, _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0));
}
inline uint32_t equal_lanes(U a, U b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(a, b))));
}

// What the compiler may not move operations across.
inline void keep_apart(__m256i& a) {
#if defined(__GNUC__)
  asm("" : "+x"(a));
#else
  (void)a;
#endif
}

// Two batches of four counters, interleaved: a round is a chain of three operations.
constexpr int PHILOX = 8, PHILOX_FEW = 8;
template <int counters = PHILOX>
inline void philox(uint64_t block, uint32_t step, uint32_t slot, const uint32_t* key, uint32_t* out) {
  static_assert(counters == PHILOX);
  // One counter per 64-bit lane. _mm256_mul_epu32 reads low halves only, so the upper halves may
  // hold anything until the end.
  const __m256i m0 = _mm256_set1_epi64x(0xD2511F53), m1 = _mm256_set1_epi64x(0xCD9E8D57);
  __m256i c[2][4];
  for (int j = 0; j < 2; ++j) {
    c[j][0] = _mm256_add_epi64(_mm256_set1_epi64x(static_cast<long long>(block + 4 * j)),
                               _mm256_set_epi64x(3, 2, 1, 0));
    c[j][1] = _mm256_srli_epi64(c[j][0], 32);
    c[j][2] = _mm256_set1_epi64x(step);
    c[j][3] = _mm256_set1_epi64x(slot);
  }
  for (int round = 0; round < 10; ++round) {
    const __m256i k0 = _mm256_set1_epi32(static_cast<int>(key[2 * round]));
    const __m256i k1 = _mm256_set1_epi32(static_cast<int>(key[2 * round + 1]));
    for (int j = 0; j < 2; ++j) {
      const __m256i p0 = _mm256_mul_epu32(c[j][0], m0), p1 = _mm256_mul_epu32(c[j][2], m1);
      // Keys first: GCC would have them last, and each round one operation longer.
      __m256i a = _mm256_xor_si256(c[j][1], k0), b = _mm256_xor_si256(c[j][3], k1);
      keep_apart(a), keep_apart(b);
      c[j][0] = _mm256_xor_si256(_mm256_srli_epi64(p1, 32), a);
      c[j][2] = _mm256_xor_si256(_mm256_srli_epi64(p0, 32), b);
      c[j][1] = p1;
      c[j][3] = p0;
    }
  }
  for (int j = 0; j < 2; ++j) {
    const __m256i w01 = _mm256_blend_epi32(c[j][0], _mm256_slli_epi64(c[j][1], 32), 0xAA);
    const __m256i w23 = _mm256_blend_epi32(c[j][2], _mm256_slli_epi64(c[j][3], 32), 0xAA);
    const __m256i even = _mm256_unpacklo_epi64(w01, w23), odd = _mm256_unpackhi_epi64(w01, w23);
    store_u32(out + 16 * j, _mm256_permute2x128_si256(even, odd, 0x20));
    store_u32(out + 16 * j + 8, _mm256_permute2x128_si256(even, odd, 0x31));
  }
}

}  // namespace simd
