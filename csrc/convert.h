// Narrow values to FP32 and back, rounded to nearest even: one read, one write.
#pragma once

#include <algorithm>
#include <cstring>

#include "codec.h"
#include "ieee_mode.h"

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
  for (; i + W <= n; i += W) Format::store(to + i * Format::bytes, mul(load_f32(reinterpret_cast<const char*>(from + i)), factor));
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
    case SUBULP_FP32: return encode_all<Fp32>(from, bytes, n, scale, threads);
    case SUBULP_BF16: return encode_all<Bf16>(from, bytes, n, scale, threads);
    case SUBULP_FP16: return encode_all<Fp16>(from, bytes, n, scale, threads);
    case SUBULP_E4M3: return encode_all<E4m3>(from, bytes, n, scale, threads);
    case SUBULP_E5M2: return encode_all<E5m2>(from, bytes, n, scale, threads);
    default: return -1;
  }
}

inline int run_decode(int dtype, const void* from, float* to, int64_t n, float scale, int threads) {
  const char* const bytes = static_cast<const char*>(from);
  switch (dtype) {
    case SUBULP_FP32: return decode_all<Fp32>(bytes, to, n, scale, threads);
    case SUBULP_BF16: return decode_all<Bf16>(bytes, to, n, scale, threads);
    case SUBULP_FP16: return decode_all<Fp16>(bytes, to, n, scale, threads);
    case SUBULP_E4M3: return decode_all<E4m3>(bytes, to, n, scale, threads);
    case SUBULP_E5M2: return decode_all<E5m2>(bytes, to, n, scale, threads);
    default: return -1;
  }
}

}  // namespace simd
