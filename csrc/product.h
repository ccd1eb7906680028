// C = A B in FP32 from operands in BF16: A (m, k) and B (k, n) are rounded to it while they are packed, which
// rounds nothing where they are narrower. Included by product.cpp, once per instruction set.
//
// Every sum begins at zero and takes the products in pairs along k: first the odd one of a pair, then the even
// one, each with a single rounding and with subnormal numbers taken for zero. That is how AVX-512's units of BF16
// multiply; elsewhere the same sequence is spelled out, so the result depends neither on the instruction set nor on
// blocks and threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "buffer.h"
#include "codec.h"
#include "float_mode.h"
#include "subulp.h"

namespace simd {

// A panel holds, step after step along k, one unit for each of its rows (of A) or columns (of B). A unit is a pair, the
// even number in the lower half, as units of BF16 take it; or a number as FP32, the odd one of each pair first. Plain
// code has pairs too, so that every machine tests their layout.
#if defined(__AVX512BF16__)
#define SUBULP_PAIRS
constexpr int ROWS = 8, VECTORS = 3;
inline F step_sum(F sum, uint32_t a, U b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
}
#elif defined(__AVX512F__)
constexpr int ROWS = 8, VECTORS = 3;
inline F step_sum(F sum, uint32_t a, U b) { return _mm512_fmadd_ps(as_f32(u32(a)), as_f32(b), sum); }
#elif defined(__AVX2__)
constexpr int ROWS = 6, VECTORS = 2;
inline F step_sum(F sum, uint32_t a, U b) { return _mm256_fmadd_ps(as_f32(u32(a)), as_f32(b), sum); }
#else
#define SUBULP_PAIRS
constexpr int ROWS = 4, VECTORS = 1;
inline F step_sum(F sum, uint32_t a, U b) {
  const auto numbers = [](U pairs, uint32_t half) { return as_f32(and_(shl(pairs, u32(half)), u32(0xFFFF0000u))); };
  for (const uint32_t half : {0u, 16u}) {
    const F x = numbers(u32(a), half), y = numbers(b, half);
    sum = lanes<F>([&](int i) { return std::fma(x.v[i], y.v[i], sum.v[i]); });
  }
  return sum;
}
#endif
#if defined(SUBULP_PAIRS)
constexpr int STEPS_PER_PAIR = 1;
#else
constexpr int STEPS_PER_PAIR = 2;
#endif

// Numbers along k of a block, and rows of A and columns of B that are packed for it: a panel of B fits the first
// cache and a block of A the second.
constexpr int64_t DEPTH = 256, STEPS = DEPTH / 2 * STEPS_PER_PAIR;
constexpr int64_t WIDTH = VECTORS * W, HEIGHT = ROWS * 16, BREADTH = WIDTH * 32;
// Units of B that are packed at a time, if they are more than one block's: 2 MiB.
constexpr int64_t PACKED = 1 << 20;

// A matrix as memory has it. Along `inner` numbers lie next to each other, lines of them `stride` numbers apart.
struct Source {
  const char* data;
  int64_t stride;
  float scale;
  bool k_is_inner;
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

// The units of W rows or columns in one pair along k, `apart` units from step to step.
inline void store_pair(uint32_t* to, int64_t apart, U even, U odd) {
#if defined(SUBULP_PAIRS)
  (void)apart;
  store_u32(to, or_(shr<16>(even), odd));
#else
  store_u32(to, odd);
  store_u32(to + apart, even);
#endif
}

// One row or column, `depth` numbers along k, as units that lie `apart` from each other; the rest of STEPS is not
// written. `line` has room for the numbers and a vector more.
template <class Format>
inline void pack_line(const Source& from, int64_t line_index, int64_t k, int64_t depth, uint32_t* to, int64_t apart,
                      uint32_t* line) {
  const char* const p = from.data + (line_index * from.stride + k) * Format::bytes;
  const F scale = f32(from.scale);
  for (int64_t i = 0; i < depth; i += W)
    store_u32(line + i, load_upper<Format>(p + i * Format::bytes, std::min<int64_t>(W, depth - i), scale));
  line[depth] = 0;
  const int64_t pairs = (depth + 1) / 2;
#if defined(SUBULP_PAIRS)
  for (int64_t i = 0; i < pairs; ++i) to[i * apart] = line[2 * i] >> 16 | line[2 * i + 1];
#else
  for (int64_t i = 0; i < pairs; ++i) {
    to[2 * i * apart] = line[2 * i + 1];
    to[(2 * i + 1) * apart] = line[2 * i];
  }
#endif
}

// `count` rows of A from `first` on, in groups of ROWS. Where k is inner, a row's units follow each other, a row
// every STEPS units; else a step's do, a step every ROWS units. Missing rows of the last group are any numbers.
template <class Format>
inline void pack_a(const Source& from, int64_t first, int64_t count, int64_t k, int64_t depth, uint32_t* to) {
  if (from.k_is_inner) {
    alignas(64) uint32_t line[DEPTH + W];
    for (int64_t i = 0; i < count; ++i) pack_line<Format>(from, first + i, k, depth, to + i * STEPS, 1, line);
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
      uint32_t* const out = to + group * ROWS * STEPS + pair * STEPS_PER_PAIR * ROWS;
      const uint32_t *const even = two[0] + group * ROWS, *const odd = two[1] + group * ROWS;
      for (int i = 0; i < ROWS; ++i) {
#if defined(SUBULP_PAIRS)
        out[i] = even[i] >> 16 | odd[i];
#else
        out[i] = odd[i];
        out[ROWS + i] = even[i];
#endif
      }
    }
  }
}

// A panel: `count` columns of B from `first` on, at most WIDTH of them, as whole vectors.
template <class Format>
inline void pack_b(const Source& from, int64_t first, int64_t count, int64_t k, int64_t depth, uint32_t* to) {
  const int64_t vectors = (count + W - 1) / W, width = vectors * W;
  if (from.k_is_inner) {
    alignas(64) uint32_t line[DEPTH + W];
    if (count < width) std::memset(to, 0, static_cast<size_t>((depth + 1) / 2 * STEPS_PER_PAIR * width) * sizeof *to);
    for (int64_t j = 0; j < count; ++j) pack_line<Format>(from, first + j, k, depth, to + j, width, line);
    return;
  }
  const F scale = f32(from.scale);
  for (int64_t pair = 0; pair < (depth + 1) / 2; ++pair) {
    const char* const p = from.data + ((k + 2 * pair) * from.stride + first) * Format::bytes;
    const bool there = 2 * pair + 1 < depth;
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t at = v * W * Format::bytes, left = std::min<int64_t>(W, count - v * W);
      const U even = load_upper<Format>(p + at, left, scale);
      const U odd = load_upper<Format>(p + from.stride * Format::bytes + at, there ? left : 0, scale);
      store_pair(to + pair * STEPS_PER_PAIR * width + v * W, width, even, odd);
    }
  }
}

