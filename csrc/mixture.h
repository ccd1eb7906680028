// A matrix with each block in E4M3, E5M2 or BF16: scales, both candidates' errors, decision and codes.
// The definition is numerics/mixture.py, the order of sums that of numerics/metrics.py. Two reads: one
// for the largest magnitudes, since scales depend on their group's, and one for all the rest.
#pragma once

#include "mixture_error.h"
#include "byte_table.h"
#include "mixture_grid.h"
#include "mixture_numbers.h"
#include "mixture_scale.h"

namespace simd {

// Of the same row of up to W tiles, by lanes: the largest magnitudes, and the smallest less one. With
// `zeros`, that of a zero is the last of all, and what is not zero is counted; without, there may be
// none: returns false if there are, and the rows must be measured again.
template <class Format, bool zeros, class Columns>
SUBULP_FLAT bool measure_rows(const Strip& s, int64_t r, int first, const char* x, Columns columns, F* most, F* least,
                              uint32_t* counted) {
  const int end = first + s.group(first);
  U lowest = u32(~0u);
  for (int b = first; b < end; ++b) {
    U top = u32(0), low = u32(~0u);
    uint32_t n = 0;
    each_vector<Format>(x + s.offset(r, b) * Format::bytes, columns(b), [&](int64_t, F value, int) {
      const U mag = magnitude(value);
      top = simd::max(top, mag);
      low = simd::min(low, zeros ? sub(mag, u32(1)) : mag);
      if (zeros) n += static_cast<uint32_t>(count_nonzero(mag));
    });
    if (!zeros) lowest = simd::min(lowest, low), low = sub(low, u32(1));
    most[b] = as_f32(r ? simd::max(as_u32(most[b]), top) : top);
    least[b] = as_f32(r ? simd::min(as_u32(least[b]), low) : low);
    if (zeros) counted[b] = r ? counted[b] + n : n;
  }
  if (zeros) return true;
  if (equal_lanes(lowest, u32(0))) return false;
  for (int b = first; b < end; ++b) counted[b] = (r ? counted[b] : 0) + static_cast<uint32_t>(columns(b));
  return true;
}

template <class Format>
inline void measure(const Grid& g, const char* x, int threads, Evidence<uint32_t>& e) {
  each_strip(g, threads, [&](const Strip& s) {
    F most[MAX_TILES], least[MAX_TILES];
    uint32_t* const counted = e.counted.data() + s.tile;
    // Those of a last group that is not full, and all if there are no rows.
    for (int64_t b = s.rows ? s.n : 0; b < Grid::parts(s.n, W) * W; ++b) {
      most[b] = f32(0.0f);
      least[b] = as_f32(u32(~0u));
    }
    if (!s.rows) std::fill(counted, counted + s.n, 0u);
    with_columns(s, [&](auto columns) {
      // Where one row has zeros, the next ones will. Lanes past the end of a row are zero too, and a tile at
      // the edge may have none at all.
      const int64_t last = s.columns_of(s.n - 1);
      bool zeros = s.tile_columns % W || last % W || !last;
      for (int64_t r = 0; r < s.rows; ++r)
        for (int first = 0; first < s.n; first += W) {
          fetch_pages_ahead(x + s.offset(r, first) * Format::bytes, s.columns_from(first) * Format::bytes);
          if (!zeros) zeros = !measure_rows<Format, false>(s, r, first, x, columns, most, least, counted);
          if (zeros) measure_rows<Format, true>(s, r, first, x, columns, most, least, counted);
        }
    });
    const auto largest = [](F a, F b) { return as_f32(simd::max(as_u32(a), as_u32(b))); };
    const auto smallest = [](F a, F b) { return as_f32(simd::min(as_u32(a), as_u32(b))); };
    for (int b = 0; b < s.n; b += W) {
      store_each(e.amax.data() + s.tile + b, as_u32(fold_each(most + b, largest)), s.group(b));
      const U found = simd::add(as_u32(fold_each(least + b, smallest)), u32(1));
      store_each(e.smallest.data() + s.tile + b, found, s.group(b));
    }
  });
}

// What blocks of several tiles are, from their tiles.
inline void gather(const Grid& g, const Evidence<uint32_t>& of_tiles, Evidence<int64_t>& e) {
  for (int64_t b = 0; b < g.blocks(); ++b) {
    uint32_t amax = 0, smallest = INFINITE;
    int64_t counted = 0;
    tiles_of(g, b, [&](int64_t tile, int64_t) {
      amax = std::max(amax, of_tiles.amax[tile]);
      if (of_tiles.smallest[tile]) smallest = std::min(smallest, of_tiles.smallest[tile]);
      counted += of_tiles.counted[tile];
    });
    e.amax[b] = amax;
    e.smallest[b] = smallest;
    e.counted[b] = counted;
  }
}

template <class Format>
inline void encode_e5m2(const Strip& s, int b, const char* x, uint8_t* codes, float scale) {
  const F factor = f32(scale);
  const Tile t = s.tile_of(b);
  for (int64_t r = 0; r < t.rows; ++r) {
    const int64_t at = s.offset(r, b);
    each_vector<Format>(x + at * Format::bytes, t.columns, [&](int64_t i, F value, int n) {
      store_each_u8(codes + at + i, E5m2::nearest(mul(value, factor)), n);
    });
  }
}

// What a wide block keeps: FP16 numbers as they are, others in BF16.
template <class Format>
using WideOf = std::conditional_t<std::is_same<Format, Fp16>::value, Fp16, Bf16>;

// The upper bytes of wide numbers to `codes`, the lower ones to `low`.
template <class Format>
inline void encode_wide_tile(const Strip& s, int b, const char* x, uint8_t* codes, uint8_t* low) {
  const Tile t = s.tile_of(b);
  for (int64_t r = 0; r < t.rows; ++r) {
    const int64_t at = s.offset(r, b);
    each_vector<Format>(x + at * Format::bytes, t.columns, [&](int64_t i, F value, int n) {
      const U code = WideOf<Format>::nearest(value);
      store_each_u8(codes + at + i, shr<8>(code), n);
      store_each_u8(low + t.place + r * t.block_width + i, code, n);
    });
  }
}

inline uint8_t wide_type(int recipe) { return recipe == SUBULP_THREE_WAY ? 2 : 1; }

// Types of up to W blocks; `counts` are at least 1.
inline U decide(int recipe, U amax, U smallest, F counts, F e4m3_sums, F e5m2_sums) {
  const U wide = u32(wide_type(recipe));
  // Errors are not negative: their order is that of their bits.
  const U e4m3 = as_u32(div(e4m3_sums, counts)), e5m2 = as_u32(div(e5m2_sums, counts));
  U type;
  if (recipe == SUBULP_THREE_WAY) {
    // E5M2's largest value over its smallest normal one.
    const U span = as_u32(div(as_f32(amax), as_f32(smallest)));
    const U other = select(greater(span, u32(bits_of(939524096.0f))), wide, u32(1));
    type = select(greater(e4m3, e5m2), other, u32(0));
  } else {
    type = select(greater(e5m2, e4m3), u32(0), wide);
  }
  type = select(greater(amax, u32(0)), type, u32(0));
  return select(greater(u32(INFINITE), amax), type, wide);
}

// Scales of the blocks of a strip's tiles, W from tile `at` on, and what ways out their values need.
inline void find_scales(const Strip& s, int at, U amax, U smallest, U counted, U shared, bool both, Scaled* to) {
  const U exponent = block_exponents(amax, shared);
  const F scale = join_scale(shared, exponent);
  const U lowest = shl<23>(sub(u32(113), sub(e5m2_exponents(exponent), exponent)));
  // Magnitudes keep their order when they are scaled.
  const U least = as_u32(mul(as_f32(smallest), scale));
  const U in_e5m2 = select(greater(least, sub(lowest, u32(1))), u32(NORMAL_IN_E5M2), u32(ANY));
  // A zero has no significand.
  const U size = u32(static_cast<uint32_t>(s.rows * s.tile_columns));
  const U normal = select(greater(size, counted), u32(NORMAL_IN_E5M2), u32(NORMAL));
  const U kind = select(greater(least, u32(E4M3_LOWEST - 1)), normal, both ? in_e5m2 : u32(ANY));
  store_f32(to->scale + at, scale);
  store_u32(to->exponent + at, exponent);
  store_u32(to->lowest + at, lowest);
  store_low_u8(to->kind + at, select(greater(u32(INFINITE), amax), kind, u32(NOT_FINITE)));
}

template <class Format>
inline int64_t encode_mixture(const subulp_mixture& m, int threads) {
  const IeeeMode ieee;
  const Grid g(m);
  const char* const x = static_cast<const char*>(m.x);
  const int64_t blocks = g.blocks(), tiles = g.tiles();
  const bool whole = m.recipe == SUBULP_TENSOR, single = g.one_tile_each();
  const uint8_t wide = wide_type(m.recipe);

  Evidence<uint32_t> of_tiles(tiles);
  Evidence<int64_t> of_blocks(single ? 0 : blocks);
  measure<Format>(g, x, threads, of_tiles);
  if (!single) gather(g, of_tiles, of_blocks);
  const Buffer<uint32_t>& amax = single ? of_tiles.amax : of_blocks.amax;
  const Buffer<uint32_t>& smallest = single ? of_tiles.smallest : of_blocks.smallest;
  const Mantissas mantissas{m, g};
  mantissas.compute(amax);
  const int64_t groups = mantissas.groups();

  // Types and exponents of n blocks from `block` on, as their sums decide.
  const auto decide_group = [&](int64_t block, int n, U exponent, F counts, F e4m3_sums, F e5m2_sums) {
    if (whole) return store_each_u8(m.exponents + block, exponent, n);
    const U types = decide(m.recipe, load_each(amax.data() + block, n), load_each(smallest.data() + block, n), counts,
                           e4m3_sums, e5m2_sums);
    store_each_u8(m.types + block, types, n);
    const U chosen = wide == 2 ? select(greater(u32(2), types), types, u32(0)) : u32(0);
    store_each_u8(m.exponents + block, select(greater(chosen, u32(0)), e5m2_exponents(exponent), exponent), n);
  };
  const auto encode_chosen = [&](const Strip& s) {
    for (int b = 0; b < s.n; ++b)
      if (m.types[s.block + b] == 1) {
        const U exponent = simd::add(u32(static_cast<uint32_t>(m.exponents[s.block + b])), u32(EXPONENT_BIAS));
        alignas(64) float scale[W];
        store_f32(scale, join_scale(mantissas.of(s.block + b, 1, groups), exponent));
        encode_e5m2<Format>(s, b, x, m.codes, scale[0]);
      }
  };
  // Sums of tiles, where something is left to be done with them.
  Buffer<float> first(single && !whole ? 0 : tiles), second(single || whole ? 0 : tiles);
  Buffer<Numbers> of_strips(single ? g.bands * g.strips : 0);
  each_strip(g, threads, [&](const Strip& s) {
    Scaled scaled;
    Sums sums;
    const auto counted = [&](int b) { return load_each(of_tiles.counted.data() + s.tile + b, s.group(b)); };
    for (int b = 0; b < s.n; b += W) {
      const int64_t block = s.block + b;
      const int n = s.group(b);
      find_scales(s, b, load_each(amax.data() + block, n), load_each(smallest.data() + block, n), counted(b),
                  mantissas.of(block, n, groups), !whole, &scaled);
    }
    if (whole) quantise_strip<Format, false>(s, x, m.codes, scaled, &sums);
    else quantise_strip<Format, true>(s, x, m.codes, scaled, &sums);
    for (int b = 0; b < s.n; b += W) {
      const F e4m3 = load_f32(sums.e4m3 + b), e5m2 = whole ? e4m3 : load_f32(sums.e5m2 + b);
      if (first.size()) store_each(first.data() + s.tile + b, s.rows ? e4m3 : f32(0.0f), s.group(b));
      if (second.size()) store_each(second.data() + s.tile + b, s.rows ? e5m2 : f32(0.0f), s.group(b));
      const F counts = cvt_f32(simd::max(counted(b), u32(1)));
      if (single) decide_group(s.block + b, s.group(b), load_u32(scaled.exponent + b), counts, e4m3, e5m2);
    }
    if (!single) return;
    if (wide == 2) encode_chosen(s);
    // Where the tensor decides, its type is not known yet.
    const uint8_t* const types = whole ? nullptr : m.types + s.block;
    of_strips[s.place] = numbers_of(g, s.block, s.n, of_tiles, sums.e4m3, sums.e5m2, types, wide);
  });

  Buffer<float> first_sums(single ? 0 : blocks), second_sums(single || whole ? 0 : blocks);
  if (!single) {
    Buffer<float> parts(g.tiles_down * g.tiles_across);
    const auto sum_tiles = [&](const Buffer<float>& of, int64_t b) {
      tiles_of(g, b, [&](int64_t tile, int64_t place) { parts[place] = of[tile]; });
      return sum_of(parts.data(), parts.size());
    };
    for (int64_t b = 0; b < blocks; ++b) {
      first_sums[b] = sum_tiles(first, b);
      if (!whole) second_sums[b] = sum_tiles(second, b);
      const U exponent = block_exponents(u32(amax[b]), mantissas.of(b, 1, groups));
      const F counts = f32(static_cast<float>(std::max<int64_t>(of_blocks.counted[b], 1)));
      decide_group(b, 1, exponent, counts, f32(first_sums[b]), f32(whole ? 0.0f : second_sums[b]));
    }
    if (wide == 2) each_strip(g, threads, encode_chosen);
  }
  Numbers all;
  for (int64_t i = 0; i < of_strips.size(); ++i) all.add(of_strips[i]);
  if (!single)
    all = numbers_of(g, 0, blocks, of_blocks, first_sums.data(), second_sums.data(), whole ? nullptr : m.types, wide);
  if (whole) {
    const float sum = sum_of_blocks(single ? first.data() : first_sums.data(), blocks);
    const float error = sum / static_cast<float>(std::max<int64_t>(all.counted, 1));
    m.types[0] = all.amax < INFINITE && (all.amax == 0 || error < m.threshold) ? 0 : wide;
    if (m.types[0] == wide) all.widen(wide);
  }
  all.write(m.numbers, wide + 1);
  return all.elements[wide];
}

// Places of the blocks' lower bytes in `wide`.
inline void wide_offsets(const subulp_mixture& m, const Grid& g, Buffer<int64_t>& offsets) {
  int64_t next = 0;
  for (int64_t b = 0; b < g.blocks(); ++b) {
    offsets[b] = next;
    if (m.types[m.recipe == SUBULP_TENSOR ? 0 : b] == wide_type(m.recipe)) next += g.height(b) * g.width(b);
  }
}

template <class Format>
inline int encode_wide(const subulp_mixture& m, uint8_t* wide, int threads) {
  const Grid g(m);
  Buffer<int64_t> offsets(g.blocks());
  wide_offsets(m, g, offsets);
  each_strip(g, threads, [&](const Strip& s) {
    for (int b = 0; b < s.n; ++b)
      if (m.types[m.recipe == SUBULP_TENSOR ? 0 : s.block + b] == wide_type(m.recipe))
        encode_wide_tile<Format>(s, b, static_cast<const char*>(m.x), m.codes, wide + offsets[s.block + b]);
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

// At most W values of a row, as numbers of a format.
template <class To>
inline void store_values(char* to, F x, int64_t n) {
  if (n >= W) {
    To::store(to, x);
    return;
  }
  alignas(64) char values[W * To::bytes];
  To::store(values, x);
  std::memcpy(to, values, static_cast<size_t>(n * To::bytes));
}

#if defined(SUBULP_BYTE_TABLE)
// The same to BF16, of tiles that are worth a table.
constexpr int64_t WORTH_A_TABLE = 1024;
template <class Format>
inline void look_tile_up(const Strip& s, const Tile& t, const uint8_t* codes, char* to, F factor) {
  const ByteTable table([factor](const char* p) { return Bf16::nearest(mul(Format::load(p), factor)); });
  for (int64_t r = 0; r < t.rows; ++r) {
    const int64_t at = (t.row + r) * s.matrix_columns + t.column;
    for (int64_t i = 0; i < t.columns; i += 2 * W) {
      const uint32_t lanes = first_lanes(t.columns - i);
      _mm512_mask_storeu_epi16(to + (at + i) * Bf16::bytes, lanes,
                               table.halves(_mm256_maskz_loadu_epi8(lanes, codes + at + i)));
    }
  }
}
#endif

template <class Format, class To>
inline void decode_tile(const Strip& s, const Tile& t, const uint8_t* codes, char* to, float inverse) {
  const F factor = f32(inverse);
#if defined(SUBULP_BYTE_TABLE)
  if constexpr (std::is_same_v<To, Bf16>)
    if (t.rows * t.columns >= WORTH_A_TABLE) return look_tile_up<Format>(s, t, codes, to, factor);
#endif
  for (int64_t r = 0; r < t.rows; ++r) {
    const int64_t at = (t.row + r) * s.matrix_columns + t.column;
    each_vector<Format>(reinterpret_cast<const char*>(codes) + at, t.columns, [&](int64_t i, F value, int n) {
      store_values<To>(to + (at + i) * To::bytes, mul(value, factor), n);
    });
  }
}

// Values of a tile of wide numbers, whose lower bytes begin at `low`.
template <class Format, class To>
inline void decode_wide_tile(const Strip& s, const Tile& t, const uint8_t* codes, const uint8_t* low, char* to) {
  for (int64_t r = 0; r < t.rows; ++r) {
    const int64_t at = (t.row + r) * s.matrix_columns + t.column;
    for (int64_t i = 0; i < t.columns; i += W) {
      const int n = static_cast<int>(std::min<int64_t>(W, t.columns - i));
      const U high = load_each(codes + at + i, n), lower = load_each(low + r * t.block_width + i, n);
      store_values<To>(to + (at + i) * To::bytes, Format::value(or_(shl<8>(high), lower)), n);
    }
  }
}
template <class To>
inline void decode_wide_tile(const Strip& s, const Tile& t, const uint8_t* codes, const uint8_t* low, int dtype,
                             char* to) {
  if (dtype == SUBULP_FP16) decode_wide_tile<Fp16, To>(s, t, codes, low, to);
  else decode_wide_tile<Bf16, To>(s, t, codes, low, to);
}

template <class To>
inline void decode_mixture(const subulp_mixture& m, const uint8_t* wide, char* to, int threads) {
  const Grid g(m);
  const bool whole = m.recipe == SUBULP_TENSOR;
  const uint8_t last = wide_type(m.recipe);
  const Mantissas mantissas{m, g};
  const int64_t groups = mantissas.groups();
  Buffer<int64_t> offsets(wide ? g.blocks() : 0);
  if (wide) wide_offsets(m, g, offsets);
  each_strip(g, threads, [&](const Strip& s) {
    alignas(64) float inverse[MAX_TILES];
    for (int b = 0; b < s.n; b += W) {
      const U exponents = simd::add(load_each(m.exponents + s.block + b, s.group(b)), u32(EXPONENT_BIAS));
      const F scale = join_scale(mantissas.of(s.block + b, s.group(b), groups), exponents);
      store_f32(inverse + b, div(f32(1.0f), scale));
    }
    for (int b = 0; b < s.n; ++b) {
      const uint8_t type = m.types[whole ? 0 : s.block + b];
      const Tile t = s.tile_of(b);
      if (type == 0) {
        decode_tile<E4m3, To>(s, t, m.codes, to, inverse[b]);
      } else if (type != last) {
        decode_tile<E5m2, To>(s, t, m.codes, to, inverse[b]);
      } else {
        decode_wide_tile<To>(s, t, m.codes, wide + offsets[s.block + b] + t.place, m.dtype, to);
      }
    }
  });
}

inline int run_mixture_decode(const subulp_mixture& m, const uint8_t* wide, void* to, int threads) {
  char* const values = static_cast<char*>(to);
  switch (m.to_dtype) {
    case SUBULP_FP32: decode_mixture<Fp32>(m, wide, values, threads); return 0;
    case SUBULP_BF16: decode_mixture<Bf16>(m, wide, values, threads); return 0;
    default: return -1;
  }
}

}  // namespace simd
