// Panels of pairs of BF16, the even one in the lower half; included by product_pack.h.
#pragma once

namespace simd {

// ------------------------------------------------------------------------ what a processor does in its own way

#if defined(__AVX512BF16__)
struct Places {
  alignas(64) uint16_t of[2 * W];
};
constexpr Places UPPER = [] {
  Places p{};
  for (int i = 0; i < 2 * W; ++i) p.of[i] = static_cast<uint16_t>(2 * i + 1);
  return p;
}();
constexpr Places ONE_OF_EACH = [] {
  Places p{};
  for (int i = 0; i < 2 * W; ++i) p.of[i] = static_cast<uint16_t>(i / 2 + i % 2 * W);
  return p;
}();
// Upper halves of 2 W lanes in order: pairs of neighbours.
inline U neighbours(U low, U high) { return _mm512_permutex2var_epi16(low, load_u32(UPPER.of), high); }
// W halves, then W more: pairs of one from each.
inline U zipped(U both) { return _mm512_permutexvar_epi16(load_u32(ONE_OF_EACH.of), both); }

// W vectors of W units, whose rows become columns.
inline void transpose(U* v) {
  U t[W];
#pragma GCC unroll 8
  for (int i = 0; i < W / 2; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < W / 4; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      v[4 * i + 2 * j] = _mm512_unpacklo_epi64(t[4 * i + j], t[4 * i + 2 + j]);
      v[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(t[4 * i + j], t[4 * i + 2 + j]);
    }
  // v[4 i + j]: in quarter q, column 4 q + j of rows 4 i to 4 i + 3.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm512_shuffle_i32x4(v[j], v[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(v[j], v[4 + j], 0xDD);
    t[8 + j] = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0xDD);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    v[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    v[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xDD);
    v[4 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88);
    v[12 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xDD);
  }
}
#else
inline U neighbours(U low, U high) {
  return lanes<U>([&](int i) {
    const U& from = i < W / 2 ? low : high;
    const int at = 2 * i % W;
    return from.v[at] >> 16 | from.v[at + 1];
  });
}
inline void transpose(U* v) {
  U t[W];
  for (int i = 0; i < W; ++i) t[i] = lanes<U>([&](int j) { return v[j].v[i]; });
  std::memcpy(v, t, sizeof t);
}
#endif

// ------------------------------------------------------------------------------------------ W pairs at a time

// Numbers of a format times a scale. A count says how many there are, if not enough: the others are zeros.
template <class Format>
class Pairs {
 public:
  explicit Pairs(float scale) : scale_(f32(scale)) {}
  // 2 W numbers in a line: pairs of neighbours.
  U along(const char* p, int64_t count) const {
    return neighbours(load_upper<Format>(p, count, scale_), load_upper<Format>(p + W * Format::bytes, count - W, scale_));
  }
  // W numbers of each of two lines: pairs across them.
  U across(const char* even, int64_t evens, const char* odd, int64_t odds) const {
    return or_(shr<16>(load_upper<Format>(even, evens, scale_)), load_upper<Format>(odd, odds, scale_));
  }

 private:
  F scale_;
};

#if defined(__AVX512BF16__)
// BF16 that is not scaled goes as it is: the units take subnormal numbers for zero.
template <>
class Pairs<Bf16> {
 public:
  explicit Pairs(float scale) : scale_(f32(scale)), scaled_(scale != 1.0f) {}
  U along(const char* p, int64_t count) const {
    if (scaled_) return neighbours(load_upper<Bf16>(p, count, scale_), load_upper<Bf16>(p + W * 2, count - W, scale_));
    return _mm512_maskz_loadu_epi16(first_lanes(count), p);
  }
  U across(const char* even, int64_t evens, const char* odd, int64_t odds) const {
    if (scaled_) return or_(shr<16>(load_upper<Bf16>(even, evens, scale_)), load_upper<Bf16>(odd, odds, scale_));
    const __m256i low = _mm256_maskz_loadu_epi16(static_cast<__mmask16>(first_lanes(evens)), even);
    const __m256i high = _mm256_maskz_loadu_epi16(static_cast<__mmask16>(first_lanes(odds)), odd);
    return zipped(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  }

 private:
  F scale_;
  bool scaled_;
};

// Formats of one byte are looked up.
template <class Format>
class BytePairs {
 public:
  explicit BytePairs(float scale)
      : table_([scale](const char* p) { return shr<16>(load_upper<Format>(p, W, f32(scale))); }) {}
  U along(const char* p, int64_t count) const { return table_.halves(_mm256_maskz_loadu_epi8(first_lanes(count), p)); }
  U across(const char* even, int64_t evens, const char* odd, int64_t odds) const {
    const __m128i low = _mm_maskz_loadu_epi8(static_cast<__mmask16>(first_lanes(evens)), even);
    const __m128i high = _mm_maskz_loadu_epi8(static_cast<__mmask16>(first_lanes(odds)), odd);
    return zipped(table_.halves(_mm256_set_m128i(high, low)));
  }