// ROWS rows of A times a panel of `vectors` vectors, added to C if `add`.
template <int vectors, bool a_by_row>
inline void multiply(int64_t steps, const uint32_t* a, const uint32_t* b, float* c, int64_t stride, int64_t rows,
                     int64_t columns, bool add) {
  constexpr int64_t next_row = a_by_row ? STEPS : 1, next_step = a_by_row ? 1 : ROWS;
  F sum[ROWS][vectors];
  alignas(64) float edge[ROWS * vectors * W];
  const bool whole = rows >= ROWS && columns >= vectors * W;
  float* const to = whole ? c : edge;
  const int64_t apart = whole ? stride : vectors * W;
  if (add && !whole)
    for (int64_t i = 0; i < std::min<int64_t>(rows, ROWS); ++i)
      std::memcpy(edge + i * apart, c + i * stride, static_cast<size_t>(columns) * sizeof(float));
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 3
    for (int j = 0; j < vectors; ++j) sum[i][j] = add ? load_f32(to + i * apart + j * W) : f32(0.0f);
  for (int64_t s = 0; s < steps; ++s) {
    U panel[vectors];
#pragma GCC unroll 3
    for (int j = 0; j < vectors; ++j) panel[j] = load_u32(b + (s * vectors + j) * W);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 3
      for (int j = 0; j < vectors; ++j) sum[i][j] = step_sum(sum[i][j], a[i * next_row + s * next_step], panel[j]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 3
    for (int j = 0; j < vectors; ++j) store_f32(to + i * apart + j * W, sum[i][j]);
  if (!whole)
    for (int64_t i = 0; i < std::min<int64_t>(rows, ROWS); ++i)
      std::memcpy(c + i * stride, edge + i * apart, static_cast<size_t>(columns) * sizeof(float));
}

template <bool a_by_row>
inline void multiply_panel(int64_t steps, const uint32_t* a, const uint32_t* b, float* c, int64_t stride, int64_t rows,
                           int64_t columns, bool add) {
  for (int64_t i = 0; i < rows; i += ROWS) {
    const uint32_t* const group = a + i * STEPS;
    float* const to = c + i * stride;
    switch ((columns + W - 1) / W) {
      case 1: multiply<1, a_by_row>(steps, group, b, to, stride, rows - i, columns, add); break;
#if defined(__AVX2__)
      case 2: multiply<2, a_by_row>(steps, group, b, to, stride, rows - i, columns, add); break;
#endif
#if defined(__AVX512F__)
      case 3: multiply<3, a_by_row>(steps, group, b, to, stride, rows - i, columns, add); break;
#endif
    }
  }
}

using Pack = void (*)(const Source&, int64_t, int64_t, int64_t, int64_t, uint32_t*);

inline Pack packer(int dtype, bool of_a) {
  switch (dtype) {
#define SUBULP_CASE(code, name, Format) \
  case SUBULP_##code: return of_a ? pack_a<Format> : pack_b<Format>;
    SUBULP_FLOATS(SUBULP_CASE)
#undef SUBULP_CASE
    default: return nullptr;
  }
}

inline int run_product(const subulp_product& p) {
  const Pack pack_rows = packer(p.a_dtype, true), pack_columns = packer(p.b_dtype, false);
  if (!pack_rows || !pack_columns) return -1;
  const Source a{static_cast<const char*>(p.a), p.a_stride, p.a_scale, p.a_k_inner != 0};
  const Source b{static_cast<const char*>(p.b), p.b_stride, p.b_scale, p.b_k_inner != 0};
  const int64_t depths = std::max<int64_t>(1, (p.k + DEPTH - 1) / DEPTH);
  // As many blocks of rows for each thread, if there is one.
  const int64_t least = (p.m + HEIGHT - 1) / HEIGHT;
  const int64_t wanted = least < p.threads ? least : (least + p.threads - 1) / p.threads * p.threads;
  const int64_t height = ((p.m + wanted - 1) / wanted + ROWS - 1) / ROWS * ROWS, blocks = (p.m + height - 1) / height;
  // Blocks of B along k that are packed at a time: threads wait for each other between times.
  const int64_t columns_at_once = std::min((p.n + WIDTH - 1) / WIDTH * WIDTH, BREADTH);
  const int64_t at_once = std::min(depths, std::max<int64_t>(1, PACKED / (STEPS * columns_at_once)));
  Buffer<uint32_t> packed_b(at_once * STEPS * columns_at_once, UNSET);
#if defined(_OPENMP)
#pragma omp parallel num_threads(p.threads) if (p.threads > 1 && p.m * p.n * p.k > 1 << 16)
#endif
  {
    const FlushMode flush;
    Buffer<uint32_t> packed_a(STEPS * HEIGHT, UNSET);
    for (int64_t column = 0; column < p.n; column += BREADTH)
      for (int64_t first = 0; first < depths; first += at_once) {
        const int64_t columns = std::min(BREADTH, p.n - column), panels = (columns + WIDTH - 1) / WIDTH;
        const int64_t count = std::min(at_once, depths - first);
        const auto depth_of = [&](int64_t block) { return std::min(DEPTH, p.k - (first + block) * DEPTH); };
        const auto panel = [&](int64_t block, int64_t j) { return packed_b.data() + (block * panels + j) * WIDTH * STEPS; };
#if defined(_OPENMP)
#pragma omp for schedule(static)
#endif
        for (int64_t task = 0; task < count * panels; ++task) {
          const int64_t block = task / panels, j = task % panels;
          pack_columns(b, column + j * WIDTH, std::min(WIDTH, columns - j * WIDTH), (first + block) * DEPTH,
                       depth_of(block), panel(block, j));
        }
        // Fewer blocks than threads: each packs the same rows and multiplies them by panels of its own.
        const int64_t groups = std::min<int64_t>(panels, (p.threads + blocks - 1) / blocks);
#if defined(_OPENMP)
#pragma omp for schedule(static)
#endif
        for (int64_t task = 0; task < blocks * groups; ++task) {
          const int64_t row = task / groups * height, rows = std::min(height, p.m - row), group = task % groups;
          for (int64_t block = 0; block < count; ++block) {
            const int64_t steps = (depth_of(block) + 1) / 2 * STEPS_PER_PAIR;
            pack_rows(a, row, rows, (first + block) * DEPTH, depth_of(block), packed_a.data());
            for (int64_t j = group * panels / groups; j < (group + 1) * panels / groups; ++j) {
              float* const to = p.c + row * p.c_stride + column + j * WIDTH;
              const int64_t width = std::min(WIDTH, columns - j * WIDTH);
              const bool add = first + block > 0;
              if (a.k_is_inner) multiply_panel<true>(steps, packed_a.data(), panel(block, j), to, p.c_stride, rows, width, add);
              else multiply_panel<false>(steps, packed_a.data(), panel(block, j), to, p.c_stride, rows, width, add);
            }
          }
        }
      }
  }
  return 0;
}

}  // namespace simd
