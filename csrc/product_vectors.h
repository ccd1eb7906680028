// Products of packed panels in vectors; included by product.h.
//
// Sums take the products in pairs along k: first the odd one of a pair, then the even one, each with a single rounding
// and with subnormal numbers taken for zero. That is how AVX-512's units of BF16 multiply; elsewhere the same sequence
// is spelled out, so the result does not depend on the instruction set.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "product_pack.h"

namespace simd {

// What a thread needs as long as it multiplies: nothing.
struct Registers {
  Registers() {}
};

// A sum of one step more along k, the same `a` in all lanes.
#if defined(__AVX512BF16__)
inline F step_sum(F sum, uint32_t a, U b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
}
#elif defined(__AVX512F__)
inline F step_sum(F sum, uint32_t a, U b) { return _mm512_fmadd_ps(as_f32(u32(a)), as_f32(b), sum); }
#elif defined(__AVX2__)
inline F step_sum(F sum, uint32_t a, U b) { return _mm256_fmadd_ps(as_f32(u32(a)), as_f32(b), sum); }
#else
inline F step_sum(F sum, uint32_t a, U b) {
  const auto numbers = [](U pairs, uint32_t half) { return as_f32(and_(shl(pairs, u32(half)), u32(0xFFFF0000u))); };
  for (const uint32_t half : {0u, 16u}) {
    const F x = numbers(u32(a), half), y = numbers(b, half);
    sum = lanes<F>([&](int i) { return std::fma(x.v[i], y.v[i], sum.v[i]); });
  }
  return sum;
}
#endif

// ROWS rows of A times a panel of `vectors` vectors, added to C if `add`.
template <int vectors, bool a_by_row>
inline void multiply(int64_t steps, const uint32_t* a, const uint32_t* b, float* c, int64_t stride, int64_t rows,
                     int64_t columns, bool add) {
  constexpr int64_t next_row = a_by_row ? ROW : 1, next_step = a_by_row ? 1 : ROWS;
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
    const uint32_t* const group = a + i * ROW;
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

}  // namespace simd
