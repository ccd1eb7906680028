// Whether every value of a list of tensors is finite: one read, no temporary.
#pragma once

#include <algorithm>
#include <cstring>

#include "codec.h"

namespace simd {

// The largest magnitude code of a run of elements; a tail shorter than a vector is padded with zeros.
template <int bytes>
inline uint32_t largest_magnitude(const char* p, int64_t n, uint32_t mask) {
  U largest = u32(0);
  int64_t i = 0;
  const auto fold = [&](const char* q) {
    const U code = bytes == 4 ? load_u32(q) : bytes == 2 ? load_u16(q) : load_u8(q);
    largest = max(largest, and_(code, u32(mask)));
  };
  for (; i + W <= n; i += W) fold(p + i * bytes);
  if (i < n) {
    char padded[W * 4] = {};
    std::memcpy(padded, p + i * bytes, static_cast<size_t>((n - i) * bytes));
    fold(padded);
  }
  return reduce_max(largest);
}

inline bool finite_run(int dtype, const char* p, int64_t n) {
  switch (dtype) {
    case SUBULP_FP32: return largest_magnitude<4>(p, n, 0x7FFFFFFF) < 0x7F800000;
    case SUBULP_BF16: return largest_magnitude<2>(p, n, 0x7FFF) < 0x7F80;
    case SUBULP_FP16: return largest_magnitude<2>(p, n, 0x7FFF) < 0x7C00;
    case SUBULP_E4M3: return largest_magnitude<1>(p, n, 0x7F) < 0x7F;
    default: return largest_magnitude<1>(p, n, 0x7F) < 0x7C;
  }
}

inline int dtype_size(int dtype) {
  return dtype == SUBULP_FP32 ? 4 : dtype == SUBULP_BF16 || dtype == SUBULP_FP16 ? 2 : 1;
}

inline int run_all_finite(int64_t count, const int64_t* numel, const void* const* data, const int32_t* dtype,
                          int threads) {
  constexpr int64_t run = 1 << 16;
  int finite = 1;
  for (int64_t i = 0; i < count && finite; ++i) {
    const char* const base = static_cast<const char*>(data[i]);
    const int64_t n = numel[i], size = dtype_size(dtype[i]), runs = (n + run - 1) / run;
#if defined(_OPENMP)
#pragma omp parallel for num_threads(threads) if (runs > 1 && threads > 1) reduction(& : finite)
#endif
    for (int64_t r = 0; r < runs; ++r)
      finite &= finite_run(dtype[i], base + r * run * size, std::min(run, n - r * run)) ? 1 : 0;
  }
  (void)threads;
  return finite;
}

}  // namespace simd
