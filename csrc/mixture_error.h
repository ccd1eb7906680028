// Values in E4M3 and E5M2, and the sums of their relative errors in the order of numerics/metrics.py.
#pragma once

#include <type_traits>

#include "mixture_grid.h"

namespace simd {

// What is known of a strip's blocks before their values are read again.
struct Scaled {
  alignas(64) float scale[MAX_TILES];
  alignas(64) uint32_t exponent[MAX_TILES];  // of E4M3's scale
  alignas(64) uint32_t lowest[MAX_TILES];    // binade of E5M2's smallest normal, in units of E4M3's scale
  uint8_t kind[MAX_TILES];
};
// How many ways out a block's values need. Where all are normal in both formats and none is zero,
// the steps of the grids lie at the same place of every significand.
enum Kind : uint8_t { NOT_FINITE, ANY, NORMAL_IN_E5M2, NORMAL };
template <Kind kind>
using Is = std::integral_constant<Kind, kind>;

// Of each tile of a strip, in both formats; while they are added up, of each row of each tile.
struct Sums {
  alignas(64) float e4m3[STRIP_SUMS], e5m2[STRIP_SUMS];
};

constexpr uint32_t E4M3_LOWEST = 121u << 23;

// What moves a significand to where FP32's steps are those of the grid. Its last bits add 56, that is
// 8 * (256 - 121) modulo 256: with the binade, shifted, they make the lowest byte the code.
constexpr uint32_t E4M3_SHIFT = (127u + 23u - 3u) << 23 | 0x400000u | 56u;
constexpr uint32_t E5M2_SHIFT = (127u + 23u - 2u) << 23 | 0x400000u;

// E4M3's codes, in the lowest bytes, and relative errors in both formats; zeros have none.
struct Quantised {
  U codes;
  F e4m3, e5m2;
};

// Errors are in units of the binade, which are those of the scaled values: powers of two round
// nothing.
template <Kind kind, bool both>
SUBULP_FLAT Quantised quantise(F value, F factor, U lowest) {
  const F zero = f32(0.0f);
  const F t = mul(value, factor);
  const U mag = magnitude(t);
  const F fraction = as_f32(or_(and_(mag, u32(0x7FFFFFu)), u32(0x3F800000u)));
  const F inverse = div(f32(1.0f), fraction);
  const U exponent = and_(mag, u32(INFINITE));
  const U sign = and_(shr<24>(as_u32(t)), u32(0x80));
  const auto off = [&](F rounded) { return as_f32(magnitude(sub(fraction, rounded))); };
  if constexpr (kind == NORMAL) {
    const F four = as_f32(u32(E4M3_SHIFT)), five = as_f32(u32(E5M2_SHIFT));
    const F shifted = simd::add(fraction, four);
    const F error = mul(off(sub(shifted, four)), inverse);
    const U codes = or_(simd::add(as_u32(shifted), shr<20>(exponent)), sign);
    return {codes, error, both ? mul(off(sub(simd::add(fraction, five), five)), inverse) : zero};
  } else {
    // Of the value itself, which the scale may round to zero.
    const M some = greater(magnitude(value), u32(0));
    // Below 2^-37 all is zero in either format.
    const U binade = simd::max(exponent, u32(90u << 23));
    const auto round = [&](U at, uint32_t shift, F* error) {
      const F by = as_f32(simd::add(sub(at, binade), u32(shift)));
      const F shifted = simd::add(fraction, by), rounded = sub(shifted, by);
      // What is rounded to zero is off by all of itself.
      *error = add_where(some, zero, mul_where(greater(as_u32(rounded), u32(0)), off(rounded), inverse, f32(1.0f)));
      return as_u32(shifted);
    };
    const U at = simd::max(binade, u32(E4M3_LOWEST));
    Quantised q{u32(0), zero, zero};
    q.codes = or_(simd::add(round(at, E4M3_SHIFT, &q.e4m3), shr<20>(at)), sign);
    if constexpr (both) {
      const F five = as_f32(u32(E5M2_SHIFT));
      if constexpr (kind == NORMAL_IN_E5M2)
        q.e5m2 = add_where(some, zero, mul(off(sub(simd::add(fraction, five), five)), inverse));
      else
        round(simd::max(binade, lowest), E5M2_SHIFT, &q.e5m2);
    }
    return q;
  }
}

// Numbers that are looked at together for whether all are normal.
constexpr int64_t RUN = 128;

// A row of a block: codes, and its sums by lanes.
template <class Format, Kind kind, bool both>
SUBULP_FLAT void quantise_row(const char* from, int64_t columns, float scale, uint32_t lowest, uint8_t* to,
                              F (&of4)[PARTS], F (&of5)[PARTS]) {
  F sum4[PARTS], sum5[PARTS];
  for (int p = 0; p < PARTS; ++p) sum4[p] = sum5[p] = f32(0.0f);
  const F factor = f32(scale);
  const U least = u32(lowest);
  // Sums are found by numbers that the compiler knows: otherwise it keeps them in memory, and each sum
  // waits for the one before to be stored.
  const auto add = [&](int p, const Quantised& q) {
    sum4[p] = simd::add(sum4[p], q.e4m3);
    if (both) sum5[p] = simd::add(sum5[p], q.e5m2);
  };
  const auto run = [&](auto kind_of_run, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += ROW_LANES)
      for (int p = 0; p < PARTS; ++p) {
        const int64_t at = i + p * W;
        fetch_ahead(from + at * Format::bytes);
        const Quantised q =
            quantise<decltype(kind_of_run)::value, both>(Format::load(from + at * Format::bytes), factor, least);
        store_low_u8(to + at, q.codes);
        add(p, q);
      }
  };
  const int64_t i = columns / ROW_LANES * ROW_LANES;
  if (kind == NORMAL) {
    run(Is<NORMAL>(), 0, i);
  } else {
    // Most runs of a block of many numbers are normal though a few numbers are not.
    for (int64_t begin = 0; begin < i; begin += RUN) {
      const int64_t end = std::min(begin + RUN, i);
      U low = u32(~0u);
      for (int64_t at = begin; at < end; at += W)
        low = simd::min(low, magnitude(Format::load(from + at * Format::bytes)));
      const M below = greater(u32(E4M3_LOWEST), as_u32(mul(as_f32(low), factor)));
      if (count_nonzero(select(below, u32(1), u32(0)))) run(Is<kind>(), begin, end);
      else run(Is<NORMAL>(), begin, end);
    }
  }
  if (i < columns)
    for (int p = 0; p < PARTS; ++p) {
      const int64_t at = i + p * W;
      each_vector<Format>(from + at * Format::bytes, std::min<int64_t>(W, columns - at), [&](int64_t, F value, int n) {
        const Quantised q = quantise<ANY, both>(value, factor, least);
        store_each_u8(to + at, q.codes, n);
        add(p, q);
      });
    }
  for (int p = 0; p < PARTS; ++p) of4[p] = sum4[p], of5[p] = sum5[p];
}

