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

// Extra bits, see numerics/extra_bits.py: how far from its head a k-bit tail is, in steps of 2^-k and in two's
// complement. It is below the head if its sign says so, or the bit beyond it, that the head was rounded up.
template <bool signed_tails, bool random>
SUBULP_FLAT U distance(U tail, U k) {
  if constexpr (signed_tails) return sub(tail, shl<1>(and_(tail, shl(u32(1), sub(k, u32(1))))));
  else if constexpr (random) return sub(tail, shl(shr(tail, k), add(k, u32(1))));
  else return tail;
}
// The code of a head and its tail, from a code and how many steps of 2^-k beyond it: the nearest head, the one before
// or, by `up` of k random bits, either.
template <bool signed_tails, bool random>
SUBULP_FLAT U head_of(U code, U steps, U up, U k, U* tail) {
  *tail = and_(steps, sub(shl(u32(1), k), u32(1)));
  const U cut = shr(steps, k);
  if constexpr (signed_tails) return add(code, shr(add(steps, shr<1>(shl(u32(1), k))), k));
  if constexpr (!random) return add(code, cut);
  const U rounded = shr(add(steps, up), k);
  *tail = or_(*tail, shl(sub(rounded, cut), k));
  return add(code, rounded);
}
// What is added to a number before its low `drop` bits are cut, to round it to nearest-even.
SUBULP_FLAT U nearest_increment(U x, U drop) {
  const U half = shr<1>(shl(u32(1), drop)), one = min(half, u32(1));
  return add(sub(half, one), and_(shr(x, drop), one));
}

// The rest beside a head, or zero where it is larger than half an ulp: then somebody has overwritten the head, see
// rest_of() in src/subulp/ops/step/storage.py.
template <class Format>
SUBULP_FLAT F believed(F head, F rest) {
  const F times = f32(static_cast<float>(2u << Format::mantissa_bits));
  const U binade = max(and_(as_u32(head), u32(INFINITE)), u32(Format::first_normal << 23));
  return as_f32(select(greater(magnitude(mul(rest, times)), binade), u32(0), as_u32(rest)));
}

// FP32 itself, so that a pass can be written once.
struct Fp32 {
  static constexpr bool has_ordinary = false;
  static constexpr int bytes = 4;
  static constexpr uint32_t max_code = 0x7F7FFFFF;
  static SUBULP_FLAT F load(const char* p) { return load_f32(p); }
  static SUBULP_FLAT void store(char* p, F x) { store_f32(p, x); }
};

// BF16: its line of codes is FP32's own bit pattern, cut after 16 bits.
struct Bf16 {
  static constexpr int bytes = 2;
  static constexpr int mantissa_bits = 7;
  static constexpr uint32_t first_normal = 1;
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
  // The same, but beyond the largest number lies infinity, as when torch rounds.
  static SUBULP_FLAT U unbounded_high(F x) {
    const U mag = quiet(x), rounded = add(add(mag, u32(0x7FFF)), and_(shr<16>(mag), u32(1)));
    return or_(rounded, and_(as_u32(x), u32(0x80000000u)));
  }
  static SUBULP_FLAT U stochastic_high(F x, U bits) {
    const U mag = quiet(x);
    return finish_high(add(mag, bits), mag, x);
  }
  static SUBULP_FLAT U nearest(F x) { return shr<16>(nearest_high(x)); }
  // `bits` in [0, 2^16).
  static SUBULP_FLAT U stochastic(F x, U bits) { return shr<16>(stochastic_high(x, bits)); }
  static SUBULP_FLAT void store_code(char* p, U code) { store_u16(p, code); }
  // Rounds, stores, and returns the value stored.
  static SUBULP_FLAT F store(char* p, F x) {
    const U high = nearest_high(x);
    store_code(p, shr<16>(high));
    return as_f32(and_(high, u32(0xFFFF0000u)));
  }

