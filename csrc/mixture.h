// A matrix with each block in E4M3, E5M2 or BF16: scales, both candidates' errors, decision and codes.
// The definition is numerics/mixture.py, the order of sums that of numerics/metrics.py. Two reads: one
// for the largest magnitudes, since scales depend on their group's, and one for all the rest.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "buffer.h"
#include "codec.h"
#include "ieee_mode.h"
#include "rows.h"

namespace simd {

constexpr int64_t TILE_ROWS = 128, TILE_COLUMNS = 4096;
constexpr int32_t NO_SCALE = -128;

// Where blocks and their tiles lie.
struct Grid {
  int64_t rows, columns, block_rows, block_columns;
  int64_t down, across;              // blocks of the matrix
  int64_t tiles_down, tiles_across;  // tiles of a block
  int64_t bands, chunks, blocks_of_chunk;

  explicit Grid(const subulp_mixture& m)
      : rows(m.rows), columns(m.columns), block_rows(m.block_rows), block_columns(m.block_columns) {
    down = parts(rows, block_rows);
    across = parts(columns, block_columns);
    tiles_down = parts(block_rows, TILE_ROWS);
    tiles_across = parts(block_columns, TILE_COLUMNS);
    bands = down * tiles_down;
    // What one thread does at a time: a tile, or as many narrower ones.
    blocks_of_chunk = tiles_across > 1 ? 1 : std::max<int64_t>(1, TILE_COLUMNS / block_columns);
    chunks = parts(across, blocks_of_chunk) * tiles_across;
  }
  static int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }
  int64_t blocks() const { return down * across; }
  int64_t tiles() const { return blocks() * tiles_down * tiles_across; }
  bool one_tile_each() const { return tiles_down * tiles_across == 1; }
  int64_t height(int64_t block) const { return std::min(block_rows, rows - block / across * block_rows); }
  int64_t width(int64_t block) const { return std::min(block_columns, columns - block % across * block_columns); }
};

struct Tile {
  int64_t index, block;
  int64_t row, column;        // of its first element in the matrix
  int64_t rows, columns;
  int64_t place;              // of its first element in the block, row by row
  int64_t block_width;
};

template <class Work>
inline void each_tile(const Grid& g, int threads, Work work) {
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads) if (g.rows * g.columns > 16384 && threads > 1)
#endif
  {
    const IeeeMode ieee;
#if defined(_OPENMP)
#pragma omp for collapse(2) schedule(static)
#endif
    for (int64_t band = 0; band < g.bands; ++band)
      for (int64_t chunk = 0; chunk < g.chunks; ++chunk) {
        const int64_t i = band / g.tiles_down, a = band % g.tiles_down, c = chunk % g.tiles_across;
        const int64_t first = chunk / g.tiles_across * g.blocks_of_chunk;
        const int64_t row = i * g.block_rows + a * TILE_ROWS;
        const int64_t end = std::min({row + TILE_ROWS, (i + 1) * g.block_rows, g.rows});
        for (int64_t j = first; j < std::min(first + g.blocks_of_chunk, g.across); ++j) {
          Tile t;
          t.block = i * g.across + j;
          t.index = ((i * g.tiles_down + a) * g.across + j) * g.tiles_across + c;
          t.row = row;
          t.rows = std::max<int64_t>(0, end - row);
          t.column = j * g.block_columns + c * TILE_COLUMNS;
          const int64_t right = std::min({t.column + TILE_COLUMNS, (j + 1) * g.block_columns, g.columns});
          t.columns = std::max<int64_t>(0, right - t.column);
          t.block_width = std::min(g.block_columns, g.columns - j * g.block_columns);
          t.place = a * TILE_ROWS * t.block_width + c * TILE_COLUMNS;
          work(t);
        }
      }
  }
  (void)threads;
}

