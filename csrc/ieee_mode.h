// The floating-point environment of a kernel, for as long as an IeeeMode lives.
#pragma once

#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace simd {

// Denormals alive and nearest-even, whatever the calling program has set for its threads.
class IeeeMode {
#if defined(__x86_64__) || defined(_M_X64)
 public:
  IeeeMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~IeeeMode() { _mm_setcsr(saved_); }
  IeeeMode(const IeeeMode&) = delete;
  IeeeMode& operator=(const IeeeMode&) = delete;

 private:
  unsigned saved_;
#endif
};

}  // namespace simd