// Lane b: the sum of the lanes of block b.
SUBULP_FLAT F sum_each(const F (&parts)[W][PARTS]) {
  static_assert(PARTS <= 2, "a vector is a half of the lanes, or all of them");
  const auto add = [](F a, F b) { return simd::add(a, b); };
  if (PARTS == 1) return fold_each(parts[0], add);
  F of[W];
  for (int b = 0; b < W; ++b) of[b] = add(parts[b][0], parts[b][PARTS - 1]);
  return fold_each(of, add);
}

// Adds up rows of sums by halves; what is missing counts as zero.
inline void add_rows(float* of_rows, int64_t rows, int64_t stride) {
  int64_t size = 1;
  while (size < rows) size *= 2;
  for (int64_t i = rows * stride; i < size * stride; i += W) store_f32(of_rows + i, f32(0.0f));
  for (; size > 1; size /= 2)
    for (int64_t i = 0; i < size / 2 * stride; i += W)
      store_f32(of_rows + i, simd::add(load_f32(of_rows + i), load_f32(of_rows + size / 2 * stride + i)));
}

// Codes of a strip's tiles in E4M3, and their sums of errors.
template <class Format, bool both>
inline void quantise_strip(const Strip& s, const char* x, uint8_t* codes, const Scaled& scaled, Sums* sums) {
  const F zero = f32(0.0f);
  const int64_t stride = Grid::parts(s.n, W) * W;
  const auto quantise_group = [&](int64_t r, int first, auto columns) {
    F sum4[W][PARTS], sum5[W][PARTS];
    const auto none = [&](int i) {
      for (int p = 0; p < PARTS; ++p) sum4[i][p] = sum5[i][p] = zero;
    };
    // Copies: for all that the compiler knows, the codes that are stored could be what is referred to.
    const int n = s.group(first);
    const int64_t step = s.tile_columns, begin = s.offset(r, first);
    const char* const from = x + begin * Format::bytes;
    uint8_t* const to = codes + begin;
    const Scaled* const of = &scaled;
    for (int i = n; i < W; ++i) none(i);
    for (int i = 0; i < n; ++i) {
      const int b = first + i;
      const auto row = [&](auto kind) {
        quantise_row<Format, decltype(kind)::value, both>(from + i * step * Format::bytes, columns(b), of->scale[b],
                                                          of->lowest[b], to + i * step, sum4[i], sum5[i]);
      };
      switch (of->kind[b]) {
        case ANY: row(Is<ANY>()); break;
        case NORMAL_IN_E5M2: row(Is<NORMAL_IN_E5M2>()); break;
        case NORMAL: row(Is<NORMAL>()); break;
        default: none(i);
      }
    }
    store_f32(sums->e4m3 + r * stride + first, sum_each(sum4));
    if constexpr (both) store_f32(sums->e5m2 + r * stride + first, sum_each(sum5));
  };
  with_columns(s, [&](auto columns) {
    for (int64_t r = 0; r < s.rows; ++r)
      for (int first = 0; first < s.n; first += W) quantise_group(r, first, columns);
  });
  add_rows(sums->e4m3, s.rows, stride);
  if constexpr (both) add_rows(sums->e5m2, s.rows, stride);
}

// Sum of numbers that lie in a row, by lanes.
inline float sum_of(const float* x, int64_t n) {
  alignas(64) float lanes[ROW_LANES] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i % ROW_LANES] += x[i];
  for (int half = ROW_LANES / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}
inline float sum_of_blocks(const float* x, int64_t n) {
  Buffer<float> sums(Grid::parts(n, TILE_COLUMNS));
  for (int64_t i = 0; i < sums.size(); ++i)
    sums[i] = sum_of(x + i * TILE_COLUMNS, std::min(TILE_COLUMNS, n - i * TILE_COLUMNS));
  return sum_of(sums.data(), sums.size());
}

}  // namespace simd