// Calls visit(i, values from element i on, elements that count); lanes past the end are zero.
template <class Format, class Visit>
SUBULP_FLAT void each_vector(const char* row, int64_t n, Visit visit) {
  int64_t i = 0;
  for (; i + W <= n; i += W) visit(i, Format::load(row + i * Format::bytes), W);
  if (i < n) {
    char tail[W * 4] = {};
    std::memcpy(tail, row + i * Format::bytes, static_cast<size_t>((n - i) * Format::bytes));
    visit(i, Format::load(tail), static_cast<int>(n - i));
  }
}

SUBULP_FLAT int count_nonzero(U a) {
#if defined(__AVX512F__)
  return __builtin_popcount(_mm512_test_epi32_mask(a, a));
#elif defined(__AVX2__)
  const U zero = _mm256_cmpeq_epi32(a, _mm256_setzero_si256());
  return 8 - __builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(zero))));
#else
  int n = 0;
  for (int i = 0; i < W; ++i) n += a.v[i] != 0;
  return n;
#endif
}

// Lane i and the one half of the lanes further on, until one is left.
SUBULP_FLAT float halve(const F (&parts)[PARTS]) {
#if defined(__AVX512F__) || defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(parts[0]), _mm512_extractf32x8_ps(parts[0], 1));
#else
  const __m256 eight = _mm256_add_ps(parts[0], parts[1]);
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  return sum_lanes(parts);
#endif
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

// Mantissa (the pattern of a number in [1, 2)) and exponent of E4M3's largest value over a magnitude.
// E5M2's largest is 2^7 times that, so its mantissas are the same.
struct Ideal {
  uint32_t mantissa;
  int32_t exponent;

  explicit Ideal(uint32_t amax) {
    float a = float_of(amax);
    const bool tiny = a < 0x1p-64f;
    if (tiny) a *= 0x1p64f;
    const uint32_t bits = bits_of(448.0f / a);
    mantissa = (bits & 0x7FFFFFu) | 0x3F800000u;
    exponent = static_cast<int32_t>(bits >> 23) - 127 + (tiny ? 64 : 0);
  }
};
inline float join_scale(uint32_t mantissa, int32_t e) {
  if (e == NO_SCALE) return 1.0f;
  const uint32_t fraction = mantissa & 0x7FFFFFu;
  if (e == -127) return float_of((fraction | 0x800000u) >> 1);
  return float_of(static_cast<uint32_t>(e + 127) << 23 | fraction);
}
inline bool has_scale(uint32_t amax) { return amax != 0 && amax < INFINITE; }

struct Exponents {
  int32_t e4m3, e5m2;

  Exponents(uint32_t amax, uint32_t shared) : e4m3(NO_SCALE), e5m2(NO_SCALE) {
    if (!has_scale(amax)) return;
    const Ideal own(amax);
    const int32_t e = own.exponent - (shared > own.mantissa ? 1 : 0);
    e4m3 = std::min(e, 127);
    e5m2 = std::min(e + 7, 127);
  }
};

// What is known of a block, or of a tile.
struct Evidence {
  Buffer<uint32_t> amax, smallest;
  Buffer<int64_t> counted;
  explicit Evidence(int64_t n) : amax(n), smallest(n), counted(n) {}
};

template <class Format>
inline void measure(const Grid& g, const char* x, int threads, Evidence& e) {
  each_tile(g, threads, [&](const Tile& t) {
    U most = u32(0), least = u32(0);
    int64_t counted = 0;
    for (int64_t r = 0; r < t.rows; ++r)
      each_vector<Format>(x + ((t.row + r) * g.columns + t.column) * Format::bytes, t.columns,
                          [&](int64_t, F value, int) {
                            const U mag = magnitude(value);
                            most = simd::max(most, mag);
                            // The negative of the smallest is the largest; zero stays the lowest.
                            least = simd::max(least, sub(u32(0), mag));
                            counted += count_nonzero(mag);
                          });
    e.amax[t.index] = reduce_max(most);
    e.smallest[t.index] = 0u - reduce_max(least);
    e.counted[t.index] = counted;
  });
}

// Calls visit(tile of a block, its place among the block's) row by row.
template <class Visit>
inline void tiles_of(const Grid& g, int64_t block, Visit visit) {
  const int64_t i = block / g.across, j = block % g.across;
  for (int64_t a = 0; a < g.tiles_down; ++a)
    for (int64_t c = 0; c < g.tiles_across; ++c)
      visit(((i * g.tiles_down + a) * g.across + j) * g.tiles_across + c, a * g.tiles_across + c);
}

// Significands: the part of |t| in [1, 2), its binade, and the inverse.
struct Scaled {
  U sign, binade;
  F fraction, inverse;

  explicit SUBULP_FLAT Scaled(F t) {
    const U mag = magnitude(t);
    sign = and_(as_u32(t), u32(0x80000000u));
    // Below 2^-37 all is zero in either format.
    binade = simd::max(and_(mag, u32(INFINITE)), u32(90u << 23));
    fraction = as_f32(or_(and_(mag, u32(0x7FFFFFu)), u32(0x3F800000u)));
    inverse = div(f32(1.0f), fraction);
  }
};

// The candidate of a format with `mantissa_bits`: errors in units of the binade, which are those of the
// scaled values, since powers of two round nothing. `lowest` is the binade of the smallest normal.
template <int mantissa_bits>
struct Candidate {
  F error;
  U code;

  SUBULP_FLAT Candidate(const Scaled& s, U lowest) {
    const U at = simd::max(s.binade, lowest);
    // Where FP32's steps are those of the grid.
    const U shift = simd::add(sub(at, s.binade), u32((127u + 23u - mantissa_bits) << 23 | 0x400000u));
    const F shifted = simd::add(s.fraction, as_f32(shift));
    const F rounded = sub(shifted, as_f32(shift));
    const F off = as_f32(and_(as_u32(sub(s.fraction, rounded)), u32(MAGNITUDE)));
    const M flushed = greater(u32(1), as_u32(rounded));
    error = as_f32(select(flushed, as_u32(f32(1.0f)), as_u32(mul(off, s.inverse))));
    code = simd::add(sub(as_u32(shifted), shift), shr<23 - mantissa_bits>(sub(at, lowest)));
  }
};

constexpr uint32_t E4M3_LOWEST = 121u << 23;

struct Sums {
  float e4m3, e5m2;
};

// Codes of a tile in E4M3, and its sums of errors.
template <class Format, bool both>
inline Sums quantise_tile(const Grid& g, const Tile& t, const char* x, uint8_t* codes, float scale, uint32_t octaves) {
  alignas(64) float first[TILE_ROWS], second[TILE_ROWS];
  const F factor = f32(scale), zero = f32(0.0f);
  const U lowest4 = u32(E4M3_LOWEST), lowest5 = u32((113u - octaves) << 23);
  for (int64_t r = 0; r < t.rows; ++r) {
    const int64_t at = (t.row + r) * g.columns + t.column;
    F sum4[PARTS], sum5[PARTS];
    for (int p = 0; p < PARTS; ++p) sum4[p] = sum5[p] = zero;
    const auto step = [&](F value, int part, uint8_t* to, int n) {
      const Scaled s(mul(value, factor));
      const M some = greater(magnitude(value), u32(0));
      const Candidate<3> four(s, lowest4);
      sum4[part] = simd::add(sum4[part], as_f32(select(some, as_u32(four.error), u32(0))));
      if constexpr (both) {
        const Candidate<2> five(s, lowest5);
        sum5[part] = simd::add(sum5[part], as_f32(select(some, as_u32(five.error), u32(0))));
      }
      const U code = or_(four.code, shr<24>(s.sign));
      if (n == W) {
        store_u8(to, code);
      } else {
        uint8_t part_of[W];
        store_u8(part_of, code);
        std::memcpy(to, part_of, static_cast<size_t>(n));
      }
    };
    const char* const row = x + at * Format::bytes;
    int64_t i = 0;
    for (; i + ROW_LANES <= t.columns; i += ROW_LANES)
      for (int p = 0; p < PARTS; ++p) step(Format::load(row + (i + p * W) * Format::bytes), p, codes + at + i + p * W, W);
    if (i < t.columns)
      each_vector<Format>(row + i * Format::bytes, t.columns - i, [&](int64_t k, F value, int n) {
        step(value, static_cast<int>(k / W), codes + at + i + k, n);
      });
    first[r] = halve(sum4);
    if constexpr (both) second[r] = halve(sum5);
  }
  const auto whole = [&](float* of_rows) {
    int64_t size = 1;
    while (size < t.rows) size *= 2;
    for (int64_t r = t.rows; r < size; ++r) of_rows[r] = 0.0f;
    for (; size > 1; size /= 2)
      for (int64_t r = 0; r < size / 2; ++r) of_rows[r] += of_rows[r + size / 2];
    return of_rows[0];
  };
  if (!t.rows || !t.columns) return {0.0f, 0.0f};
  return {whole(first), both ? whole(second) : 0.0f};
}

template <class Format>
inline void encode_e5m2(const Grid& g, const Tile& t, const char* x, uint8_t* codes, float scale) {
  const F factor = f32(scale);
  for (int64_t r = 0; r < t.rows; ++r) {
    const int64_t at = (t.row + r) * g.columns + t.column;
    each_vector<Format>(x + at * Format::bytes, t.columns, [&](int64_t i, F value, int n) {
      uint8_t part[W];
      E5m2::store(reinterpret_cast<char*>(part), mul(value, factor));
      std::memcpy(codes + at + i, part, static_cast<size_t>(n));
    });
  }
}

// The upper bytes of BF16 numbers to `codes`, the lower ones to `low`.
template <class Format>
inline void encode_bf16(const Grid& g, const Tile& t, const char* x, uint8_t* codes, uint8_t* low) {
  for (int64_t r = 0; r < t.rows; ++r) {
    const int64_t at = (t.row + r) * g.columns + t.column;
    each_vector<Format>(x + at * Format::bytes, t.columns, [&](int64_t i, F value, int n) {
      uint8_t upper[W], lower[W];
      const U code = Bf16::nearest(value);
      store_u8(upper, shr<8>(code));
      store_u8(lower, and_(code, u32(0xFF)));
      std::memcpy(codes + at + i, upper, static_cast<size_t>(n));
      std::memcpy(low + t.place + r * t.block_width + i, lower, static_cast<size_t>(n));
    });
  }
}

enum Recipe { TENSOR_RECIPE, TWO_WAY, THREE_WAY };
enum Scaling { GAM, AMAX, E8M0 };

inline uint8_t wide_type(int recipe) { return recipe == THREE_WAY ? 2 : 1; }

inline uint8_t decide(int recipe, uint32_t amax, uint32_t smallest, int64_t counted, Sums sums) {
  if (amax >= INFINITE) return wide_type(recipe);
  if (amax == 0) return 0;
  const float n = static_cast<float>(std::max<int64_t>(counted, 1));
  const float e4m3 = sums.e4m3 / n, e5m2 = sums.e5m2 / n;
  if (recipe == TWO_WAY) return e4m3 < e5m2 ? 0 : 1;
  if (e4m3 <= e5m2) return 0;
  // E5M2's largest value over its smallest normal one.
  return float_of(amax) / float_of(smallest) <= 939524096.0f ? 1 : 2;
}

struct Mantissas {
  const subulp_mixture& m;
  const Grid& g;

  int64_t group_of(int64_t block) const {
    if (m.scaling == AMAX) return block;
    if (m.scaling == E8M0) return 0;
    const int64_t groups_across = Grid::parts(g.across, m.group_columns);
    return block / g.across / m.group_rows * groups_across + block % g.across / m.group_columns;
  }
  uint32_t of(int64_t block) const { return bits_of(m.mantissa[group_of(block)]); }

  void compute(const Evidence& e, int threads) const {
    const int64_t blocks = g.blocks();
    if (m.scaling == E8M0) {
      m.mantissa[0] = 1.0f;
      return;
    }
    const int64_t groups =
        m.scaling == AMAX ? blocks : Grid::parts(g.down, m.group_rows) * Grid::parts(g.across, m.group_columns);
    Buffer<uint32_t> largest(groups);
    if (groups == 1) {
      uint32_t most = 0;
#if defined(_OPENMP)
#pragma omp parallel for num_threads(threads) if (blocks > 16384 && threads > 1) reduction(max : most)
#endif
      for (int64_t b = 0; b < blocks; ++b)
        if (has_scale(e.amax[b])) most = std::max(most, e.amax[b]);
      largest[0] = most;
    } else {
      for (int64_t b = 0; b < blocks; ++b)
        if (has_scale(e.amax[b])) {
          uint32_t& group = largest[group_of(b)];
          group = std::max(group, e.amax[b]);
        }
    }
    for (int64_t i = 0; i < groups; ++i)
      m.mantissa[i] = largest[i] ? float_of(Ideal(largest[i]).mantissa) : 1.0f;
    (void)threads;
  }
};

// What numerics.mixture.numbers_of returns, over some blocks.
struct Numbers {
  int64_t blocks[3] = {}, elements[3] = {};
  double narrow = 0.0, first = 0.0;
  int64_t narrow_counted = 0, counted = 0;
  uint32_t amax = 0, smallest = INFINITE;

  void add(const Numbers& other) {
    for (int i = 0; i < 3; ++i) blocks[i] += other.blocks[i], elements[i] += other.elements[i];
    narrow += other.narrow;
    first += other.first;
    narrow_counted += other.narrow_counted;
    counted += other.counted;
    amax = std::max(amax, other.amax);
    smallest = std::min(smallest, other.smallest);
  }
  void write(double* to, int types) const {
    for (int i = 0; i < types; ++i) {
      *to++ = static_cast<double>(blocks[i]);
      *to++ = static_cast<double>(elements[i]);
    }
    *to++ = narrow;
    *to++ = static_cast<double>(narrow_counted);
    *to++ = first;
    *to++ = static_cast<double>(counted);
    *to++ = static_cast<double>(float_of(std::min(amax, INFINITE)));
    *to++ = static_cast<double>(float_of(smallest));
  }
};

template <class Format>
inline int64_t encode_mixture(const subulp_mixture& m, int threads) {
  const IeeeMode ieee;
  const Grid g(m);
  const char* const x = static_cast<const char*>(m.x);
  const int64_t blocks = g.blocks(), tiles = g.tiles();
  const bool whole = m.recipe == TENSOR_RECIPE, single = g.one_tile_each();
  const uint8_t wide = wide_type(m.recipe);

  Evidence of_tiles(tiles), of_blocks(single ? 0 : blocks);
  measure<Format>(g, x, threads, of_tiles);
  Evidence& e = single ? of_tiles : of_blocks;
  if (!single)
    for (int64_t b = 0; b < blocks; ++b) {
      uint32_t smallest = INFINITE;
      tiles_of(g, b, [&](int64_t tile, int64_t) {
        e.amax[b] = std::max(e.amax[b], of_tiles.amax[tile]);
        if (of_tiles.smallest[tile]) smallest = std::min(smallest, of_tiles.smallest[tile]);
        e.counted[b] += of_tiles.counted[tile];
      });
      e.smallest[b] = smallest;
    }
  const Mantissas mantissas{m, g};
  mantissas.compute(e, threads);

  Buffer<float> first(tiles), second(whole ? 0 : tiles);
  each_tile(g, threads, [&](const Tile& t) {
    const uint32_t amax = e.amax[t.block], shared = mantissas.of(t.block);
    const Exponents exponents(amax, shared);
    Sums sums{0.0f, 0.0f};
    if (amax < INFINITE) {
      const float scale = join_scale(shared, exponents.e4m3);
      const uint32_t octaves = static_cast<uint32_t>(exponents.e5m2 - exponents.e4m3);
      if (whole) sums = quantise_tile<Format, false>(g, t, x, m.codes, scale, 0);
      else sums = quantise_tile<Format, true>(g, t, x, m.codes, scale, octaves);
    }
    first[t.index] = sums.e4m3;
    if (!whole) second[t.index] = sums.e5m2;
    if (!single) return;
    m.exponents[t.block] = static_cast<int8_t>(exponents.e4m3);
    if (whole) return;
    const uint8_t type = decide(m.recipe, amax, e.smallest[t.block], e.counted[t.block], sums);
    m.types[t.block] = type;
    if (type == 1 && wide == 2) {
      m.exponents[t.block] = static_cast<int8_t>(exponents.e5m2);
      encode_e5m2<Format>(g, t, x, m.codes, join_scale(shared, exponents.e5m2));
    }
  });

  Buffer<float> first_sums(single ? 0 : blocks), second_sums(single || whole ? 0 : blocks);
  if (!single) {
    bool again = false;
    Buffer<float> parts(g.tiles_down * g.tiles_across);
    const auto sum_tiles = [&](const Buffer<float>& of, int64_t b) {
      tiles_of(g, b, [&](int64_t tile, int64_t place) { parts[place] = of[tile]; });
      return sum_of(parts.data(), parts.size());
    };
    for (int64_t b = 0; b < blocks; ++b) {
      const Exponents exponents(e.amax[b], mantissas.of(b));
      first_sums[b] = sum_tiles(first, b);
      m.exponents[b] = static_cast<int8_t>(exponents.e4m3);
      if (whole) continue;
      second_sums[b] = sum_tiles(second, b);
      m.types[b] = decide(m.recipe, e.amax[b], e.smallest[b], e.counted[b], {first_sums[b], second_sums[b]});
      if (m.types[b] == 1 && wide == 2) {
        m.exponents[b] = static_cast<int8_t>(exponents.e5m2);
        again = true;
      }
    }
    if (again)
      each_tile(g, threads, [&](const Tile& t) {
        if (m.types[t.block] == 1)
          encode_e5m2<Format>(g, t, x, m.codes, join_scale(mantissas.of(t.block), m.exponents[t.block]));
      });
  }
  const float* const of_first = single ? first.data() : first_sums.data();
  const float* const of_second = single ? second.data() : second_sums.data();

  uint8_t chosen = 0;
  constexpr int64_t run = 4096;
  const int64_t runs = Grid::parts(blocks, run);
  Buffer<Numbers> partial(0);
  Numbers all;
  if (whole) {
    uint32_t amax = 0;
    int64_t counted = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      amax = std::max(amax, e.amax[b]);
      if (e.amax[b] < INFINITE) counted += e.counted[b];
    }
    const float error = sum_of_blocks(of_first, blocks) / static_cast<float>(std::max<int64_t>(counted, 1));
    chosen = amax < INFINITE && (amax == 0 || error < m.threshold) ? 0 : wide;
    m.types[0] = chosen;
  }
  partial.resize(runs);
#if defined(_OPENMP)
#pragma omp parallel for num_threads(threads) if (runs > 4 && threads > 1) schedule(static)
#endif
  for (int64_t r = 0; r < runs; ++r) {
    Numbers n;
    for (int64_t b = r * run; b < std::min(blocks, (r + 1) * run); ++b) {
      const uint8_t type = whole ? chosen : m.types[b];
      n.blocks[type] += 1;
      n.elements[type] += g.height(b) * g.width(b);
      n.amax = std::max(n.amax, e.amax[b]);
      if (e.amax[b] >= INFINITE) continue;
      if (e.amax[b]) n.smallest = std::min(n.smallest, e.smallest[b]);
      n.counted += e.counted[b];
      n.first += static_cast<double>(of_first[b]);
      if (type == wide) continue;
      n.narrow += static_cast<double>(type == 0 ? of_first[b] : of_second[b]);
      n.narrow_counted += e.counted[b];
    }
    partial[r] = n;
  }
  for (int64_t r = 0; r < runs; ++r) all.add(partial[r]);
  all.write(m.numbers, wide + 1);
  return all.elements[wide];
}

