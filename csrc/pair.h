// Two vectors at a time: how 2 W consecutive elements of a stream come into registers and go back.
//
// All streams of a pass use the same arrangement, so that lanes stay paired. Consecutive puts W
// elements into each register. SplitBf16 puts even elements into one and odd ones into the other:
// a BF16 value is the upper half of an FP32 one, so decoding is one operation a register and
// packing one and a half, where zero-extending and packing in order takes three times as many.
#pragma once

#include <type_traits>

#include "codec.h"

namespace simd {

constexpr int W2 = 2 * W;
struct F2 { F a, b; };
struct U2 { U a, b; };

template <class Format>
struct Consecutive {
  using Base = Format;
  static constexpr int bytes = Format::bytes;
  // Whether a step looks at all that it stores at once; otherwise each pair is looked at where it is stored.
  static constexpr bool looks_once = false;

  static SUBULP_FLAT F2 load(const char* p) {
#if defined(SUBULP_HALF_UNITS)
    if constexpr (std::is_same_v<Format, Fp16>) {
      // The unit makes signalling NaN quiet.
      const F2 x = {load_half(p), load_half(p + 2 * W)};
      if (__builtin_expect(!any_nan(x.a, x.b), 1)) return x;
    }
#endif
    return {Format::load(p), Format::load(p + W * bytes)};
  }
  static SUBULP_FLAT F2 floats(const float* p) { return {load_f32(p), load_f32(p + W)}; }
  static SUBULP_FLAT U2 words(const uint32_t* p) { return {load_u32(p), load_u32(p + W)}; }
  // Random bits of Format::random_width bits, and the same with their halves swapped.
  static SUBULP_FLAT U2 random(const char* p) {
    if constexpr (Format::random_width == 16) return {load_u16(p), load_u16(p + 2 * W)};
    else return {load_u32(p), load_u32(p + 4 * W)};
  }
  static SUBULP_FLAT U2 swapped(const char* p) {
    static_assert(Format::random_width == 32);
    const U2 r = random(p);
    return {or_(shl<16>(r.a), shr<16>(r.a)), or_(shl<16>(r.b), shr<16>(r.b))};
  }
  // Rounds, stores, and returns the values stored.
  template <bool careful>
  static SUBULP_FLAT F2 store_nearest(char* p, F2 x) {
    if constexpr (bytes == 4) {
      store_f32(p, x.a);
      store_f32(p + W * bytes, x.b);
      return x;
    } else {
      if constexpr (Format::has_ordinary)
        if (__builtin_expect(ordinary(x), 1)) return {Format::store_ordinary(p, x.a), Format::store_ordinary(p + W * bytes, x.b)};
      return {Format::store(p, x.a), Format::store(p + W * bytes, x.b)};
    }
  }
  // Stores the heads and returns the tails, see Format::split().
  template <bool signed_tails, bool random>
  static SUBULP_FLAT U2 split(char* p, F2 x, U2 bits, U k) {
    U2 tail;
    if constexpr (Format::has_ordinary) {
      if (__builtin_expect(ordinary(x), 1)) {
        store_code(p, {Format::template split_ordinary<signed_tails, random>(x.a, bits.a, k, &tail.a),
                       Format::template split_ordinary<signed_tails, random>(x.b, bits.b, k, &tail.b)});
        return tail;
      }
    }
    store_code(p, {Format::template split<signed_tails, random>(x.a, bits.a, k, &tail.a),
                   Format::template split<signed_tails, random>(x.b, bits.b, k, &tail.b)});
    return tail;
  }
  template <bool careful>
  static SUBULP_FLAT void store_stochastic(char* p, F2 x, U2 bits) {
    if constexpr (Format::has_ordinary)
      if (__builtin_expect(ordinary(x), 1))
        return store_code(p, {Format::stochastic_ordinary(x.a, bits.a), Format::stochastic_ordinary(x.b, bits.b)});
    store_code(p, {Format::stochastic(x.a, bits.a), Format::stochastic(x.b, bits.b)});
  }
  static SUBULP_FLAT U2 load_code(const char* p) { return {Format::load_code(p), Format::load_code(p + W * bytes)}; }
  static SUBULP_FLAT void store_code(char* p, U2 code) {
    Format::store_code(p, code.a);
    Format::store_code(p + W * bytes, code.b);
  }

 private:
  // Rare are others, and one question about a pair costs less than to be ready for them in each number.
  static SUBULP_FLAT bool ordinary(F2 x) { return !any_at_least(max(magnitude(x.a), magnitude(x.b)), Format::ordinary_end); }
};

struct SplitBf16 {
  using Base = Bf16;
  static constexpr int bytes = 2;
  static constexpr bool looks_once = true;

  static SUBULP_FLAT F2 load(const char* p) {
    U even, odd;
    load_split(p, &even, &odd);
    return {as_f32(even), as_f32(odd)};
  }
  static SUBULP_FLAT F2 floats(const float* p) {
    F2 r;
    load_split_f32(p, &r.a, &r.b);
    return r;
  }
  static SUBULP_FLAT U2 random(const char* p) {
    const U both = load_u32(p);
    return {and_(both, u32(0xFFFF)), shr<16>(both)};
  }
  static SUBULP_FLAT U2 swapped(const char* p) {
    const U both = swap_bytes(load_u32(p));
    return {and_(both, u32(0xFFFF)), shr<16>(both)};
  }
  // An ordinary value is finite and far enough from the largest one not to saturate: rounding is
  // one addition to its bits.
  static constexpr uint32_t ordinary_bound = 2 * 0x7F7F0000u;  // of bits shifted left by one

  template <bool careful>
  static SUBULP_FLAT F2 store_nearest(char* p, F2 x) {
    const U2 r = {nearest<careful>(x.a), nearest<careful>(x.b)};
    store_split(p, r.a, r.b);
    return {as_f32(and_(r.a, u32(0xFFFF0000u))), as_f32(and_(r.b, u32(0xFFFF0000u)))};
  }
  template <bool careful>
  static SUBULP_FLAT void store_stochastic(char* p, F2 x, U2 bits) {
    if constexpr (careful)
      store_split(p, Bf16::stochastic_high(x.a, bits.a), Bf16::stochastic_high(x.b, bits.b));
    else
      store_split(p, add(as_u32(x.a), bits.a), add(as_u32(x.b), bits.b));
  }

 private:
  template <bool careful>
  static SUBULP_FLAT U nearest(F x) {
    if constexpr (careful) return Bf16::nearest_high(x);
    return round_half_even_16(as_u32(x));
  }
};

SUBULP_FLAT F2 add(F2 x, F2 y) { return {add(x.a, y.a), add(x.b, y.b)}; }
SUBULP_FLAT F2 sub(F2 x, F2 y) { return {sub(x.a, y.a), sub(x.b, y.b)}; }
SUBULP_FLAT F2 mul(F2 x, F y) { return {mul(x.a, y), mul(x.b, y)}; }
SUBULP_FLAT F2 zero_nan(F2 x) { return {zero_nan(x.a), zero_nan(x.b)}; }

// The largest bits of the vectors, shifted left by one to drop the signs.
SUBULP_FLAT U worse(F2 x) {
  const U a = as_u32(x.a), b = as_u32(x.b);
  return max(add(a, a), add(b, b));
}
SUBULP_FLAT U worse(F2 x, F2 y) { return max(worse(x), worse(y)); }

}  // namespace simd
