// C = A B in FP32 from operands in BF16: A (m, k) and B (k, n) are rounded to it while they are packed, which
// rounds nothing where they are narrower. Included by product.cpp, once per instruction set.
//
// Every sum begins at zero and takes the products in the order of product_vectors.h, or where there are tiles in that of
// product_tiles.h: it depends neither on blocks nor on threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "buffer.h"
#include "float_mode.h"
#include "product_pack.h"
#if defined(SUBULP_TILES)
#include "product_tiles.h"
#else
#include "product_vectors.h"
#endif

namespace simd {

// Columns of B that are packed, and its numbers along k from one block's first on: block after block, in each of them
// panel after panel.
struct Packed {
  int64_t columns, k;
  uint32_t* units;

  static int64_t size(int64_t columns, int64_t k) { return Packed{columns, k, nullptr}.tasks() * WIDTH * STEPS; }

  int64_t panels() const { return (columns + WIDTH - 1) / WIDTH; }
  int64_t blocks() const { return std::max<int64_t>(1, (k + DEPTH - 1) / DEPTH); }
  int64_t tasks() const { return panels() * blocks(); }
  int64_t depth(int64_t block) const { return std::min(DEPTH, k - block * DEPTH); }
  int64_t width(int64_t panel) const { return std::min(WIDTH, columns - panel * WIDTH); }
  uint32_t* panel(int64_t block, int64_t j) const { return units + (block * panels() + j) * WIDTH * STEPS; }

  // One panel, whose numbers are B's from `column` and `first` on.
  void pack(const Operand& b, int64_t column, int64_t first, int64_t task) const {
    const int64_t block = task / panels(), j = task % panels();
    b.pack(b.from, column + j * WIDTH, width(j), first + block * DEPTH, depth(block), panel(block, j));
  }
};

// At most HEIGHT rows of A from `row` on, their numbers along k from `first` on, times the panels `from` to `to`: to C,
// whose first element is that of `row` and of the first panel; added to it if `add`. `packed_a` has room for
// ROW * HEIGHT units.
inline void multiply_rows(const Operand& a, int64_t row, int64_t rows, int64_t first, const Packed& b, int64_t from,
                          int64_t to, float* c, int64_t stride, bool add, uint32_t* packed_a) {
  for (int64_t block = 0; block < b.blocks(); ++block) {
    const int64_t depth = b.depth(block), steps = whole_depth(depth) / 2 * STEPS_PER_PAIR;
    a.pack(a.from, row, rows, first + block * DEPTH, depth, packed_a);
    for (int64_t j = from; j < to; ++j) {
      const auto multiply = a.from.k_is_inner ? multiply_panel<true> : multiply_panel<false>;
      multiply(steps, packed_a, b.panel(block, j), c + j * WIDTH, stride, rows, b.width(j), add || block > 0);
    }
  }
}

// The same with all panels and all of k.
inline void multiply_rows(const Operand& a, int64_t row, int64_t rows, const Packed& b, float* c, int64_t stride, bool add,
                          uint32_t* packed_a) {
  multiply_rows(a, row, rows, 0, b, 0, b.panels(), c, stride, add, packed_a);
}

// Where a product goes: as it is, or times a factor, plus a number for each column, and then as BF16.
class Result {
 public:
  explicit Result(const subulp_product& p)
      : data_(static_cast<char*>(p.c)), stride_(p.c_stride), narrow_(p.c_dtype == SUBULP_BF16), scale_(p.c_scale),
        bias_(p.bias) {}

  bool is_plain() const { return !narrow_ && scale_ == 1.0f && !bias_; }
  int64_t stride() const { return stride_; }
  float* plain(int64_t row, int64_t column) const {
    return reinterpret_cast<float*>(data_) + row * stride_ + column;
  }
  // Sums, `apart` from row to row, to their places from `row` and `column` on.
  void finish(const float* sums, int64_t apart, int64_t row, int64_t rows, int64_t column, int64_t columns) const {
    const IeeeMode ieee;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; j += W)
        finish(sums + i * apart + j, row + i, column + j, std::min<int64_t>(W, columns - j));
  }

 private:
  void finish(const float* sums, int64_t row, int64_t column, int64_t count) const {
    alignas(64) float edge[W];
    const auto whole = [&](const float* from) {
      if (count == W) return load_f32(from);
      std::memcpy(edge, from, static_cast<size_t>(count) * sizeof(float));
      return load_f32(edge);
    };
    F x = mul(whole(sums), f32(scale_));
    if (bias_) x = add(x, whole(bias_ + column));
    const int64_t bytes = narrow_ ? 2 : 4;
    char* const to = data_ + (row * stride_ + column) * bytes;
    char* const at = count == W ? to : reinterpret_cast<char*>(edge);
    if (narrow_) store_u16(at, shr<16>(Bf16::unbounded_high(x)));
    else store_f32(at, x);
    if (count < W) std::memcpy(to, edge, static_cast<size_t>(count * bytes));
  }

