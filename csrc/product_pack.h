// Operands of products, packed into panels and rounded to BF16 meanwhile; see product.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "byte_table.h"
#include "codec.h"
#include "subulp.h"

namespace simd {

// A panel holds, step after step along k, one unit for each of its rows (of A) or columns (of B). A unit is a pair, the
// even number in the lower half, as units of BF16 take it; or a number as FP32, the odd one of each pair first. Plain
// code has pairs too, so that every machine tests their layout. Tiles take pairs as well, their rows one after the other
// and as many steps along k as a tile has, the last ones of zeros.
#if defined(__AMX_BF16__) || defined(SUBULP_PLAIN_TILES)
#define SUBULP_TILES
#define SUBULP_PAIRS
constexpr int TILE = 16, ROWS = 2 * TILE, VECTORS = 2 * TILE / W;
#elif defined(__AVX512BF16__)
#define SUBULP_PAIRS
constexpr int ROWS = 8, VECTORS = 3;
#elif defined(__AVX512F__)
constexpr int ROWS = 8, VECTORS = 3;
#elif defined(__AVX2__)
constexpr int ROWS = 6, VECTORS = 2;
#else
#define SUBULP_PAIRS
constexpr int ROWS = 4, VECTORS = 1;
#endif
#if defined(SUBULP_PAIRS)
constexpr int STEPS_PER_PAIR = 1;
#else
constexpr int STEPS_PER_PAIR = 2;
#endif
#if defined(SUBULP_TILES)
constexpr int GROUPS = 4, APART = TILE, LEAST_WIDTH = TILE, LEAST_DEPTH = 2 * TILE;
#else
constexpr int GROUPS = 16, APART = 0, LEAST_WIDTH = W, LEAST_DEPTH = 2;
#endif

// Numbers along k of a block, and rows of A and columns of B that are packed for it: a panel of B fits the first
// cache and a block of A the second.
constexpr int64_t DEPTH = 256, STEPS = DEPTH / 2 * STEPS_PER_PAIR;
// Units from a row of A to the next: a tile's rows lie in other sets of the first cache each.
constexpr int64_t ROW = STEPS + APART;
constexpr int64_t WIDTH = VECTORS * W, HEIGHT = ROWS * GROUPS, BREADTH = WIDTH * 32;

// Columns and numbers along k that a panel has for so many.
constexpr int64_t whole_width(int64_t columns) { return (columns + LEAST_WIDTH - 1) / LEAST_WIDTH * LEAST_WIDTH; }
constexpr int64_t whole_depth(int64_t depth) { return (depth + LEAST_DEPTH - 1) / LEAST_DEPTH * LEAST_DEPTH; }

// A matrix as memory has it. Along `inner` numbers lie next to each other, lines of them `stride` numbers apart.
struct Source {
  const char* data;
  int64_t stride;
  float scale;
  bool k_is_inner;
  const subulp_product_blocks* blocks;  // each with a scale of its own, or null
};

// W numbers or fewer, rounded to BF16, in the upper halves of lanes whose lower halves are zero.
template <class Format>
inline U load_upper(const char* p, int64_t count, F scale) {
  char padded[W * 4] = {};
  if (count < W) {
    if (count <= 0) return u32(0);
    std::memcpy(padded, p, static_cast<size_t>(count * Format::bytes));
    p = padded;
  }
  return and_(Bf16::nearest_high(mul(Format::load(p), scale)), u32(0xFFFF0000u));
}
// BF16 as it is.
template <>
inline U load_upper<Bf16>(const char* p, int64_t count, F scale) {
  char padded[W * 4] = {};
  if (count < W) {
    if (count <= 0) return u32(0);
    std::memcpy(padded, p, static_cast<size_t>(count * Bf16::bytes));
    p = padded;
  }
  return as_u32(mul(Bf16::load(p), scale));
}

}  // namespace simd

#if defined(SUBULP_PAIRS)
#include "product_pairs.h"
#else
#include "product_numbers.h"
#endif

namespace simd {

using Pack = void (*)(const Source&, int64_t, int64_t, int64_t, int64_t, uint32_t*);

// A matrix and how its rows (of A) or columns (of B) are packed; `pack` is null where no format has the code.
struct Operand {
  Source from;
  Pack pack;

  Operand(const void* data, int dtype, int64_t stride, bool k_is_inner, float scale, bool of_a)
      : from{static_cast<const char*>(data), stride, scale, k_is_inner, nullptr}, pack(packer(dtype, of_a)) {}

  // The same of numbers whose blocks have scales, if these blocks do.
  Operand(const void* data, int dtype, int64_t stride, bool k_is_inner, float scale, bool of_a,
          const subulp_product_blocks& blocks)
      : Operand(data, dtype, stride, k_is_inner, scale, of_a) {
    if (!blocks.exponents) return;
    from.blocks = &blocks;
    pack = nullptr;
#if defined(SUBULP_PAIRS)
    const bool fit = blocks.lines % SUBULP_BLOCK_STEP == 0 && blocks.inner % SUBULP_BLOCK_STEP == 0;
    if (dtype == SUBULP_E4M3 && scale == 1.0f && fit) pack = of_a ? pack_a_blocks : pack_b_blocks;
#endif
  }

 private:
  static Pack packer(int dtype, bool of_a) {
    switch (dtype) {
#define SUBULP_CASE(code, name, Format) \
  case SUBULP_##code: return of_a ? pack_a<Format> : pack_b<Format>;
      SUBULP_FLOATS(SUBULP_CASE)
#undef SUBULP_CASE
      default: return nullptr;
    }
  }
};

}  // namespace simd