  // Extra bits: head and k-bit tail, see numerics/extra_bits.py. A tail that leads below zero, which no split makes,
  // gives zero.
  template <bool signed_tails, bool random>
  static SUBULP_FLAT F join(F head, U tail, U k) {
    const U mag = magnitude(head);
    tail = select(greater(mag, u32(INFINITE - 1)), u32(0), tail);
    U where = add(mag, shl(distance<signed_tails, random>(tail, k), sub(u32(16), k)));
    if constexpr (signed_tails || random) where = and_(where, sub(shr<31>(where), u32(1)));
    return as_f32(or_(where, and_(as_u32(head), u32(0x80000000u))));
  }
  // The head's code. `bits` in [0, 2^16).
  template <bool signed_tails, bool random>
  static SUBULP_FLAT U split(F x, U bits, U k, U* tail) {
    const U mag = quiet(x);
    const M special = greater(mag, u32(INFINITE - 1));
    const U drop = sub(u32(16), k);
    const U mask = sub(shl(u32(1), k), u32(1));
    U kept, code;
    const U low = random ? and_(bits, sub(shl(u32(1), drop), u32(1))) : nearest_increment(mag, drop);
    if constexpr (signed_tails) {
      const U half = shr<1>(shl(u32(1), k));
      kept = min(shr(add(mag, low), drop), sub(add(shl(u32(max_code), k), half), u32(1)));
      code = shr(add(kept, half), k);
    } else if constexpr (random) {
      const U last = sub(shl(u32(max_code + 1), k), u32(1));
      kept = min(shr(add(mag, low), drop), last);
      code = min(shr(add(kept, shr(bits, drop)), k), u32(max_code));
    } else {
      kept = shr(mag, drop);
      code = shr(kept, k);
    }
    *tail = and_(kept, mask);
    if constexpr (!signed_tails && random) *tail = or_(*tail, shl(sub(code, shr(kept, k)), k));
    *tail = select(special, u32(0), *tail);
    code = select(special, shr<16>(mag), code);
    return or_(code, and_(shr<16>(as_u32(x)), u32(0x8000)));
  }

  // Ordinary numbers, which no rounding takes beyond the largest one: they are finite, and signs stay where they are.
  static constexpr bool has_ordinary = true;
  static constexpr uint32_t ordinary_end = max_code << 16;
  static SUBULP_FLAT F store_ordinary(char* p, F x) {
    const U high = round_half_even_16(as_u32(x));
    store_code(p, shr<16>(high));
    return as_f32(and_(high, u32(0xFFFF0000u)));
  }
  static SUBULP_FLAT U stochastic_ordinary(F x, U bits) { return shr<16>(add(as_u32(x), bits)); }
  template <bool signed_tails, bool random>
  static SUBULP_FLAT U split_ordinary(F x, U bits, U k, U* tail) {
    const U drop = sub(u32(16), k);
    U wide = as_u32(x);
    if constexpr (random) wide = add(wide, and_(bits, sub(shl(u32(1), drop), u32(1))));
    else if constexpr (signed_tails) wide = add(wide, nearest_increment(wide, drop));
    return head_of<signed_tails, random>(u32(0), shr(wide, drop), shr(bits, drop), k, tail);
  }
};

