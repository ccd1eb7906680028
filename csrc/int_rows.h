// Runs of integer rows to FP32 and back, rounded to nearest or from random bits: one read, one write.
#pragma once

#include "float_mode.h"
#include "rows.h"

namespace simd {

template <int bits>
inline int decode_int_rows(const char* from, float* to, int64_t rows, int64_t dim, int threads) {
  const int64_t bytes = IntRow<bits>::bytes(dim);
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads) if (rows * dim > 16384 && threads > 1)
#endif
  {
    const IeeeMode ieee;
#if defined(_OPENMP)
#pragma omp for schedule(static)
#endif
    for (int64_t r = 0; r < rows; ++r)
      IntRow<bits>::each(from + r * bytes, dim,
                         [&](int64_t i, F value) { store_part(to + r * dim + i, value, dim - i); });
  }
  (void)threads;
  return 0;
}

// Where the random bits of a run of rows lie: its first element is the `first` of its table.
struct RandomRun {
  uint32_t seed, stream, step;
  uint64_t first;
};

// To nearest without a RandomRun.
template <int bits>
inline int encode_int_rows(const float* from, char* to, int64_t rows, int64_t dim, const RandomRun* random,
                           int threads) {
  const int64_t bytes = IntRow<bits>::bytes(dim);
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads) if (rows * dim > 16384 && threads > 1)
#endif
  {
    const IeeeMode ieee;
    Buffer<float> x(padded(dim));
    const RandomRun run = random ? *random : RandomRun{};
    RowBits drawn(run.seed, run.stream, run.step, dim);
#if defined(_OPENMP)
#pragma omp for schedule(static)
#endif
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(x.data(), from + r * dim, static_cast<size_t>(dim) * sizeof(float));
      const RowRounding rounding{random ? &drawn : nullptr, run.first + static_cast<uint64_t>(r * dim), 0};
      IntRow<bits>::encode(x.data(), dim, to + r * bytes, rounding);
    }
  }
  (void)threads;
  return 0;
}

inline int run_decode_rows(int bits, const void* from, float* to, int64_t rows, int64_t dim, int threads) {
  const char* const stored = static_cast<const char*>(from);
  switch (bits) {
#define SUBULP_CASE(code, name, bits) \
  case bits: return decode_int_rows<bits>(stored, to, rows, dim, threads);
    SUBULP_INTEGERS(SUBULP_CASE)
#undef SUBULP_CASE
    default: return -1;
  }
}

inline int encode_all_rows(int bits, const float* from, void* to, int64_t rows, int64_t dim, const RandomRun* random,
                           int threads) {
  char* const stored = static_cast<char*>(to);
  switch (bits) {
#define SUBULP_CASE(code, name, bits) \
  case bits: return encode_int_rows<bits>(from, stored, rows, dim, random, threads);
    SUBULP_INTEGERS(SUBULP_CASE)
#undef SUBULP_CASE
    default: return -1;
  }
}

inline int run_encode_rows(int bits, const float* from, void* to, int64_t rows, int64_t dim, int threads) {
  return encode_all_rows(bits, from, to, rows, dim, nullptr, threads);
}

inline int run_encode_rows_randomly(int bits, const float* from, void* to, int64_t rows, int64_t dim, uint32_t seed,
                                    uint32_t stream, uint32_t step, uint64_t first, int threads) {
  const RandomRun random{seed, stream, step, first};
  return encode_all_rows(bits, from, to, rows, dim, &random, threads);
}

}  // namespace simd
