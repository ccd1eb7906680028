// The logistic function of logits, scaled, and the sum of its integral: numerics/logistic.py defines
// the sequence of rounded operations, this is the same one.
#pragma once

#include <algorithm>
#include <cstring>

#include "buffer.h"
#include "codec.h"
#include "float_mode.h"

namespace simd {

inline F exp_of_negative(F y) {
  const F round = f32(12582912.0f);
  y = max(y, f32(-87.0f));
  const F shifted = add(mul(y, f32(1.44269504088896341f)), round);
  const F n = sub(shifted, round);
  const F r = sub(sub(y, mul(n, f32(0.693359375f))), mul(n, f32(-2.12194440e-4f)));
  F p = f32(1.9875691500e-4f);
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = add(mul(p, r), f32(c));
  p = add(add(mul(p, mul(r, r)), r), f32(1.0f));
  return mul(p, as_f32(add(shl<23>(as_u32(shifted)), u32(0x3F800000u))));
}

inline F keep_nan(F z, F value) {
  return as_f32(select(greater(magnitude(z), u32(INFINITE)), as_u32(z), as_u32(value)));
}

// No sign bit. At zero exp(-|z|) is 1 and either branch gives the same.
inline M positive(F z) { return greater(u32(1), shr<31>(as_u32(z))); }

struct Logistic {
  F negative, e;
  M above;

  explicit Logistic(F z)
      : negative(as_f32(or_(as_u32(z), u32(0x80000000u)))), e(exp_of_negative(negative)), above(positive(z)) {}

  F sigmoid(F z) const {
    const F one = f32(1.0f);
    return keep_nan(z, div(as_f32(select(above, as_u32(one), as_u32(e))), add(e, one)));
  }
  F softplus(F z) const {
    const F s = div(e, add(e, f32(2.0f)));
    const F t = mul(s, s);
    F p = f32(2.0f / 13.0f);
    for (const float c : {2.0f / 11.0f, 2.0f / 9.0f, 2.0f / 7.0f, 2.0f / 5.0f, 2.0f / 3.0f, 2.0f})
      p = add(mul(p, t), f32(c));
    const F over = as_f32(select(above, as_u32(z), u32(0)));
    return keep_nan(z, add(over, mul(p, s)));
  }
};

template <bool narrow>
inline F narrowed(F x) {
  if constexpr (!narrow) return x;
  return as_f32(and_(Bf16::unbounded_high(x), u32(0xFFFF0000u)));
}

// One row in place; with a sum, its softplus in the order of the row. `narrow`: rounded to BF16 before and after.
template <bool gradient, bool loss, bool narrow>
inline double logistic_row(float* row, int64_t n, float gain) {
  const F factor = f32(gain);
  double sum = 0.0;
  alignas(64) float values[W];
  for (int64_t i = 0; i < n; i += W) {
    const int64_t count = std::min<int64_t>(W, n - i);
    if (count < W) {
      std::memset(values, 0, sizeof values);
      std::memcpy(values, row + i, static_cast<size_t>(count) * sizeof(float));
    }
    const F z = narrowed<narrow>(load_f32(reinterpret_cast<const char*>(count < W ? values : row + i)));
    const Logistic f(z);
    if constexpr (loss) {
      alignas(64) float terms[W];
      store_f32(terms, f.softplus(z));
      for (int64_t k = 0; k < count; ++k) sum += static_cast<double>(terms[k]);
    }
    if constexpr (gradient) {
      const F g = narrowed<narrow>(mul(f.sigmoid(z), factor));
      if (count == W) {
        store_f32(row + i, g);
      } else {
        store_f32(values, g);
        std::memcpy(row + i, values, static_cast<size_t>(count) * sizeof(float));
      }
    }
  }
  return sum;
}

template <bool narrow>
inline double logistic_of(float* row, int64_t n, float gain, bool gradient, bool loss) {
  if (!gradient) return loss ? logistic_row<false, true, narrow>(row, n, gain) : 0.0;
  return loss ? logistic_row<true, true, narrow>(row, n, gain) : logistic_row<true, false, narrow>(row, n, gain);
}

inline bool are_inside(const subulp_positives& p, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < p.count; ++i)
    if (static_cast<uint64_t>(p.rows[i] - p.first) >= static_cast<uint64_t>(rows) ||
        static_cast<uint64_t>(p.columns[i]) >= static_cast<uint64_t>(columns))
      return false;
  return true;
}

// sigmoid(z) - 1 of `values`, times the gain: -sigmoid(-z), which keeps its digits where the sigmoid is close to 1.
template <bool narrow>
inline void positive_gradients(Buffer<float>* values, float gain) {
  const IeeeMode ieee;
  float* const v = values->data();
  for (int64_t i = 0; i < values->size(); i += W) {
    const U z = as_u32(narrowed<narrow>(load_f32(reinterpret_cast<const char*>(v + i))));
    const F negated = as_f32(add(z, u32(0x80000000u)));
    store_f32(v + i, narrowed<narrow>(mul(Logistic(negated).sigmoid(negated), f32(-gain))));
  }
}

// Rows of logits to `(sigmoid - Y) * gain` in place (if `gradient`), where Y is 1 for positives and else 0; `sums[r]`,
// if any, gets the softplus of row r.
inline int run_logistic(float* logits, int64_t rows, int64_t columns, float gain, int gradient, int narrow,
                        const subulp_positives& p, double* sums, int threads) {
  if (!are_inside(p, rows, columns)) return -1;
  const auto positive = [&](int64_t i) -> float& { return logits[(p.rows[i] - p.first) * columns + p.columns[i]]; };
  Buffer<float> values((p.count + W - 1) / W * W);
  for (int64_t i = 0; i < p.count; ++i) values[i] = positive(i);
#if defined(_OPENMP)
#pragma omp parallel for num_threads(threads) if (rows * columns > 16384 && threads > 1) schedule(static)
#endif
  for (int64_t r = 0; r < rows; ++r) {
    const IeeeMode ieee;
    float* const row = logits + r * columns;
    const bool loss = sums != nullptr;
    const double sum = narrow ? logistic_of<true>(row, columns, gain, gradient != 0, loss)
                              : logistic_of<false>(row, columns, gain, gradient != 0, loss);
    if (loss) sums[r] = sum;
  }
  if (gradient) {
    if (narrow) positive_gradients<true>(&values, gain);
    else positive_gradients<false>(&values, gain);
    for (int64_t i = 0; i < p.count; ++i) positive(i) = values[i];
  }
  (void)threads;
  return 0;
}

}  // namespace simd
