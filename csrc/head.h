// One step of a chunk of a classifier's rows, products of BF16 operands: src/subulp/ops/head/tiles.py defines it. A
// thread takes a tile of rows and goes through it block by block: logits, their gradient, the inputs' gradient and the
// rows' own, which updates them at once. So a row is read once. The tiles' parts of the inputs' gradient are added in
// their order; a part whose turn has not come waits in memory while its thread goes on with another tile. Included by
// product.cpp, once per instruction set.
#pragma once

#include <algorithm>
#include <thread>

#if defined(_OPENMP)
#include <omp.h>
#endif
#include "kernels.h"
#include "product.h"

namespace simd {

// A tile's blocks: as many rows as a product takes along k at a time.
constexpr int64_t HEAD_ROWS = DEPTH;

// Memory of a step, in numbers of four bytes.
class HeadScratch {
 public:
  explicit HeadScratch(const subulp_head& h)
      : batch_(h.batch), dim_(h.dim), inputs_(Packed::size(h.batch, h.dim)), turned_(Packed::size(h.dim, h.batch)),
        memory_(static_cast<uint32_t*>(h.scratch)) {}

  int64_t size(int threads) const { return inputs_ + turned_ + threads * own(); }

  // The inputs as columns of B, for the logits, and as its rows, for the rows' gradient.
  Packed inputs() const { return {batch_, dim_, memory_}; }
  Packed turned() const { return {dim_, batch_, memory_ + inputs_}; }

  // A thread's own.
  struct Own {
    uint32_t *packed_a, *packed_rows;
    float *logits, *partial[2], *gradient;
  };
  Own of(int thread) const {
    uint32_t* at = memory_ + inputs_ + turned_ + thread * own();
    const auto next = [&at](int64_t count) {
      uint32_t* const from = at;
      at += count;
      return from;
    };
    Own own;
    own.packed_a = next(ROW * HEIGHT);
    own.packed_rows = next(Packed::size(dim_, HEAD_ROWS));
    own.logits = reinterpret_cast<float*>(next(HEAD_ROWS * batch_));
    for (float*& partial : own.partial) partial = reinterpret_cast<float*>(next(batch_ * dim_));
    own.gradient = reinterpret_cast<float*>(next(HEIGHT * dim_));
    return own;
  }

 private:
  int64_t own() const {
    return ROW * HEIGHT + Packed::size(dim_, HEAD_ROWS) + (HEAD_ROWS + 2 * dim_) * batch_ + HEIGHT * dim_;
  }

  int64_t batch_, dim_, inputs_, turned_;
  uint32_t* memory_;
};

// Which tile is next, and whose part is.
class Turns {
 public:
  explicit Turns(int64_t tiles) : tiles_(tiles) {}

  // The next tile; none if it is as many as there are.
  int64_t take() {
    int64_t tile;
#if defined(_OPENMP)
#pragma omp atomic capture
#endif
    tile = taken_++;
    return std::min(tile, tiles_);
  }
  bool is(int64_t tile) const {
    int64_t added;
#if defined(_OPENMP)
#pragma omp atomic read seq_cst
#endif
    added = added_;
    return added == tile;
  }
  void wait(int64_t tile) const {
    while (!is(tile)) std::this_thread::yield();
  }
  void pass(int64_t tile) {
#if defined(_OPENMP)
#pragma omp atomic write seq_cst
#endif
    added_ = tile + 1;
  }

 private:
  const int64_t tiles_;
  int64_t taken_ = 0, added_ = 0;
};

class Head {
 public:
  Head(const subulp_head& h, const subulp_kernels& kernels)
      : h_(h), kernels_(kernels), number_bytes_(format_bytes(h.dtype)), scratch_(h) {}

  int run() const {
    if (!Operand(nullptr, h_.dtype, 0, true, 1.0f, true).pack || !Operand(nullptr, h_.x_dtype, 0, true, 1.0f, true).pack)
      return -1;
    const subulp_positives& p = h_.positives;
    for (int64_t i = 0; i < p.count; ++i)
      if (p.rows[i] < (i ? p.rows[i - 1] : 0) || p.rows[i] >= h_.labels || p.columns[i] < 0 || p.columns[i] >= h_.batch)
        return SUBULP_BAD_POSITIVES;
    const int64_t tiles = (h_.labels + h_.tile_rows - 1) / h_.tile_rows;
    const Packed inputs = scratch_.inputs(), turned = scratch_.turned();
    const Operand x_columns(h_.x_logits, h_.x_dtype, h_.dim, true, 1.0f, false);
    const Operand x_rows(h_.x, SUBULP_FP32, h_.dim, false, 1.0f, false);
    Turns turns(tiles);
    int failed = 0;
#if defined(_OPENMP)
#pragma omp parallel num_threads(h_.threads) if (h_.threads > 1) reduction(| : failed)
#endif
    {
      const FlushMode flush;
      const Registers registers;
#if defined(_OPENMP)
      const HeadScratch::Own own = scratch_.of(omp_get_thread_num());
#pragma omp for schedule(static) nowait
#else
      const HeadScratch::Own own = scratch_.of(0);
#endif
      for (int64_t task = 0; task < inputs.tasks(); ++task) inputs.pack(x_columns, 0, 0, task);
#if defined(_OPENMP)
#pragma omp for schedule(static)
#endif
      for (int64_t task = 0; task < turned.tasks(); ++task) turned.pack(x_rows, 0, 0, task);
      failed |= tiles_of(turns, tiles, own);
    }
    return failed;
  }

