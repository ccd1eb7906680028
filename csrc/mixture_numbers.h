// What was decided, in numbers: counts, errors and ranges of numerics.mixture.Summary.
#pragma once

#include "mixture_error.h"
#include "mixture_scale.h"

namespace simd {

// What is known of the tiles or blocks of a matrix.
struct Evidence {
  Buffer<uint32_t> amax, smallest;
  Buffer<int64_t> counted;
  explicit Evidence(int64_t n) : amax(n), smallest(n), counted(n) {}
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

// Over all blocks. `chosen` is every block's type if the tensor decided, else null.
inline Numbers numbers_of(const subulp_mixture& m, const Grid& g, const Evidence& e, const float* first,
                          const float* second, const uint8_t* chosen, uint8_t wide, int threads) {
  // Sums of a fixed number of blocks, so that threads change nothing.
  constexpr int64_t run = 4096;
  const int64_t blocks = g.blocks(), runs = Grid::parts(blocks, run);
  Buffer<Numbers> partial(runs);
#if defined(_OPENMP)
#pragma omp parallel for num_threads(threads) if (runs > 4 && threads > 1) schedule(static)
#endif
  for (int64_t r = 0; r < runs; ++r) {
    Numbers n;
    // A block's place, without a division for each.
    int64_t j = r * run % g.across, height = g.height(r * run);
    for (int64_t b = r * run; b < std::min(blocks, (r + 1) * run); ++b, ++j) {
      if (j == g.across) j = 0, height = g.height(b);
      const uint8_t type = chosen ? *chosen : m.types[b];
      n.blocks[type] += 1;
      n.elements[type] += height * std::min(g.block_columns, g.columns - j * g.block_columns);
      n.amax = std::max(n.amax, e.amax[b]);
      if (e.amax[b] >= INFINITE) continue;
      if (e.amax[b]) n.smallest = std::min(n.smallest, e.smallest[b]);
      n.counted += e.counted[b];
      n.first += static_cast<double>(first[b]);
      if (type == wide) continue;
      n.narrow += static_cast<double>(type == 0 ? first[b] : second[b]);
      n.narrow_counted += e.counted[b];
    }
    partial[r] = n;
  }
  Numbers all;
  for (int64_t r = 0; r < runs; ++r) all.add(partial[r]);
  (void)threads;
  return all;
}

}  // namespace simd
