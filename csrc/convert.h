// Narrow values to FP32 and back, rounded to nearest even: one read, one write.
#pragma once

#include <algorithm>
#include <cstring>

#include "codec.h"
#include "float_mode.h"

namespace simd {

template <class Format>
inline void decode_run(const char* from, float* to, int64_t n, float scale) {
  const F factor = f32(scale);
  int64_t i = 0;
  for (; i + W <= n; i += W) store_f32(to + i, mul(Format::load(from + i * Format::bytes), factor));
  if (i < n) {
    char padded[W * 4] = {};
    alignas(64) float values[W];
    std::memcpy(padded, from + i * Format::bytes, static_cast<size_t>((n - i) * Format::bytes));
    store_f32(values, mul(Format::load(padded), factor));
    std::memcpy(to + i, values, static_cast<size_t>(n - i) * sizeof(float));
  }
}

template <class Format>
inline void encode_run(const float* from, char* to, int64_t n, float scale) {
  const F factor = f32(scale);
  int64_t i = 0;
  for (; i + W <= n; i += W) store_nearest<Format>(to + i * Format::bytes, mul(load_f32(reinterpret_cast<const char*>(from + i)), factor));
  if (i < n) {
    alignas(64) float padded[W] = {};
    char values[W * 4];
    std::memcpy(padded, from + i, static_cast<size_t>(n - i) * sizeof(float));
    Format::store(values, mul(load_f32(reinterpret_cast<const char*>(padded)), factor));
    std::memcpy(to + i * Format::bytes, values, static_cast<size_t>((n - i) * Format::bytes));
  }
}

template <class Format>
inline int decode_all(const char* from, float* to, int64_t n, float scale, int threads) {
  constexpr int64_t run = 1 << 14;
  const int64_t runs = (n + run - 1) / run;
#if defined(_OPENMP)
#pragma omp parallel for num_threads(threads) if (runs > 1 && threads > 1) schedule(static)
#endif
  for (int64_t r = 0; r < runs; ++r) {
    const IeeeMode ieee;
    decode_run<Format>(from + r * run * Format::bytes, to + r * run, std::min(run, n - r * run), scale);
  }
  (void)threads;
  return 0;
}

template <class Format>
inline int encode_all(const float* from, char* to, int64_t n, float scale, int threads) {
  constexpr int64_t run = 1 << 14;
  const int64_t runs = (n + run - 1) / run;
#if defined(_OPENMP)
#pragma omp parallel for num_threads(threads) if (runs > 1 && threads > 1) schedule(static)
#endif
  for (int64_t r = 0; r < runs; ++r) {
    const IeeeMode ieee;
    encode_run<Format>(from + r * run, to + r * run * Format::bytes, std::min(run, n - r * run), scale);
  }
  (void)threads;
  return 0;
}

inline int run_encode(int dtype, const float* from, void* to, int64_t n, float scale, int threads) {
  char* const bytes = static_cast<char*>(to);
  switch (dtype) {
#define SUBULP_CASE(code, name, Format) \
  case SUBULP_##code: return encode_all<Format>(from, bytes, n, scale, threads);
    SUBULP_FLOATS(SUBULP_CASE)
#undef SUBULP_CASE
    default: return -1;
  }
}

inline int run_decode(int dtype, const void* from, float* to, int64_t n, float scale, int threads) {
  const char* const bytes = static_cast<const char*>(from);
  switch (dtype) {
#define SUBULP_CASE(code, name, Format) \
  case SUBULP_##code: return decode_all<Format>(bytes, to, n, scale, threads);
    SUBULP_FLOATS(SUBULP_CASE)
#undef SUBULP_CASE
    default: return -1;
  }
}

}  // namespace simd
