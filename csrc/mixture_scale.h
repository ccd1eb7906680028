// Scales of blocks: the arithmetic of numerics/scaling.py, W blocks at a time.
#pragma once

#include "mixture_grid.h"

namespace simd {

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Exponents are held with this bias, so that comparisons of unsigned lanes order them; of what is
// stored, the lowest byte, it changes nothing.
constexpr uint32_t EXPONENT_BIAS = 256;
constexpr uint32_t NO_SCALE = EXPONENT_BIAS - 128, MAX_EXPONENT = EXPONENT_BIAS + 127;

// Mantissa (the pattern of a number in [1, 2)) and exponent of E4M3's largest value over magnitudes.
// E5M2's largest is 2^7 times that, so its mantissas are the same.
struct Ideal {
  U mantissa, exponent;

  explicit SUBULP_FLAT Ideal(U amax) {
    const M tiny = greater(u32(63u << 23), amax);
    const U whole = select(tiny, as_u32(mul(as_f32(amax), f32(0x1p64f))), amax);
    const U bits = as_u32(div(f32(448.0f), as_f32(whole)));
    mantissa = or_(and_(bits, u32(0x7FFFFFu)), u32(0x3F800000u));
    const U field = simd::add(shr<23>(bits), u32(EXPONENT_BIAS - 127));
    exponent = select(tiny, simd::add(field, u32(64)), field);
  }
};

SUBULP_FLAT F join_scale(U mantissa, U exponent) {
  const U fraction = and_(mantissa, u32(0x7FFFFFu));
  const U normal = or_(shl<23>(sub(exponent, u32(EXPONENT_BIAS - 127))), fraction);
  // The exponent -127: a subnormal number.
  const U lowest = shr<1>(or_(fraction, u32(0x800000u)));
  const U found = select(greater(exponent, u32(EXPONENT_BIAS - 127)), normal, lowest);
  return as_f32(select(greater(exponent, u32(NO_SCALE)), found, u32(0x3F800000u)));
}

// Exponents of E4M3's scales of blocks with these largest magnitudes, from the mantissas they share.
SUBULP_FLAT U block_exponents(U amax, U shared) {
  const Ideal own(amax);
  const U e = select(greater(shared, own.mantissa), sub(own.exponent, u32(1)), own.exponent);
  const U finite = select(greater(u32(INFINITE), amax), simd::min(e, u32(MAX_EXPONENT)), u32(NO_SCALE));
  return select(greater(amax, u32(0)), finite, u32(NO_SCALE));
}
// The same of E5M2's.
SUBULP_FLAT U e5m2_exponents(U e4m3) {
  const U e = simd::min(simd::add(e4m3, u32(7)), u32(MAX_EXPONENT));
  return select(greater(e4m3, u32(NO_SCALE)), e, u32(NO_SCALE));
}

// The mantissas that groups of blocks share.
struct Mantissas {
  const subulp_mixture& m;
  const Grid& g;

  int64_t group_of(int64_t block) const {
    if (m.scaling == SUBULP_AMAX) return block;
    if (m.scaling == SUBULP_E8M0) return 0;
    const int64_t groups_across = Grid::parts(g.across, m.group_columns);
    return block / g.across / m.group_rows * groups_across + block % g.across / m.group_columns;
  }
  int64_t groups() const {
    if (m.scaling == SUBULP_AMAX) return g.blocks();
    if (m.scaling == SUBULP_E8M0) return 1;
    return Grid::parts(g.down, m.group_rows) * Grid::parts(g.across, m.group_columns);
  }

  // Those of n blocks from `block` on; a single group needs no search.
  U of(int64_t block, int n, int64_t groups) const {
    if (groups == 1) return u32(bits_of(m.mantissa[0]));
    alignas(64) uint32_t found[W];
    for (int b = 0; b < W; ++b) found[b] = b < n ? bits_of(m.mantissa[group_of(block + b)]) : 0x3F800000u;
    return load_u32(found);
  }

  void compute(const Buffer<uint32_t>& amax) const {
    if (m.scaling == SUBULP_E8M0) {
      m.mantissa[0] = 1.0f;
      return;
    }
    const int64_t blocks = g.blocks(), count = groups();
    Buffer<uint32_t> largest(count);
    const auto counts = [](uint32_t a) { return a < INFINITE ? a : 0; };
    if (count == 1) {
      U most = u32(0);
      for (int64_t b = 0; b < blocks; b += W) {
        const U of = load_each(amax.data() + b, static_cast<int>(std::min<int64_t>(W, blocks - b)));
        most = simd::max(most, select(greater(u32(INFINITE), of), of, u32(0)));
      }
      largest[0] = reduce_max(most);
    } else {
      for (int64_t b = 0; b < blocks; ++b) {
        uint32_t& group = largest[group_of(b)];
        group = std::max(group, counts(amax[b]));
      }
    }
    for (int64_t i = 0; i < count; i += W) {
      const int n = static_cast<int>(std::min<int64_t>(W, count - i));
      const U of = load_each(largest.data() + i, n);
      const U found = select(greater(of, u32(0)), Ideal(of).mantissa, u32(0x3F800000u));
      store_each(m.mantissa + i, as_f32(found), n);
    }
  }
};

}  // namespace simd
