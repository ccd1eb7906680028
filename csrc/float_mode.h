// The floating-point environment of a kernel, for as long as a FloatMode lives.
#pragma once

#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace simd {

// Sets the floating-point environment of this thread, whatever the calling program has set, and restores it.
template <unsigned CONTROL>
class FloatMode {
#if defined(__x86_64__) || defined(_M_X64)
 public:
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(CONTROL); }
  ~FloatMode() { _mm_setcsr(saved_); }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  unsigned saved_;
#endif
};

// Exceptions masked, to nearest-even, denormals alive.
constexpr unsigned IEEE = 0x1F80;
using IeeeMode = FloatMode<IEEE>;
// What units of BF16 do whatever is set: to nearest-even, subnormal operands and results are zero.
using FlushMode = FloatMode<IEEE | 0x8000 | 0x0040>;

}  // namespace simd
