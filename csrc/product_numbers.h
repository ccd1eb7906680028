// Panels of numbers as FP32, the odd one of each pair first; included by product_pack.h.
#pragma once

namespace simd {

// One row or column, `depth` numbers along k, as units that lie `apart` from each other; the rest of STEPS is not
// written.
template <class Format>
inline void pack_line(const Source& from, int64_t line_index, int64_t k, int64_t depth, uint32_t* to, int64_t apart) {
  alignas(64) uint32_t line[DEPTH + W];
  const char* const p = from.data + (line_index * from.stride + k) * Format::bytes;
  const F scale = f32(from.scale);
  for (int64_t i = 0; i < depth; i += W)
    store_u32(line + i, load_upper<Format>(p + i * Format::bytes, std::min<int64_t>(W, depth - i), scale));
  line[depth] = 0;
  for (int64_t i = 0; i < (depth + 1) / 2; ++i) {
    to[2 * i * apart] = line[2 * i + 1];
    to[(2 * i + 1) * apart] = line[2 * i];
  }
}

// `count` rows of A from `first` on, in groups of ROWS. Where k is inner, a row's units follow each other, a row
// every ROW units; else a step's do, a step every ROWS units. Missing rows of the last group are any numbers.
template <class Format>
inline void pack_a(const Source& from, int64_t first, int64_t count, int64_t k, int64_t depth, uint32_t* to) {
  if (from.k_is_inner) {
    for (int64_t i = 0; i < count; ++i) pack_line<Format>(from, first + i, k, depth, to + i * ROW, 1);
    return;
  }
  const F scale = f32(from.scale);
  alignas(64) uint32_t two[2][HEIGHT + W];
  for (int64_t pair = 0; pair < (depth + 1) / 2; ++pair) {
    for (int odd = 0; odd < 2; ++odd) {
      const bool there = 2 * pair + odd < depth;
      const char* const p = from.data + ((k + 2 * pair + odd) * from.stride + first) * Format::bytes;
      for (int64_t i = 0; i < count; i += W)
        store_u32(two[odd] + i, load_upper<Format>(p + i * Format::bytes,
                                                   there ? std::min<int64_t>(W, count - i) : 0, scale));
    }
    for (int64_t group = 0; group * ROWS < count; ++group) {
      uint32_t* const out = to + group * ROWS * ROW + pair * 2 * ROWS;
      for (int i = 0; i < ROWS; ++i) {
        out[i] = two[1][group * ROWS + i];
        out[ROWS + i] = two[0][group * ROWS + i];
      }
    }
  }
}

// A panel: `count` columns of B from `first` on, at most WIDTH of them, as whole vectors.
template <class Format>
inline void pack_b(const Source& from, int64_t first, int64_t count, int64_t k, int64_t depth, uint32_t* to) {
  const int64_t vectors = (count + W - 1) / W, width = vectors * W;
  if (from.k_is_inner) {
    if (count < width) std::memset(to, 0, static_cast<size_t>((depth + 1) / 2 * 2 * width) * sizeof *to);
    for (int64_t j = 0; j < count; ++j) pack_line<Format>(from, first + j, k, depth, to + j, width);
    return;
  }
  const F scale = f32(from.scale);
  for (int64_t pair = 0; pair < (depth + 1) / 2; ++pair) {
    const char* const p = from.data + ((k + 2 * pair) * from.stride + first) * Format::bytes;
    const bool there = 2 * pair + 1 < depth;
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t at = v * W * Format::bytes, left = std::min<int64_t>(W, count - v * W);
      uint32_t* const out = to + pair * 2 * width + v * W;
      store_u32(out, load_upper<Format>(p + from.stride * Format::bytes + at, there ? left : 0, scale));
      store_u32(out + width, load_upper<Format>(p + at, left, scale));
    }
  }
}

}  // namespace simd
