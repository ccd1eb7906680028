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

// `count` rows of A from `first` on, in groups of ROWS. Where k is inner, a row's units follow each other, a row
// every STEPS units; else a step's do, a step every ROWS units. Missing rows of the last group are any numbers.
template <class Format>
inline void pack_a(const Source& from, int64_t first, int64_t count, int64_t k, int64_t depth, uint32_t* to) {
  const Pairs<Format> pairs(from.scale);
  if (from.k_is_inner) {
    for (int64_t i = 0; i < count; ++i) {
      const char* const p = from.data + ((first + i) * from.stride + k) * Format::bytes;
      for (int64_t at = 0; at < depth; at += 2 * W)
        store_u32(to + i * STEPS + at / 2, pairs.along(p + at * Format::bytes, depth - at));
    }
    return;
  }
  static_assert(W % ROWS == 0 && HEIGHT % W == 0);
  for (int64_t i = 0; i < count; i += W)
    for (int64_t pair = 0; pair < (depth + 1) / 2; ++pair) {
      const char* const p = from.data + ((k + 2 * pair) * from.stride + first + i) * Format::bytes;
      const int64_t odds = 2 * pair + 1 < depth ? count - i : 0;
      alignas(64) uint32_t units[W];
      store_u32(units, pairs.across(p, count - i, odds ? p + from.stride * Format::bytes : p, odds));
      for (int64_t group = 0; group < W / ROWS; ++group)
        std::memcpy(to + (i + group * ROWS) * STEPS + pair * ROWS, units + group * ROWS, ROWS * sizeof *to);
    }
}

// A panel: `count` columns of B from `first` on, at most WIDTH of them, as whole vectors.
template <class Format>
inline void pack_b(const Source& from, int64_t first, int64_t count, int64_t k, int64_t depth, uint32_t* to) {
  const Pairs<Format> pairs(from.scale);
  const int64_t vectors = (count + W - 1) / W, width = vectors * W, steps = (depth + 1) / 2;
  for (int64_t v = 0; v < vectors; ++v) {
    const int64_t left = std::min<int64_t>(W, count - v * W);
    if (from.k_is_inner) {
      const char* const p = from.data + ((first + v * W) * from.stride + k) * Format::bytes;
      for (int64_t step = 0; step < steps; step += W) {
        U square[W];
        for (int64_t j = 0; j < W; ++j)
          square[j] = j < left ? pairs.along(p + (j * from.stride + 2 * step) * Format::bytes, depth - 2 * step) : u32(0);
        transpose(square);
        for (int64_t i = 0; i < std::min<int64_t>(W, steps - step); ++i)
          store_u32(to + (step + i) * width + v * W, square[i]);
      }
    } else {
      const char* p = from.data + (k * from.stride + first + v * W) * Format::bytes;
      for (int64_t step = 0; step < steps; ++step, p += 2 * from.stride * Format::bytes) {
        const int64_t odds = 2 * step + 1 < depth ? left : 0;
        store_u32(to + step * width + v * W, pairs.across(p, left, odds ? p + from.stride * Format::bytes : p, odds));
      }
    }
  }
}

}  // namespace simd
