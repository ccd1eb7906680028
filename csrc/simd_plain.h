// Vectors of eight lanes as plain arrays: any compiler, any processor (NEON and SSE2 by the
// compiler's own vectoriser). The meaning of every operation of simd_avx2.h and simd_avx512.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define SUBULP_VECTORS_ARE_ARRAYS

namespace simd {

constexpr int W = 8;
struct F { float v[W]; };
struct U { uint32_t v[W]; };
struct M { bool v[W]; };

#define SUBULP_LANES for (int i = 0; i < W; ++i)

template <class R, class Op>
inline R lanes(Op op) {
  R r;
  SUBULP_LANES r.v[i] = op(i);
  return r;
}

inline F f32(float x) { return lanes<F>([&](int) { return x; }); }
inline U u32(uint32_t x) { return lanes<U>([&](int) { return x; }); }
inline F as_f32(U a) { F r; std::memcpy(&r, &a, sizeof r); return r; }
inline U as_u32(F a) { U r; std::memcpy(&r, &a, sizeof r); return r; }

inline F load_f32(const void* p) { F r; std::memcpy(&r, p, sizeof r); return r; }
inline U load_u32(const void* p) { U r; std::memcpy(&r, p, sizeof r); return r; }
inline U load_u16(const void* p) {
  uint16_t t[W];
  std::memcpy(t, p, sizeof t);
  return lanes<U>([&](int i) { return t[i]; });
}
inline U load_u8(const void* p) {
  uint8_t t[W];
  std::memcpy(t, p, sizeof t);
  return lanes<U>([&](int i) { return t[i]; });
}
inline void store_f32(void* p, F a) { std::memcpy(p, &a, sizeof a); }
inline void store_u32(void* p, U a) { std::memcpy(p, &a, sizeof a); }
inline void store_u16(void* p, U a) {
  uint16_t t[W];
  SUBULP_LANES t[i] = static_cast<uint16_t>(a.v[i]);
  std::memcpy(p, t, sizeof t);
}
inline void store_u8(void* p, U a) {
  uint8_t t[W];
  SUBULP_LANES t[i] = static_cast<uint8_t>(a.v[i]);
  std::memcpy(p, t, sizeof t);
}

// The lowest eight bits of each lane.
inline void store_low_u8(void* p, U a) { store_u8(p, a); }

inline F add(F a, F b) { return lanes<F>([&](int i) { return a.v[i] + b.v[i]; }); }
inline F sub(F a, F b) { return lanes<F>([&](int i) { return a.v[i] - b.v[i]; }); }
inline F mul(F a, F b) { return lanes<F>([&](int i) { return a.v[i] * b.v[i]; }); }
inline F div(F a, F b) { return lanes<F>([&](int i) { return a.v[i] / b.v[i]; }); }
inline F sqrt(F a) { return lanes<F>([&](int i) { return std::sqrt(a.v[i]); }); }
// The second operand where either is NaN.
inline F max(F a, F b) { return lanes<F>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline F min(F a, F b) { return lanes<F>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline F zero_nan(F a) { return lanes<F>([&](int i) { return a.v[i] == a.v[i] ? a.v[i] : 0.0f; }); }
inline F cvt_f32(U a) { return lanes<F>([&](int i) { return static_cast<float>(static_cast<int32_t>(a.v[i])); }); }
// Cut; from 0 to below 2^31.
inline U cvt_i32(F a) { return lanes<U>([&](int i) { return static_cast<uint32_t>(static_cast<int32_t>(a.v[i])); }); }

inline U add(U a, U b) { return lanes<U>([&](int i) { return a.v[i] + b.v[i]; }); }
inline U sub(U a, U b) { return lanes<U>([&](int i) { return a.v[i] - b.v[i]; }); }
inline U and_(U a, U b) { return lanes<U>([&](int i) { return a.v[i] & b.v[i]; }); }
inline U or_(U a, U b) { return lanes<U>([&](int i) { return a.v[i] | b.v[i]; }); }
inline U min(U a, U b) { return lanes<U>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline U max(U a, U b) { return lanes<U>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
// Shifts by 32 and more give 0.
inline U shl(U a, U n) { return lanes<U>([&](int i) { return n.v[i] < 32 ? a.v[i] << n.v[i] : 0; }); }
inline U shr(U a, U n) { return lanes<U>([&](int i) { return n.v[i] < 32 ? a.v[i] >> n.v[i] : 0; }); }
template <int n> inline U shl(U a) { return lanes<U>([&](int i) { return a.v[i] << n; }); }
template <int n> inline U shr(U a) { return lanes<U>([&](int i) { return a.v[i] >> n; }); }

// The halves of 2 W consecutive 16-bit values: even elements and odd ones, as the upper half of a
// 32-bit lane (load) or from there (store).
inline void load_split(const void* p, U* even, U* odd) {
  uint16_t t[2 * W];
  std::memcpy(t, p, sizeof t);
  SUBULP_LANES even->v[i] = uint32_t{t[2 * i]} << 16, odd->v[i] = uint32_t{t[2 * i + 1]} << 16;
}
inline void store_split(void* p, U even, U odd) {
  uint16_t t[2 * W];
  SUBULP_LANES t[2 * i] = static_cast<uint16_t>(even.v[i] >> 16), t[2 * i + 1] = static_cast<uint16_t>(odd.v[i] >> 16);
  std::memcpy(p, t, sizeof t);
}
inline void load_split_f32(const float* p, F* even, F* odd) {
  SUBULP_LANES even->v[i] = p[2 * i], odd->v[i] = p[2 * i + 1];
}

// The bytes of each 16-bit half, exchanged.
inline U swap_bytes(U a) {
  return lanes<U>([&](int i) { return (a.v[i] & 0x00FF00FFu) << 8 | (a.v[i] >> 8 & 0x00FF00FFu); });
}
// Adds what makes the upper 16 bits the number rounded to nearest, ties to even.
inline U round_half_even_16(U a) {
  return lanes<U>([&](int i) { return a.v[i] + 0x7FFFu + (a.v[i] >> 16 & 1u); });
}

// Both operands below 2^31.
inline M greater(U a, U b) { return lanes<M>([&](int i) { return a.v[i] > b.v[i]; }); }
inline U select(M m, U a, U b) { return lanes<U>([&](int i) { return m.v[i] ? a.v[i] : b.v[i]; }); }
// sum + x where m holds, elsewhere sum, which is no negative zero.
inline F add_where(M m, F sum, F x) { return lanes<F>([&](int i) { return m.v[i] ? sum.v[i] + x.v[i] : sum.v[i]; }); }
inline F mul_where(M m, F a, F b, F other) { return lanes<F>([&](int i) { return m.v[i] ? a.v[i] * b.v[i] : other.v[i]; }); }
inline int count_nonzero(U a) {
  int n = 0;
  SUBULP_LANES n += a.v[i] != 0;
  return n;
}
// n, and 1 more where a + b leaves 32 bits.
inline U add_carry(U n, U a, U b) { return lanes<U>([&](int i) { return n.v[i] + (a.v[i] + b.v[i] < a.v[i] ? 1u : 0u); }); }
// t from 0 to 2^16: the whole part, and the first 32 bits behind the point; of others, anything.
inline U split_point(F t, U* whole) {
  U fraction;
  SUBULP_LANES {
    const float x = t.v[i] < 65536.0f ? t.v[i] : 0.0f;
    const uint64_t fixed = static_cast<uint64_t>(static_cast<int64_t>(x * 4294967296.0f));
    whole->v[i] = static_cast<uint32_t>(fixed >> 32);
    fraction.v[i] = static_cast<uint32_t>(fixed);
  }
  return fraction;
}
// Whether any lane is at least `bound`, as unsigned numbers.
inline bool any_at_least(U a, uint32_t bound) {
  bool any = false;
  SUBULP_LANES any |= a.v[i] >= bound;
  return any;
}
inline uint32_t reduce_max(U a) {
  uint32_t m = 0;
  SUBULP_LANES m = a.v[i] > m ? a.v[i] : m;
  return m;
}
// Where NaN does not occur; of the two zeros, either.
inline float reduce_max(F a) {
  float m = a.v[0];
  SUBULP_LANES m = a.v[i] > m ? a.v[i] : m;
  return m;
}
inline float reduce_min(F a) {
  float m = a.v[0];
  SUBULP_LANES m = a.v[i] < m ? a.v[i] : m;
  return m;
}
// Adds the upper half of the lanes to the lower half until one is left.
inline float reduce_halves(F a) {
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
  return a.v[0];
}
// Of W vectors: lane i of the result is vector i, folded like reduce_halves by `op`.
template <class Op>
inline F fold_each(const F* v, Op op) {
  F r;
  SUBULP_LANES {
    F a = v[i];
    for (int half = W / 2; half; half /= 2) {
      F upper = a;
      for (int j = 0; j < half; ++j) upper.v[j] = a.v[j + half];
      a = op(a, upper);
    }
    r.v[i] = a.v[0];
  }
  return r;
}
// A bit for each lane in which both are the same.
inline uint32_t equal_lanes(U a, U b) {
  uint32_t r = 0;
  SUBULP_LANES r |= static_cast<uint32_t>(a.v[i] == b.v[i]) << i;
  return r;
}

// Philox4x32-10 for PHILOX consecutive counters, or PHILOX_FEW: four words each, in counter order.
constexpr int PHILOX = 1, PHILOX_FEW = 1;
template <int counters = PHILOX>
inline void philox(uint64_t block, uint32_t step, uint32_t slot, const uint32_t* key, uint32_t* out) {
  static_assert(counters == PHILOX);
  uint32_t c0 = static_cast<uint32_t>(block), c1 = static_cast<uint32_t>(block >> 32);
  uint32_t c2 = step, c3 = slot;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key[2 * round];
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key[2 * round + 1];
    c3 = static_cast<uint32_t>(p0);
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

#undef SUBULP_LANES

}  // namespace simd
