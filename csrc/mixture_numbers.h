// What was decided, in numbers: counts, errors and ranges of numerics.mixture.Summary.
#pragma once

#include "mixture_error.h"
#include "mixture_scale.h"

namespace simd {

// What is known of the tiles or blocks of a matrix. Of blocks that have several tiles, a count may be
// beyond 32 bits.
template <class Count>
struct Evidence {
  Buffer<uint32_t> amax, smallest;
  Buffer<Count> counted;
  explicit Evidence(int64_t n) : amax(n, UNSET), smallest(n, UNSET), counted(n, UNSET) {}
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
  // What all blocks in the first format become if the tensor is not in it.
  void widen(int type) {
    std::swap(blocks[0], blocks[type]);
    std::swap(elements[0], elements[type]);
    narrow = 0.0;
    narrow_counted = 0;
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

// Over n blocks from `block` on, whose sums and types lie from `first`, `second` and `types` on; without
// types all are 0. Small loops, since compilers make vectors of those; the sums' order is fixed.
template <class Count>
inline Numbers numbers_of(const Grid& g, int64_t block, int64_t n, const Evidence<Count>& e, const float* first,
                          const float* second, const uint8_t* types, uint8_t wide) {
  constexpr int64_t lanes = 8;
  const uint32_t *const amax = e.amax.data() + block, *const smallest = e.smallest.data() + block;
  const Count* const counted = e.counted.data() + block;
  Numbers all;
  U most = u32(0), furthest = u32(0);
  for (int64_t i = 0; i < n; i += W) {
    const int here = static_cast<int>(std::min<int64_t>(W, n - i));
    const U top = load_each(amax + i, here), low = load_each(smallest + i, here);
    most = simd::max(most, top);
    // The smallest magnitude is the furthest from infinity; blocks without one do not count.
    const U distance = select(greater(low, u32(0)), sub(u32(INFINITE), low), u32(0));
    furthest = simd::max(furthest, select(greater(u32(INFINITE), top), distance, u32(0)));
  }
  all.amax = reduce_max(most);
  all.smallest = INFINITE - reduce_max(furthest);
  for (int64_t i = 0; i < n; ++i) all.counted += amax[i] < INFINITE ? counted[i] : 0;
  // Of blocks that are not finite the sums are zero.
  const auto sum_all = [&](auto value) {
    double parts[lanes] = {}, sum = 0.0;
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes)
      for (int64_t lane = 0; lane < lanes; ++lane) parts[lane] += static_cast<double>(value(i + lane));
    for (; i < n; ++i) sum += static_cast<double>(value(i));
    for (int64_t lane = 0; lane < lanes; ++lane) sum += parts[lane];
    return sum;
  };
  all.first = all.narrow = sum_all([&](int64_t i) { return first[i]; });
  all.narrow_counted = all.counted;
  int64_t of_type[3] = {n, 0, 0};
  if (types) {
    for (int64_t i = 0; i < n; ++i) of_type[1] += types[i] == 1, of_type[2] += types[i] == 2;
    of_type[0] = n - of_type[1] - of_type[2];
    if (of_type[0] < n) {
      all.narrow = sum_all([&](int64_t i) { return types[i] == 0 ? first[i] : types[i] == wide ? 0.0f : second[i]; });
      for (int64_t i = 0; i < n; ++i) all.narrow_counted -= amax[i] < INFINITE && types[i] == wide ? counted[i] : 0;
    }
  }
  const int64_t size = g.block_rows * g.block_columns;
  for (int t = 0; t < 3; ++t) all.blocks[t] = of_type[t], all.elements[t] = of_type[t] * size;
  // Some at the edges are smaller.
  const auto cut = [&](int64_t b) { all.elements[types ? types[b - block] : 0] -= size - g.height(b) * g.width(b); };
  const int64_t end = block + n, last_row = g.rows % g.block_rows ? g.blocks() - g.across : g.blocks();
  for (int64_t b = std::max(block, last_row); b < end; ++b) cut(b);
  if (g.columns % g.block_columns)
    for (int64_t b = block + g.across - 1 - block % g.across; b < std::min(end, last_row); b += g.across) cut(b);
  return all;
}

}  // namespace simd