// Formats with a narrower exponent than FP32's.
template <int exponent_bits, int mantissa_bits_, bool has_infinity>
struct Small {
  static constexpr int mantissa_bits = mantissa_bits_;
  static constexpr int width = 1 + exponent_bits + mantissa_bits;
  static constexpr int bytes = width / 8;
  static constexpr int random_width = 32;
  static constexpr int bias = (1 << (exponent_bits - 1)) - 1;
  static constexpr uint32_t top = ((1u << exponent_bits) - 1) << mantissa_bits;
  static constexpr uint32_t max_code = has_infinity ? top - 1 : top + (1u << mantissa_bits) - 2;
  static constexpr uint32_t nan_code = has_infinity ? top + (1u << (mantissa_bits - 1)) : max_code + 1;
  static constexpr uint32_t infinity_code = has_infinity ? top : nan_code;
  static constexpr uint32_t sign_bit = 1u << (width - 1);
  // What processors convert themselves; beyond the largest number they go to infinity, which finish() takes back.
  static constexpr bool is_half = exponent_bits == 5 && mantissa_bits == 10;
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
#if defined(SUBULP_HALF_UNITS)
    if constexpr (is_half) {
      // The unit makes signalling NaN quiet.
      const U bits = as_u32(half_value(code));
      const U nan = or_(or_(shl<13>(mag), u32(INFINITE)), and_(bits, u32(0x80000000u)));
      return as_f32(select(greater(mag, u32(infinity_code)), nan, bits));
    }
#endif
    // Normal codes differ from FP32 in the bias; the others count the smallest of them. (Shifted
    // into place they would be FP32's own subnormals, which processors multiply slowly.)
    const U normal = add(shl<23 - mantissa_bits>(mag), u32(static_cast<uint32_t>(127 - bias) << 23));
    const F small = mul(cvt_f32(mag), f32(1.0f / power_of_two(bias + mantissa_bits - 1)));
    const F scaled = as_f32(select(greater(u32(1u << mantissa_bits), mag), as_u32(small), normal));
    const U special = has_infinity ? or_(as_u32(scaled), u32(INFINITE)) : u32(QUIET_NAN);
    const U bits = select(greater(mag, u32(max_code)), special, as_u32(scaled));
    return as_f32(or_(bits, shl<32 - width>(and_(code, u32(sign_bit)))));
  }
  static SUBULP_FLAT F load(const char* p) {
#if defined(SUBULP_HALF_UNITS)
    if constexpr (is_half) {
      // The unit makes signalling NaN quiet.
      const F x = load_half(p);
      if (__builtin_expect(!any_nan(x, x), 1)) return x;
    }
#endif
    return value(load_code(p));
  }

  // The exponent of a value's grid, where FP32 has it.
  static SUBULP_FLAT U binade_of(U bits) { return max(and_(bits, u32(INFINITE)), u32(first_normal << 23)); }
  // A magnitude in steps of the grid around it, below 2^(mantissa_bits + 1) and thus exact, and the
  // code of that binade's own zero. Infinities and NaN end beyond every code.
  struct Steps {
    F count;
    U base;
  };
  static SUBULP_FLAT Steps steps(U mag) {
    const U binade = binade_of(mag);
    const F unit = as_f32(sub(u32(static_cast<uint32_t>(254 + mantissa_bits) << 23), binade));
    return {mul(as_f32(mag), unit), shr<23 - mantissa_bits>(sub(binade, u32(first_normal << 23)))};
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
#if defined(SUBULP_HALF_UNITS)
    if constexpr (is_half) return finish(half_nearest(as_f32(mag)), mag, x);
#endif
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
  // Rounds, stores, and returns the value stored.
  static SUBULP_FLAT F store(char* p, F x) {
    const U code = nearest(x);
    store_code(p, code);
    return value(code);
  }

  // Extra bits: head and k-bit tail, as of BF16. The sum is exact, or rounded once if it has more bits than FP32.
  template <bool signed_tails, bool random>
  static SUBULP_FLAT F join(F head, U tail, U k) {
    const U sign = and_(as_u32(head), u32(0x80000000u)), far = distance<signed_tails, random>(tail, k);
    const U finer = shl<23>(add(k, u32(mantissa_bits)));
    if constexpr (!signed_tails && !random) {
      const F rest = mul(cvt_f32(far), as_f32(sub(binade_of(as_u32(head)), finer)));
      return add(head, as_f32(or_(as_u32(rest), sign)));
    }
    // Below a head that begins its binade, steps are those of the binade below.
    const U mag = magnitude(head), binade = binade_of(sub(mag, shr<31>(far)));
    const F sum = add(as_f32(mag), mul(cvt_f32(far), as_f32(sub(binade, finer))));
    return as_f32(or_(as_u32(max(f32(0.0f), sum)), sign));
  }
  // How far a number is beyond the head that it was cut to, where 2^k is the distance to the next.
  static SUBULP_FLAT F rest_in_steps(F x, F head, U k) {
    const U steps = add(u32(static_cast<uint32_t>(254 + mantissa_bits) << 23), shl<23>(k));
    return mul(as_f32(magnitude(sub(x, head))), as_f32(sub(steps, binade_of(as_u32(head)))));
  }
  // The head's code.
  template <bool signed_tails, bool random>
  static SUBULP_FLAT U split(F x, U bits, U k, U* tail) {
    const U mag = magnitude(x);
    const U drop = sub(u32(32), k);
    const U mask = sub(shl(u32(1), k), u32(1));
    Position at = position(mag);
    if constexpr (!signed_tails && !random) {
      const U code = finish(at.code, mag, x);
      // Beyond the largest number all bits of the tail are set.
      const U steps = cvt_i32(min(rest_in_steps(x, value(code), k), cvt_f32(mask)));
      *tail = select(greater(mag, u32(INFINITE - 1)), u32(0), steps);
      return code;
    }
    const U low = random ? and_(bits, sub(shl(u32(1), drop), u32(1))) : nearest_increment(at.fraction, drop);
    at.code = add_carry(at.code, at.fraction, low);
    at.fraction = add(at.fraction, low);
    if constexpr (signed_tails) {
      const U half = shr<1>(shl(u32(1), k)), last = sub(add(shl(u32(max_code), k), half), u32(1));
      const U inside = min(add(shl(at.code, k), shr(at.fraction, drop)), last);
      const U kept = select(greater(at.code, u32(max_code)), last, inside);
      *tail = select(greater(mag, u32(INFINITE - 1)), u32(0), and_(kept, mask));
      return finish(shr(add(kept, half), k), mag, x);
    }
    U kept = shr(at.fraction, drop);
    kept = select(greater(at.code, u32(max_code)), mask, kept);
    at.code = min(at.code, u32(max_code));
    const U code = min(add(at.code, shr(add(kept, shr(bits, drop)), k)), u32(max_code));
    *tail = or_(kept, shl(sub(code, at.code), k));
    *tail = select(greater(mag, u32(INFINITE - 1)), u32(0), *tail);
    return finish(code, mag, x);
  }

  // Ordinary numbers, as of BF16, by the processor's own conversions.
#if defined(SUBULP_HALF_UNITS)
  static constexpr bool has_ordinary = is_half;
  static constexpr uint32_t ordinary_end = (max_code << (23 - mantissa_bits)) + ((first_normal - 1) << 23);
  static SUBULP_FLAT F store_ordinary(char* p, F x) { return store_half(p, x); }
  static SUBULP_FLAT U stochastic_ordinary(F x, U bits) {
    F head;
    const U code = half_cut(x, &head);
    return add_carry(code, cvt_u32(rest_in_steps(x, head, u32(32))), bits);
  }
  template <bool signed_tails, bool random>
  static SUBULP_FLAT U split_ordinary(F x, U bits, U k, U* tail) {
    F head;
    const U code = half_cut(x, &head);
    if constexpr (!signed_tails && !random) {
      *tail = cvt_i32(rest_in_steps(x, head, k));
      return code;
    }
    const U fraction = cvt_u32(rest_in_steps(x, head, u32(32)));
    const U drop = sub(u32(32), k), mask = sub(shl(u32(1), drop), u32(1));
    const U low = random ? and_(bits, mask) : nearest_increment(fraction, drop);
    const U steps = add(shr(fraction, drop), shr(add(and_(fraction, mask), low), drop));
    return head_of<signed_tails, random>(code, steps, shr(bits, drop), k, tail);
  }
#else
  static constexpr bool has_ordinary = false;
#endif

 private:
  static constexpr float power_of_two(int n) {
    float r = 1.0f;
    for (int i = 0; i < n; ++i) r *= 2.0f;
    return r;
  }
};

using Fp16 = Small<5, 10, true>;
using E4m3 = Small<4, 3, false>;
using E5m2 = Small<5, 2, true>;

// Rounds one vector and stores it, ordinary numbers by the short way; see Consecutive for two vectors.
template <class Format>
SUBULP_FLAT void store_nearest(char* p, F x) {
  if constexpr (Format::has_ordinary)
    if (__builtin_expect(!any_at_least(magnitude(x), Format::ordinary_end), 1)) return (void)Format::store_ordinary(p, x);
  Format::store(p, x);
}
template <class Format>
SUBULP_FLAT void store_stochastic(char* p, F x, U bits) {
  if constexpr (Format::has_ordinary)
    if (__builtin_expect(!any_at_least(magnitude(x), Format::ordinary_end), 1))
      return Format::store_code(p, Format::stochastic_ordinary(x, bits));
  Format::store_code(p, Format::stochastic(x, bits));
}

inline int format_bytes(int format) {
  switch (format) {
#define SUBULP_CASE(code, name, Format) case SUBULP_##code: return Format::bytes;
    SUBULP_FLOATS(SUBULP_CASE)
#undef SUBULP_CASE
    default: return 0;
  }
}

}  // namespace simd