// Places of the blocks' lower bytes in `wide`.
inline void wide_offsets(const subulp_mixture& m, const Grid& g, Buffer<int64_t>& offsets) {
  int64_t next = 0;
  for (int64_t b = 0; b < g.blocks(); ++b) {
    offsets[b] = next;
    if (m.types[m.recipe == TENSOR_RECIPE ? 0 : b] == wide_type(m.recipe)) next += g.height(b) * g.width(b);
  }
}

template <class Format>
inline int encode_wide(const subulp_mixture& m, uint8_t* wide, int threads) {
  const Grid g(m);
  Buffer<int64_t> offsets(g.blocks());
  wide_offsets(m, g, offsets);
  each_tile(g, threads, [&](const Tile& t) {
    if (m.types[m.recipe == TENSOR_RECIPE ? 0 : t.block] == wide_type(m.recipe))
      encode_bf16<Format>(g, t, static_cast<const char*>(m.x), m.codes, wide + offsets[t.block]);
  });
  return 0;
}

inline int64_t run_mixture_encode(const subulp_mixture& m, int threads) {
  switch (m.dtype) {
    case SUBULP_FP32: return encode_mixture<Fp32>(m, threads);
    case SUBULP_BF16: return encode_mixture<Bf16>(m, threads);
    case SUBULP_FP16: return encode_mixture<Fp16>(m, threads);
    default: return -1;
  }
}