 private:
  // The tiles of a thread.
  int tiles_of(Turns& turns, int64_t tiles, const HeadScratch::Own& own) const {
    int failed = 0;
    int64_t waiting = tiles;  // a tile whose part waits for its turn, or none
    for (int now = 0;; now = 1 - now) {
      const int64_t tile = turns.take();
      if (tile < tiles)
        failed |= rows_of(tile * h_.tile_rows, std::min(h_.labels, (tile + 1) * h_.tile_rows), own, own.partial[now]);
      if (waiting < tiles) {
        turns.wait(waiting);
        add(own.partial[1 - now]);
        turns.pass(waiting);
      }
      waiting = tile;
      if (tile == tiles) return failed;
      if (turns.is(tile)) {
        add(own.partial[now]);
        turns.pass(tile);
        waiting = tiles;
      }
    }
  }

  // A tile's part of the inputs' gradient.
  void add(const float* partial) const {
    if (!h_.grad_x) return;
    const IeeeMode ieee;
    for (int64_t i = 0; i < h_.batch * h_.dim; ++i) h_.grad_x[i] += partial[i];
  }

  // A tile; its part of the inputs' gradient goes to `partial`.
  int rows_of(int64_t first, int64_t last, const HeadScratch::Own& own, float* partial) const {
    int failed = 0;
    for (int64_t row = first; row < last; row += HEAD_ROWS) {
      const int64_t rows = std::min(HEAD_ROWS, last - row);
      by_height(rows, [&](int64_t at, int64_t count) {
        multiply_rows(stored(row, true, true), at, count, scratch_.inputs(), own.logits + at * h_.batch, h_.batch,
                      false, own.packed_a);
      });
      failed |= logistic(row, rows, own.logits);
      if (h_.grad_x) {
        const Packed packed{h_.dim, rows, own.packed_rows};
        for (int64_t task = 0; task < packed.tasks(); ++task) packed.pack(stored(row, false, false), 0, 0, task);
        const Operand turned(own.logits, SUBULP_FP32, h_.batch, false, 1.0f, true);
        by_height(h_.batch, [&](int64_t at, int64_t count) {
          multiply_rows(turned, at, count, packed, partial + at * h_.dim, h_.dim, row > first, own.packed_a);
        });
      }
      if (h_.step) {
        const Operand gradients(own.logits, SUBULP_FP32, h_.batch, true, 1.0f, true);
        by_height(rows, [&](int64_t at, int64_t count) {
          multiply_rows(gradients, at, count, scratch_.turned(), own.gradient, h_.dim, false, own.packed_a);
          failed |= update(row + at, count, own.gradient);
        });
      }
    }
    return failed;
  }

  template <class Do>
  static void by_height(int64_t rows, Do todo) {
    for (int64_t at = 0; at < rows; at += HEIGHT) todo(at, std::min(HEIGHT, rows - at));
  }

  Operand stored(int64_t row, bool k_is_inner, bool of_a) const {
    return {static_cast<char*>(h_.rows) + row * h_.dim * number_bytes_, h_.dtype, h_.dim, k_is_inner, h_.scale, of_a};
  }

  // By halves. Not the standard library's: see buffer.h.
  int64_t positives_before(int64_t row) const {
    int64_t low = 0, high = h_.positives.count;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (h_.positives.rows[middle] < row) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  int logistic(int64_t row, int64_t rows, float* logits) const {
    const int64_t* const labels = h_.positives.rows;
    const int64_t from = positives_before(row), to = positives_before(row + rows);
    const subulp_positives here{to - from, labels + from, h_.positives.columns + from, row};
    if (h_.sums)
      for (int64_t i = from; i < to; ++i)
        h_.positive_logits[i] = logits[(labels[i] - row) * h_.batch + h_.positives.columns[i]];
    return kernels_.logistic(logits, rows, h_.batch, h_.gain, h_.grad_x || h_.step, 1, here,
                             h_.sums ? h_.sums + row : nullptr, 1);
  }

  int update(int64_t row, int64_t rows, float* gradient) const {
    const int64_t numel = rows * h_.dim, first = row * h_.dim;
    if (h_.scale != 1.0f) {
      // A stored value is 1 / scale of its weight, and so is its update.
      const IeeeMode ieee;
      const float inverse = 1.0f / h_.scale;
      for (int64_t i = 0; i < numel; ++i) gradient[i] *= inverse;
    }
    void* const param = static_cast<char*>(h_.rows) + first * number_bytes_;
    const void* const grad = gradient;
    subulp_scalars scalars = *h_.step->scalars;
    scalars.offset += static_cast<uint64_t>(first);
    subulp_step step = *h_.step;
    step.numel = &numel;
    step.param = &param;
    step.grad = &grad;
    step.scalars = &scalars;
    step.threads = 1;
    return kernels_.sgd(step);
  }

  const subulp_head& h_;
  const subulp_kernels& kernels_;
  const int64_t number_bytes_;
  const HeadScratch scratch_;
};

inline int run_head(const subulp_head& h, const subulp_kernels& kernels) { return Head(h, kernels).run(); }
inline int64_t head_scratch(const subulp_head& h) { return 4 * HeadScratch(h).size(h.threads); }

}  // namespace simd
