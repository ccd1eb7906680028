// The passes of a mixture whose formats and metric are arguments: magnitudes, sums of errors, codes, values.
// What happens between them is in ops/mixture/passes.py. The papers' recipes have a fused pass (mixture.h).
#pragma once

#include "mixture.h"

namespace simd {

// A narrow format, as rounding needs it.
struct AnyFormat {
  uint32_t lowest;  // FP32 exponent field of the smallest normal, in place
  uint32_t shift;   // moves a significand to where FP32's steps are those of the grid
  uint32_t down;    // from FP32's mantissa to the format's
  uint32_t sign;    // place of the sign bit

  explicit AnyFormat(const subulp_narrow& f)
      : lowest(static_cast<uint32_t>(f.first_normal) << 23),
        shift(static_cast<uint32_t>(127 + 23 - f.mantissa_bits) << 23 | 0x400000u),
        down(static_cast<uint32_t>(23 - f.mantissa_bits)),
        sign(static_cast<uint32_t>(f.sign_bit)) {}
};

struct Rounded {
  U code, count;    // with and without the sign
  F error;          // relative
};

// Of scaled values; magnitudes never reach beyond the largest value, which scales see to. Errors are in units
// of the binade, as in mixture_error.h.
SUBULP_FLAT Rounded round_any(F t, const AnyFormat& f) {
  const U mag = magnitude(t);
  const F fraction = as_f32(or_(and_(mag, u32(0x7FFFFFu)), u32(0x3F800000u)));
  // Below 2^-37 all is zero in any format that fits a byte.
  const U binade = simd::max(and_(mag, u32(INFINITE)), u32(90u << 23));
  const U at = simd::max(binade, u32(f.lowest));
  const F by = as_f32(simd::add(sub(at, binade), u32(f.shift)));
  const F shifted = simd::add(fraction, by), rounded = sub(shifted, by);
  const U count = and_(as_u32(shifted), u32(0x3FFFFFu));
  const U code = simd::add(shr(sub(at, u32(f.lowest)), u32(f.down)), count);
  const U sign = and_(shr(as_u32(t), u32(31 - f.sign)), u32(1u << f.sign));
  const F off = mul(as_f32(magnitude(sub(fraction, rounded))), div(f32(1.0f), fraction));
  return {or_(code, sign), count, off};
}

// What a value adds to the sum of a metric; zeros add nothing.
template <int metric>
SUBULP_FLAT F term_of(F value, F factor, const AnyFormat& f) {
  const Rounded r = round_any(mul(value, factor), f);
  const M kept = greater(r.count, u32(0));
  const U one = as_u32(f32(1.0f));
  U term;
  if constexpr (metric == SUBULP_UNDERFLOW) term = select(kept, u32(0), one);
  else if constexpr (metric == SUBULP_SQUARED) term = select(kept, as_u32(mul(r.error, r.error)), one);
  else term = select(kept, as_u32(r.error), one);
  // Of the value itself, which the scale may round to zero.
  return as_f32(select(greater(magnitude(value), u32(0)), term, u32(0)));
}

// Sums of a strip's tiles in one format; `factors` are those of its first block on.
template <class Format, int metric>
inline void error_strip(const Strip& s, const char* x, const AnyFormat& f, const float* factors, float* sums) {
  const F zero = f32(0.0f);
  const int64_t stride = Grid::parts(s.n, W) * W;
  const bool in_parts = s.tile_columns < s.block_width;
  for (int64_t r = 0; r < s.rows; ++r)
    for (int first = 0; first < s.n; first += W) {
      F lanes[W][PARTS];
      for (int i = 0; i < W; ++i) {
        for (int p = 0; p < PARTS; ++p) lanes[i][p] = zero;
        const int b = first + i;
        if (b >= s.n) continue;
        // Tiles of one block share a scale.
        const float scale = factors[in_parts ? 0 : b];
        if (!(scale > 0.0f)) continue;
        const char* const from = x + s.offset(r, b) * Format::bytes;
        each_vector<Format>(from, s.columns_of(b), [&](int64_t at, F value, int) {
          F& lane = lanes[i][at / W % PARTS];
          lane = simd::add(lane, term_of<metric>(value, f32(scale), f));
        });
      }
      store_f32(sums + r * stride + first, sum_each(lanes));
    }
  add_rows(sums, s.rows, stride);
}

template <class Format, int metric>
inline void sum_errors(const subulp_blocks& m, int threads) {
  const IeeeMode ieee;
  const Grid g(m);
  const char* const x = static_cast<const char*>(m.x);
  const int64_t blocks = g.blocks();
  Buffer<float> of_tiles(g.tiles());
  for (int32_t k = 0; k < m.count; ++k) {
    const AnyFormat f(m.formats[k]);
    const float* const factors = m.factors + k * blocks;
    float* const sums = m.sums + k * blocks;
    each_strip(g, threads, [&](const Strip& s) {
      alignas(64) float of_rows[STRIP_SUMS];
      error_strip<Format, metric>(s, x, f, factors + s.block, of_rows);
      for (int b = 0; b < s.n; b += W)
        store_each(of_tiles.data() + s.tile + b, s.rows ? load_f32(of_rows + b) : f32(0.0f), s.group(b));
    });
    if (g.one_tile_each()) {
      std::copy(of_tiles.data(), of_tiles.data() + blocks, sums);
      continue;
    }
    Buffer<float> parts(g.tiles_down * g.tiles_across);
    for (int64_t b = 0; b < blocks; ++b) {
      tiles_of(g, b, [&](int64_t tile, int64_t place) { parts[place] = of_tiles[tile]; });
      sums[b] = sum_of(parts.data(), parts.size());
    }
  }
}

template <class Format>
inline int measure_blocks(const subulp_blocks& m, int threads) {
  const IeeeMode ieee;
  const Grid g(m);
  Evidence<uint32_t> of_tiles(g.tiles());
  measure<Format>(g, static_cast<const char*>(m.x), threads, of_tiles);
  Evidence<int64_t> of_blocks(g.one_tile_each() ? 0 : g.blocks());
  const bool single = g.one_tile_each();
  if (!single) gather(g, of_tiles, of_blocks);
  for (int64_t b = 0; b < g.blocks(); ++b) {
    const uint32_t smallest = single ? of_tiles.smallest[b] : of_blocks.smallest[b];
    m.amax[b] = float_of(std::min(single ? of_tiles.amax[b] : of_blocks.amax[b], INFINITE));
    m.smallest[b] = float_of(smallest && smallest < INFINITE ? smallest : INFINITE);
    m.counts[b] = single ? of_tiles.counted[b] : of_blocks.counted[b];
  }
  return 0;
}

template <class Format>
inline int encode_blocks(const subulp_blocks& m, int threads) {
  const Grid g(m);
  const char* const x = static_cast<const char*>(m.x);
  const int64_t blocks = g.blocks();
  each_strip(g, threads, [&](const Strip& s) {
    for (int b = 0; b < s.n; ++b) {
      const int64_t block = s.block + b;
      const uint8_t type = m.types[block];
      if (type >= m.count) {
        encode_wide_tile<Format>(s, b, x, m.codes, m.wide + m.offsets[block]);
        continue;
      }
      const AnyFormat f(m.formats[type]);
      const F factor = f32(m.factors[type * blocks + block]);
      const Tile t = s.tile_of(b);
      for (int64_t r = 0; r < t.rows; ++r) {
        const int64_t at = s.offset(r, b);
        each_vector<Format>(x + at * Format::bytes, t.columns, [&](int64_t i, F value, int n) {
          store_each_u8(m.codes + at + i, round_any(mul(value, factor), f).code, n);
        });
      }
    }
  });
  return 0;
}

// `values` has 256 numbers for each format.
inline int run_blocks_decode(const subulp_blocks& m, const float* values, float* to, int threads) {
  const Grid g(m);
  each_strip(g, threads, [&](const Strip& s) {
    for (int b = 0; b < s.n; ++b) {
      const int64_t block = s.block + b;
      const uint8_t type = m.types[block];
      const Tile t = s.tile_of(b);
      if (type >= m.count) {
        decode_wide_tile<Fp32>(s, t, m.codes, m.wide + m.offsets[block] + t.place, m.dtype, reinterpret_cast<char*>(to));
        continue;
      }
      const float* const table = values + type * 256;
      const float factor = m.factors[block];
      for (int64_t r = 0; r < t.rows; ++r) {
        const int64_t at = s.offset(r, b);
        for (int64_t i = 0; i < t.columns; ++i) to[at + i] = table[m.codes[at + i]] * factor;
      }
    }
  });
  return 0;
}

template <class Format>
inline int errors_of(const subulp_blocks& m, int threads) {
  switch (m.metric) {
    case SUBULP_RELATIVE: sum_errors<Format, SUBULP_RELATIVE>(m, threads); return 0;
    case SUBULP_SQUARED: sum_errors<Format, SUBULP_SQUARED>(m, threads); return 0;
    case SUBULP_UNDERFLOW: sum_errors<Format, SUBULP_UNDERFLOW>(m, threads); return 0;
    default: return -1;
  }
}

#define SUBULP_OF_DTYPE(function)                       \
  switch (m.dtype) {                                    \
    case SUBULP_FP32: return function<Fp32>(m, threads); \
    case SUBULP_BF16: return function<Bf16>(m, threads); \
    case SUBULP_FP16: return function<Fp16>(m, threads); \
    default: return -1;                                 \
  }
inline int run_blocks_measure(const subulp_blocks& m, int threads) { SUBULP_OF_DTYPE(measure_blocks) }
inline int run_blocks_errors(const subulp_blocks& m, int threads) { SUBULP_OF_DTYPE(errors_of) }
inline int run_blocks_encode(const subulp_blocks& m, int threads) { SUBULP_OF_DTYPE(encode_blocks) }
#undef SUBULP_OF_DTYPE

}  // namespace simd
