// Products of packed panels in tiles of 16 x 16 sums, as AMX multiplies BF16; included by product.h.
//
// Sums take the products by 32 along k: those of even places are added up from zero, and those of odd places, each with a
// single rounding; then both sums, then the result to what was there. Subnormal numbers are taken for zero. Plain code
// spells it out, so that every machine tests the layout of tiles and can repeat what AMX has computed.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__AMX_BF16__)
#include <immintrin.h>
#endif
#include "product_pack.h"

namespace simd {

constexpr int64_t TILE_BYTES = 4;  // of a sum, and of a pair

#if defined(__AMX_BF16__)
// GCC does not know that the instructions of tiles read memory: what they read is written before this.
inline void written() { __asm__ volatile("" ::: "memory"); }

// Shapes of a thread's tiles, as long as it multiplies. No other code keeps tiles from call to call: by the convention of
// calls whoever is called may change them.
class Registers {
 public:
  Registers() {
    for (int i = 0; i < 8; ++i) {
      row_bytes_[i] = TILE * TILE_BYTES;
      rows_[i] = TILE;
    }
    written();
    _tile_loadconfig(this);
  }
  ~Registers() { _tile_release(); }
  Registers(const Registers&) = delete;
  Registers& operator=(const Registers&) = delete;

 private:
  // As the processor reads them: a palette, where to begin, and shapes.
  uint8_t palette_ = 1, start_row_ = 0, reserved_[14] = {};
  uint16_t row_bytes_[16] = {};
  uint8_t rows_[16] = {};
};
static_assert(sizeof(Registers) == 64);

// Sums of `down` x `across` tiles: rows of A, ROW units apart, times columns of B, in steps `width` units apart. Asks for
// units from `ahead` on meanwhile, a group's share of a panel.
template <int down, int across>
inline void multiply(int64_t steps, const uint32_t* a, const uint32_t* b, int64_t width, float* c, int64_t stride,
                     bool add, const uint32_t* ahead) {
  const int64_t a_bytes = ROW * TILE_BYTES, b_bytes = width * TILE_BYTES, c_bytes = stride * TILE_BYTES;
  float* const below = c + TILE * stride;
  written();
  if (add) {
    _tile_loadd(0, c, c_bytes);
    if constexpr (across > 1) _tile_loadd(1, c + TILE, c_bytes);
    if constexpr (down > 1) _tile_loadd(2, below, c_bytes);
    if constexpr (down > 1 && across > 1) _tile_loadd(3, below + TILE, c_bytes);
  } else {
    _tile_zero(0);
    if constexpr (across > 1) _tile_zero(1);
    if constexpr (down > 1) _tile_zero(2);
    if constexpr (down > 1 && across > 1) _tile_zero(3);
  }
  constexpr int64_t share = WIDTH * TILE / GROUPS;
  for (int64_t step = 0; step < steps; step += TILE, ahead += share) {
    for (int64_t i = 0; i < share; i += TILE) _mm_prefetch(reinterpret_cast<const char*>(ahead + i), _MM_HINT_T1);
    _tile_loadd(6, b + step * width, b_bytes);
    _tile_loadd(4, a + step, a_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (across > 1) {
      _tile_loadd(7, b + step * width + TILE, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (down > 1) {
      _tile_loadd(5, a + TILE * ROW + step, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (across > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (across > 1) _tile_stored(1, c + TILE, c_bytes);
  if constexpr (down > 1) _tile_stored(2, below, c_bytes);
  if constexpr (down > 1 && across > 1) _tile_stored(3, below + TILE, c_bytes);
}
#else
struct Registers {
  Registers() {}
};

inline float half_of(uint32_t pair, int place) {
  const uint32_t bits = place ? pair & 0xFFFF0000u : pair << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

template <int down, int across>
inline void multiply(int64_t steps, const uint32_t* a, const uint32_t* b, int64_t width, float* c, int64_t stride,
                     bool add, const uint32_t*) {
  constexpr int64_t columns = across * TILE;
  for (int64_t i = 0; i < down * TILE; ++i) {
    float* const sums = c + i * stride;
    if (!add) std::fill(sums, sums + columns, 0.0f);
    for (int64_t step = 0; step < steps; step += TILE) {
      float of[2][columns] = {};
      for (int64_t s = step; s < step + TILE; ++s)
        for (int place = 0; place < 2; ++place)
          for (int64_t j = 0; j < columns; ++j)
            of[place][j] = std::fma(half_of(a[i * ROW + s], place), half_of(b[s * width + j], place), of[place][j]);
      for (int64_t j = 0; j < columns; ++j) sums[j] += of[0][j] + of[1][j];
    }
  }
}
#endif

// The same of fewer sums than the tiles have, or as many, in a place that may have no room for more.
template <int down, int across>
inline void multiply_edge(int64_t steps, const uint32_t* a, const uint32_t* b, int64_t width, float* c, int64_t stride,
                          int64_t rows, int64_t columns, bool add, const uint32_t* ahead) {
  constexpr int64_t apart = across * TILE;
  if (rows >= down * TILE && columns >= apart)
    return multiply<down, across>(steps, a, b, width, c, stride, add, ahead);
  alignas(64) float edge[down * TILE * apart];
  const size_t bytes = static_cast<size_t>(std::min(columns, apart)) * sizeof(float);
  const int64_t count = std::min<int64_t>(rows, down * TILE);
  if (add) {
    std::memset(edge, 0, sizeof edge);
    for (int64_t i = 0; i < count; ++i) std::memcpy(edge + i * apart, c + i * stride, bytes);
  }
  multiply<down, across>(steps, a, b, width, edge, apart, add, ahead);
  for (int64_t i = 0; i < count; ++i) std::memcpy(c + i * stride, edge + i * apart, bytes);
}

// Rows of A, packed, times a panel of `columns`. Each group of them asks for its part of the next panel, since a panel in
// the third cache comes no faster than it is multiplied.
template <bool a_by_row>
inline void multiply_panel(int64_t steps, const uint32_t* a, const uint32_t* b, float* c, int64_t stride, int64_t rows,
                           int64_t columns, bool add) {
  const int64_t width = whole_width(columns);
  const bool two = width > TILE;
  for (int64_t i = 0; i < rows; i += ROWS) {
    const auto multiply = rows - i > TILE ? (two ? multiply_edge<2, 2> : multiply_edge<2, 1>)
                                          : (two ? multiply_edge<1, 2> : multiply_edge<1, 1>);
    multiply(steps, a + i * ROW, b, width, c + i * stride, stride, rows - i, columns, add,
             b + WIDTH * STEPS + i / ROWS * (WIDTH * STEPS / GROUPS));
  }
}

}  // namespace simd
