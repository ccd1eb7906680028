// Whether every value of a list of tensors is finite: one read, no temporary.
#pragma once

#include <algorithm>
#include <cstring>

#include "codec.h"
#include "fetch.h"

namespace simd {

// The largest code of a run of elements, signs aside; a tail shorter than a vector is padded with zeros.
template <int bytes>
inline uint32_t largest_of_run(const char* p, int64_t n) {
  constexpr uint32_t mask = 0xFFFFFFFFu >> (33 - 8 * bytes);
  constexpr int64_t page = PAGE / bytes;
  U largest = u32(0);
  const auto fold = [&](const char* q) {
    const U code = bytes == 4 ? load_u32(q) : bytes == 2 ? load_u16(q) : load_u8(q);
    largest = max(largest, and_(code, u32(mask)));
  };
  for (int64_t begin = 0; begin < n; begin += page) {
    const int64_t end = std::min(begin + page, n);
    fetch_pages_ahead(p + begin * bytes, (end - begin) * bytes);
    int64_t i = begin;
    for (; i + W <= end; i += W) fold(p + i * bytes);
    if (i < end) {
      char padded[W * 4] = {};
      std::memcpy(padded, p + i * bytes, static_cast<size_t>((end - i) * bytes));
      fold(padded);
    }
  }
  return reduce_max(largest);
}

// The largest code of a tensor, signs aside: that of its largest magnitude, infinity or NaN.
template <int bytes>
inline uint32_t largest_code(const void* data, int64_t n, int threads) {
  constexpr int64_t run = 1 << 16;
  const char* const p = static_cast<const char*>(data);
  const int64_t runs = (n + run - 1) / run;
  uint32_t largest = 0;
#if defined(_OPENMP)
#pragma omp parallel for num_threads(threads) if (runs > 1 && threads > 1) reduction(max : largest)
#endif
  for (int64_t r = 0; r < runs; ++r)
    largest = std::max(largest, largest_of_run<bytes>(p + r * run * bytes, std::min(run, n - r * run)));
  (void)threads;
  return largest;
}

inline bool tensor_is_finite(int dtype, const void* data, int64_t n, int threads) {
  switch (dtype) {
#define SUBULP_CASE(code, name, Format) \
  case SUBULP_##code: return largest_code<Format::bytes>(data, n, threads) <= Format::max_code;
    SUBULP_FLOATS(SUBULP_CASE)
#undef SUBULP_CASE
    default: return false;
  }
}

inline int run_all_finite(int64_t count, const int64_t* numel, const void* const* data, const int32_t* dtype,
                          int threads) {
  for (int64_t i = 0; i < count; ++i)
    if (!tensor_is_finite(dtype[i], data[i], numel[i], threads)) return 0;
  return 1;
}

}  // namespace simd