 private:
  ByteTable table_;
};
template <>
struct Pairs<E4m3> : BytePairs<E4m3> { using BytePairs::BytePairs; };
template <>
struct Pairs<E5m2> : BytePairs<E5m2> { using BytePairs::BytePairs; };
#endif

// ------------------------------------------------------------------------------------------------------ panels

// `count` rows of A from `first` on, in groups of ROWS. Where k is inner, and for tiles always, a row's units follow each
// other, a row every ROW units; else a step's do, a step every ROWS units. Missing rows of the last group are any
// numbers.
inline int64_t between_steps(const Source& from) { return from.k_is_inner || LEAST_DEPTH > 2 ? 1 : ROWS; }
template <class Format>
inline void pack_rows(const Pairs<Format>& pairs, const Source& from, int64_t first, int64_t count, int64_t k,
                      int64_t depth, uint32_t* to) {
  if (from.k_is_inner) {
    for (int64_t i = 0; i < count; ++i) {
      const char* const p = from.data + ((first + i) * from.stride + k) * Format::bytes;
      for (int64_t at = 0; at < whole_depth(depth); at += 2 * W)
        store_u32(to + i * ROW + at / 2, pairs.along(p + at * Format::bytes, depth - at));
    }
    return;
  }
  const auto rows_of = [&](int64_t pair, int64_t i) {
    const char* const p = from.data + ((k + 2 * pair) * from.stride + first + i) * Format::bytes;
    const int64_t evens = 2 * pair < depth ? count - i : 0, odds = 2 * pair + 1 < depth ? count - i : 0;
    return pairs.across(evens ? p : from.data, evens, odds ? p + from.stride * Format::bytes : from.data, odds);
  };
  static_assert(HEIGHT % W == 0);
#if defined(SUBULP_TILES)
  for (int64_t i = 0; i < count; i += W)
    for (int64_t pair = 0; pair < whole_depth(depth) / 2; pair += W) {
      U square[W];
      for (int64_t j = 0; j < W; ++j) square[j] = rows_of(pair + j, i);
      transpose(square);
      for (int64_t j = 0; j < W; ++j) store_u32(to + (i + j) * ROW + pair, square[j]);
    }
#else
  static_assert(W % ROWS == 0);
  for (int64_t i = 0; i < count; i += W)
    for (int64_t pair = 0; pair < (depth + 1) / 2; ++pair) {
      alignas(64) uint32_t units[W];
      store_u32(units, rows_of(pair, i));
      for (int64_t group = 0; group < std::min<int64_t>(W, count - i); group += ROWS)
        std::memcpy(to + (i + group) * ROW + pair * ROWS, units + group, ROWS * sizeof *to);
    }
#endif
}
template <class Format>
inline void pack_a(const Source& from, int64_t first, int64_t count, int64_t k, int64_t depth, uint32_t* to) {
  pack_rows(Pairs<Format>(from.scale), from, first, count, k, depth, to);
}

// At most W columns of B from `first` on, a vector in a panel of `width` columns.
template <class Format>
inline void pack_columns(const Pairs<Format>& pairs, const Source& from, int64_t first, int64_t count, int64_t k,
                         int64_t depth, uint32_t* to, int64_t width) {
  const int64_t steps = whole_depth(depth) / 2;
  if (from.k_is_inner) {
    const char* const p = from.data + (first * from.stride + k) * Format::bytes;
    for (int64_t step = 0; step < steps; step += W) {
      U square[W];
      for (int64_t j = 0; j < W; ++j)
        square[j] = j < count ? pairs.along(p + (j * from.stride + 2 * step) * Format::bytes, depth - 2 * step) : u32(0);
      transpose(square);
      for (int64_t i = 0; i < std::min<int64_t>(W, steps - step); ++i) store_u32(to + (step + i) * width, square[i]);
    }
    return;
  }
  const char* p = from.data + (k * from.stride + first) * Format::bytes;
  for (int64_t step = 0; step < (depth + 1) / 2; ++step, p += 2 * from.stride * Format::bytes) {
    const int64_t odds = 2 * step + 1 < depth ? count : 0;
    store_u32(to + step * width, pairs.across(p, count, odds ? p + from.stride * Format::bytes : p, odds));
  }
  for (int64_t step = (depth + 1) / 2; step < steps; ++step) store_u32(to + step * width, u32(0));
}
// A panel: `count` columns of B from `first` on, at most WIDTH of them; missing ones of a vector or tile are any
// numbers.
template <class Format>
inline void pack_b(const Source& from, int64_t first, int64_t count, int64_t k, int64_t depth, uint32_t* to) {
  const Pairs<Format> pairs(from.scale);
  const int64_t width = whole_width(count);
  for (int64_t v = 0; v < count; v += W)
    pack_columns(pairs, from, first + v, std::min<int64_t>(W, count - v), k, depth, to + v, width);
}

// ------------------------------------------------------------------------- blocks, each with a scale of its own

// Calls work(from, size) for each part of `count` numbers from `first` on that lies in one block of `size` numbers;
// `from` counts from `first`.
template <class Work>
inline void each_part(int64_t first, int64_t count, int64_t size, Work work) {
  for (int64_t at = 0, next = 0; at < count; at = next) {
    next = std::min(count, ((first + at) / size + 1) * size - first);
    work(at, next - at);
  }
}

// Calls work(pairs) with what decodes the block at a line and a place in it.
template <class Work>
inline void with_block(const Source& from, int64_t line, int64_t inner, Work work) {
  const subulp_product_blocks& b = *from.blocks;
  const int64_t block = line / b.lines * b.across + inner / b.inner;
  const float scale = std::ldexp(1.0f, -b.exponents[block]);
  if (b.types && b.types[block]) work(Pairs<E5m2>(scale));
  else work(Pairs<E4m3>(scale));
}

// As pack_a and pack_b. Blocks begin at multiples of SUBULP_BLOCK_STEP, and so between groups of rows, between vectors
// of columns and between steps.
static_assert(SUBULP_BLOCK_STEP % (2 * W) == 0 && SUBULP_BLOCK_STEP % ROWS == 0 && DEPTH % SUBULP_BLOCK_STEP == 0);
inline void pack_a_blocks(const Source& from, int64_t first, int64_t count, int64_t k, int64_t depth, uint32_t* to) {
  const bool k_is_inner = from.k_is_inner;
  const int64_t of_rows = k_is_inner ? from.blocks->lines : from.blocks->inner;
  const int64_t of_k = k_is_inner ? from.blocks->inner : from.blocks->lines;
  each_part(first, count, of_rows, [&](int64_t i, int64_t rows) {
    each_part(k, depth, of_k, [&](int64_t s, int64_t deep) {
      const int64_t row = first + i, at = k + s;
      with_block(from, k_is_inner ? row : at, k_is_inner ? at : row, [&](const auto& pairs) {
        pack_rows(pairs, from, row, rows, at, deep, to + i * ROW + s / 2 * between_steps(from));
      });
    });
  });
}
inline void pack_b_blocks(const Source& from, int64_t first, int64_t count, int64_t k, int64_t depth, uint32_t* to) {
  const bool k_is_inner = from.k_is_inner;
  const int64_t width = whole_width(count), of_k = k_is_inner ? from.blocks->inner : from.blocks->lines;
  for (int64_t v = 0; v < count; v += W)
    each_part(k, depth, of_k, [&](int64_t s, int64_t deep) {
      const int64_t column = first + v, at = k + s;
      with_block(from, k_is_inner ? column : at, k_is_inner ? at : column, [&](const auto& pairs) {
        pack_columns(pairs, from, column, std::min<int64_t>(W, count - v), at, deep, to + s / 2 * width + v, width);
      });
    });
}

}  // namespace simd
