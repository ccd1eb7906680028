// Narrow formats in vector registers: decode to FP32, encode by nearest-even or from random bits.
// The algorithm of numerics/rounding.py: a code and a 32-bit fraction of the step to the next code;
// adding random bits to the fraction and keeping the carry rounds. Values are FP32 lanes, codes 32-bit
// lanes.
#pragma once

#include "subulp.h"

// A call would pass vectors through memory. Arrays are there already, and all in one piece they take
// the compiler minutes.
#if defined(SUBULP_VECTORS_ARE_ARRAYS)
#define SUBULP_FLAT inline
#else
#define SUBULP_FLAT __attribute__((always_inline)) inline
#endif

namespace simd {

constexpr uint32_t MAGNITUDE = 0x7FFFFFFFu;
constexpr uint32_t INFINITE = 0x7F800000u;
constexpr uint32_t QUIET_NAN = 0x7FC00000u;

// A magnitude on the line of codes.
struct Position {
  U code;
  U fraction;
};

SUBULP_FLAT U magnitude(F x) { return and_(as_u32(x), u32(MAGNITUDE)); }

// FP32 itself, so that a pass can be written once.
struct Fp32 {
  static constexpr int bytes = 4;
  static constexpr uint32_t max_code = 0x7F7FFFFF;
  static SUBULP_FLAT F load(const char* p) { return load_f32(p); }
  static SUBULP_FLAT void store(char* p, F x) { store_f32(p, x); }
};

// BF16: its line of codes is FP32's own bit pattern, cut after 16 bits.
struct Bf16 {
  static constexpr int bytes = 2;
  static constexpr int random_width = 16;
  static constexpr uint32_t max_code = 0x7F7F;

  static SUBULP_FLAT U load_code(const char* p) { return load_u16(p); }
  static SUBULP_FLAT F value(U code) { return as_f32(shl<16>(code)); }
  static SUBULP_FLAT F load(const char* p) { return value(load_u16(p)); }

  // NaN becomes the one quiet NaN, whose payload survives the cut.
  static SUBULP_FLAT U quiet(F x) {
    const U mag = magnitude(x);
    return select(greater(mag, u32(INFINITE)), u32(QUIET_NAN), mag);
  }
  // Results stand in the upper half of a lane; the lower half is undefined.
  static SUBULP_FLAT U finish_high(U rounded, U mag, F x) {
    const U saturated = min(rounded, u32(0x7F7FFFFFu));
    const U r = select(greater(mag, u32(INFINITE - 1)), mag, saturated);
    return or_(r, and_(as_u32(x), u32(0x80000000u)));
  }
  static SUBULP_FLAT U nearest_high(F x) {
    const U mag = quiet(x);
    const U odd = and_(shr<16>(mag), u32(1));
    return finish_high(add(add(mag, u32(0x7FFF)), odd), mag, x);
  }
  static SUBULP_FLAT U stochastic_high(F x, U bits) {
    const U mag = quiet(x);
    return finish_high(add(mag, bits), mag, x);
  }
  static SUBULP_FLAT U nearest(F x) { return shr<16>(nearest_high(x)); }
  // `bits` in [0, 2^16).
  static SUBULP_FLAT U stochastic(F x, U bits) { return shr<16>(stochastic_high(x, bits)); }
  static SUBULP_FLAT void store_code(char* p, U code) { store_u16(p, code); }
  static SUBULP_FLAT void store(char* p, F x) { store_code(p, nearest(x)); }

  // Extra bits: head and k-bit tail, see numerics/extra_bits.py.
  static F join(U head, U tail, U k) {
    const U sixteen_minus_k = sub(u32(16), k);
    const U mask = sub(shl(u32(1), k), u32(1));
    const U code = sub(and_(head, u32(0x7FFF)), shr(tail, k));
    const U mag = or_(shl<16>(code), shl(and_(tail, mask), sixteen_minus_k));
    return as_f32(or_(mag, shl<16>(and_(head, u32(0x8000)))));
  }
  // `bits` in [0, 2^16), all zero to truncate.
  template <bool random>
  static U split(F x, U bits, U k, U* tail) {
    const U mag = quiet(x);
    const M special = greater(mag, u32(INFINITE - 1));
    const U drop = sub(u32(16), k);
    const U mask = sub(shl(u32(1), k), u32(1));
    U kept, code;
    if constexpr (random) {
      const U low = and_(bits, sub(shl(u32(1), drop), u32(1)));
      const U last = sub(shl(u32(max_code + 1), k), u32(1));
      kept = min(shr(add(mag, low), drop), last);
      code = min(shr(add(kept, shr(bits, drop)), k), u32(max_code));
    } else {
      kept = shr(mag, drop);
      code = shr(kept, k);
    }
    *tail = or_(and_(kept, mask), shl(sub(code, shr(kept, k)), k));
    *tail = select(special, u32(0), *tail);
    code = select(special, shr<16>(mag), code);
    return or_(code, and_(shr<16>(as_u32(x)), u32(0x8000)));
  }
};

// Formats with a narrower exponent than FP32's.
template <int exponent_bits, int mantissa_bits, bool has_infinity>
struct Small {
  static constexpr int width = 1 + exponent_bits + mantissa_bits;
  static constexpr int bytes = width / 8;
  static constexpr int random_width = 32;
  static constexpr int bias = (1 << (exponent_bits - 1)) - 1;
  static constexpr uint32_t top = ((1u << exponent_bits) - 1) << mantissa_bits;
  static constexpr uint32_t max_code = has_infinity ? top - 1 : top + (1u << mantissa_bits) - 2;
  static constexpr uint32_t nan_code = has_infinity ? top + (1u << (mantissa_bits - 1)) : max_code + 1;
  static constexpr uint32_t infinity_code = has_infinity ? top : nan_code;
  static constexpr uint32_t sign_bit = 1u << (width - 1);
  // FP32 exponent field of the smallest normal.
  static constexpr uint32_t first_normal = 127 - bias + 1;