inline int run_mixture_wide(const subulp_mixture& m, uint8_t* wide, int threads) {
  switch (m.dtype) {
    case SUBULP_FP32: return encode_wide<Fp32>(m, wide, threads);
    case SUBULP_BF16: return encode_wide<Bf16>(m, wide, threads);
    case SUBULP_FP16: return encode_wide<Fp16>(m, wide, threads);
    default: return -1;
  }
}

template <class Format>
inline void decode_tile(const Grid& g, const Tile& t, const uint8_t* codes, float* to, float inverse) {
  const F factor = f32(inverse);
  for (int64_t r = 0; r < t.rows; ++r) {
    const int64_t at = (t.row + r) * g.columns + t.column;
    each_vector<Format>(reinterpret_cast<const char*>(codes) + at, t.columns, [&](int64_t i, F value, int n) {
      store_part(to + at + i, mul(value, factor), n);
    });
  }
}

inline int run_mixture_decode(const subulp_mixture& m, const uint8_t* wide, float* to, int threads) {
  const Grid g(m);
  const bool whole = m.recipe == TENSOR_RECIPE;
  const uint8_t last = wide_type(m.recipe);
  const Mantissas mantissas{m, g};
  Buffer<int64_t> offsets(wide ? g.blocks() : 0);
  if (wide) wide_offsets(m, g, offsets);
  each_tile(g, threads, [&](const Tile& t) {
    const uint8_t type = m.types[whole ? 0 : t.block];
    if (type == last) {
      const uint8_t* const low = wide + offsets[t.block] + t.place;
      for (int64_t r = 0; r < t.rows; ++r) {
        const int64_t at = (t.row + r) * g.columns + t.column;
        for (int64_t i = 0; i < t.columns; ++i)
          to[at + i] = float_of(static_cast<uint32_t>(m.codes[at + i] << 8 | low[r * t.block_width + i]) << 16);
      }
      return;
    }
    const float inverse = 1.0f / join_scale(mantissas.of(t.block), m.exponents[t.block]);
    if (type == 0) decode_tile<E4m3>(g, t, m.codes, to, inverse);
    else decode_tile<E5m2>(g, t, m.codes, to, inverse);
  });
  return 0;
}

}  // namespace simd