  char* data_;
  int64_t stride_;
  bool narrow_;
  float scale_;
  const float* bias_;
};

// Units of B that are packed at a time, if they are more than one block's: 4 MiB. Between times threads wait for each
// other.
constexpr int64_t PACKED = 1 << 20;

// A product of matrices whose packed B may be larger than memory should be.
inline void product(const Operand& a, const Operand& b, const Result& c, int64_t m, int64_t n, int64_t k, int threads) {
  const int64_t blocks_of_k = std::max<int64_t>(1, (k + DEPTH - 1) / DEPTH);
  // Sums that are finished need all of k: then fewer columns are packed, not less of k.
  const int64_t widest = c.is_plain() ? BREADTH : std::min(BREADTH, PACKED / (STEPS * blocks_of_k) / WIDTH * WIDTH);
  const int64_t breadth = std::min(n, std::max(widest, WIDTH)), panels_at_once = (breadth + WIDTH - 1) / WIDTH;
  const int64_t depth = c.is_plain() ? std::max<int64_t>(1, PACKED / (STEPS * WIDTH * panels_at_once)) * DEPTH
                                     : blocks_of_k * DEPTH;
  // As many blocks of rows for each thread, if there is one.
  const int64_t least = (m + HEIGHT - 1) / HEIGHT;
  const int64_t wanted = least < threads ? least : (least + threads - 1) / threads * threads;
  const int64_t height = ((m + wanted - 1) / wanted + ROWS - 1) / ROWS * ROWS, blocks = (m + height - 1) / height;
  Buffer<uint32_t> units(Packed::size(breadth, std::min(k, depth)), UNSET);
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads) if (threads > 1 && m * n * k > 1 << 16)
#endif
  {
    const FlushMode flush;
    const Registers registers;
    Buffer<uint32_t> packed_a(ROW * HEIGHT, UNSET);
    // A cache's sets are found by addresses' lower bits: rows apart by a power of two would share few of them.
    const int64_t apart = breadth + W;
    Buffer<float> sums(c.is_plain() ? 0 : height * apart, UNSET);
    for (int64_t column = 0; column < n; column += breadth)
      for (int64_t first = 0; first == 0 || first < k; first += depth) {
        const Packed packed{std::min(breadth, n - column), std::min(depth, k - first), units.data()};
#if defined(_OPENMP)
#pragma omp for schedule(static)
#endif
        for (int64_t task = 0; task < packed.tasks(); ++task) packed.pack(b, column, first, task);
        // Fewer blocks than threads: each packs the same rows and multiplies them by panels of its own.
        const int64_t panels = packed.panels(), groups = std::min<int64_t>(panels, (threads + blocks - 1) / blocks);
#if defined(_OPENMP)
#pragma omp for schedule(static)
#endif
        for (int64_t task = 0; task < blocks * groups; ++task) {
          const int64_t row = task / groups * height, rows = std::min(height, m - row), group = task % groups;
          const int64_t from = group * panels / groups, to = (group + 1) * panels / groups;
          if (c.is_plain()) {
            multiply_rows(a, row, rows, first, packed, from, to, c.plain(row, column), c.stride(), first > 0,
                          packed_a.data());
          } else {
            multiply_rows(a, row, rows, first, packed, from, to, sums.data(), apart, false, packed_a.data());
            const int64_t begin = from * WIDTH, end = std::min(to * WIDTH, packed.columns);
            c.finish(sums.data() + begin, apart, row, rows, column + begin, end - begin);
          }
        }
      }
  }
}

// One row: it is multiplied as a column, since then the lines of B, which run along k, are packed one by one.
inline void turned_product(const Operand& row, const Operand& lines, const Result& c, int64_t n, int64_t k, int threads) {
  Buffer<float> sums(n, UNSET);
  subulp_product plain{};
  plain.c = sums.data();
  plain.c_dtype = SUBULP_FP32;
  plain.c_stride = 1;
  plain.c_scale = 1.0f;
  product(lines, row, Result(plain), n, 1, k, threads);
  c.finish(sums.data(), n, 0, 1, 0, n);
}

inline int run_product(const subulp_product& p) {
  const bool turned = p.m == 1 && p.b_k_inner;
  const Operand a(p.a, p.a_dtype, p.a_stride, p.a_k_inner != 0, p.a_scale, !turned, p.a_blocks);
  const Operand b(p.b, p.b_dtype, p.b_stride, p.b_k_inner != 0, p.b_scale, turned, p.b_blocks);
  if (!a.pack || !b.pack || (p.c_dtype != SUBULP_FP32 && p.c_dtype != SUBULP_BF16)) return -1;
  if (turned) turned_product(a, b, Result(p), p.n, p.k, p.threads);
  else product(a, b, Result(p), p.m, p.n, p.k, p.threads);
  return 0;
}

}  // namespace simd