  static SUBULP_FLAT U load_code(const char* p) {
    if constexpr (bytes == 2) return load_u16(p);
    else return load_u8(p);
  }
  static SUBULP_FLAT void store_code(char* p, U code) {
    if constexpr (bytes == 2) store_u16(p, code);
    else store_u8(p, code);
  }

  static SUBULP_FLAT F value(U code) {
    const U mag = and_(code, u32(sign_bit - 1));
    // Normal codes differ from FP32 in the bias; the others count the smallest of them. (Shifted
    // into place they would be FP32's own subnormals, which processors multiply slowly.)
    const U normal = add(shl<23 - mantissa_bits>(mag), u32(static_cast<uint32_t>(127 - bias) << 23));
    const F small = mul(cvt_f32(mag), f32(1.0f / power_of_two(bias + mantissa_bits - 1)));
    const F scaled = as_f32(select(greater(u32(1u << mantissa_bits), mag), as_u32(small), normal));
    const U special = has_infinity ? or_(as_u32(scaled), u32(INFINITE)) : u32(QUIET_NAN);
    const U bits = select(greater(mag, u32(max_code)), special, as_u32(scaled));
    return as_f32(or_(bits, shl<32 - width>(and_(code, u32(sign_bit)))));
  }
  static SUBULP_FLAT F load(const char* p) { return value(load_code(p)); }

  // A magnitude in steps of the grid around it, below 2^(mantissa_bits + 1) and thus exact, and the
  // code of that binade's own zero. Infinities and NaN end beyond every code.
  struct Steps {
    F count;
    U base;
  };
  static SUBULP_FLAT Steps steps(U mag) {
    constexpr uint32_t lowest = first_normal << 23;
    const U binade = and_(max(mag, u32(lowest)), u32(INFINITE));
    const F unit = as_f32(sub(u32(static_cast<uint32_t>(254 + mantissa_bits) << 23), binade));
    return {mul(as_f32(mag), unit), shr<23 - mantissa_bits>(sub(binade, u32(lowest)))};
  }
  static SUBULP_FLAT Position position(U mag) {
    const Steps at = steps(mag);
    Position r;
    r.fraction = split_point(at.count, &r.code);
    r.code = add(r.code, at.base);
    return r;
  }
  static SUBULP_FLAT U finish(U code, U mag, F x) {
    U r = min(code, u32(max_code));
    r = select(greater(mag, u32(INFINITE - 1)), u32(infinity_code), r);
    if constexpr (infinity_code != nan_code) r = select(greater(mag, u32(INFINITE)), u32(nan_code), r);
    return or_(r, shr<32 - width>(and_(as_u32(x), u32(0x80000000u))));
  }
  static SUBULP_FLAT U nearest(F x) {
    const U mag = magnitude(x);
    const Steps at = steps(mag);
    // Where FP32's own steps are 1. The base is even: the tie goes where it goes for the whole code.
    const U rounded = as_u32(add(at.count, f32(12582912.0f)));
    return finish(add(sub(rounded, u32(0x4B400000u)), at.base), mag, x);
  }
  static SUBULP_FLAT U stochastic(F x, U bits) {
    const U mag = magnitude(x);
    const Position at = position(mag);
    return finish(add_carry(at.code, at.fraction, bits), mag, x);
  }
  static SUBULP_FLAT void store(char* p, F x) { store_code(p, nearest(x)); }

  static F join(U head, U tail, U k) {
    const U mag = and_(head, u32(sign_bit - 1));
    const U code = sub(mag, shr(tail, k));
    const U field = max(shr<mantissa_bits>(code), u32(1));
    const U step = shl<23>(sub(add(field, u32(127 - bias - mantissa_bits)), k));
    const F part = mul(cvt_f32(and_(tail, sub(shl(u32(1), k), u32(1)))), as_f32(step));
    const F whole = select_finite(mag, add(value(code), part), value(code));
    return as_f32(or_(as_u32(whole), shl<32 - width>(and_(head, u32(sign_bit)))));
  }
  template <bool random>
  static U split(F x, U bits, U k, U* tail) {
    const U mag = magnitude(x);
    const U drop = sub(u32(32), k);
    const U mask = sub(shl(u32(1), k), u32(1));
    Position at = position(mag);
    if constexpr (random) {
      const U low = and_(bits, sub(shl(u32(1), drop), u32(1)));
      at.code = add_carry(at.code, at.fraction, low);
      at.fraction = add(at.fraction, low);
    }
    U kept = shr(at.fraction, drop);
    kept = select(greater(at.code, u32(max_code)), mask, kept);
    at.code = min(at.code, u32(max_code));
    U code = at.code;
    if constexpr (random) code = min(add(code, shr(add(kept, shr(bits, drop)), k)), u32(max_code));
    *tail = or_(kept, shl(sub(code, at.code), k));
    *tail = select(greater(mag, u32(INFINITE - 1)), u32(0), *tail);
    return finish(code, mag, x);
  }

 private:
  static constexpr float power_of_two(int n) {
    float r = 1.0f;
    for (int i = 0; i < n; ++i) r *= 2.0f;
    return r;
  }
  static SUBULP_FLAT F select_finite(U mag, F finite, F special) {
    return as_f32(select(greater(mag, u32(max_code)), as_u32(special), as_u32(finite)));
  }
};

using Fp16 = Small<5, 10, true>;
using E4m3 = Small<4, 3, false>;
using E5m2 = Small<5, 2, true>;

}  // namespace simd
