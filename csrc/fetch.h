// Fetching memory ahead of its use, where that was measured to pay: passes that read alone. Conversions, which write as
// much, gain nothing when they decode and take a fifth longer when they encode.
#pragma once

#include <cstdint>

namespace simd {

// A processor that sees memory read in order fetches ahead, but stops at the end of a page and begins anew
// in the next: each page costs a search for its place and a wait for its first lines.
constexpr uintptr_t PAGE = 4096, LINE = 64;
constexpr uintptr_t PAGES_AHEAD = 4, LINES_AHEAD = 4;

// Where nearly all time goes into reading: asks for the first lines of pages some pages ahead, and leaves
// the others to the processor. Call it before each run of bytes of what is read in order.
inline void fetch_pages_ahead(const void* from, int64_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(from), end = begin + static_cast<uintptr_t>(bytes);
  // Into the nearest cache where they are few.
  const bool near = end - begin <= PAGE;
  for (uintptr_t page = (begin + PAGE - 1) & ~(PAGE - 1); page < end; page += PAGE)
    for (uintptr_t line = 0; line < LINES_AHEAD; ++line) {
      const char* const at = reinterpret_cast<const char*>(page + PAGES_AHEAD * PAGE + line * LINE);
      if (near) __builtin_prefetch(at, 0, 3);
      else __builtin_prefetch(at, 0, 2);
    }
}

// Where much is computed with what is read: asks for the same place in the next page. Call it for each vector.
inline void fetch_ahead(const void* from) { __builtin_prefetch(static_cast<const char*>(from) + PAGE); }

}  // namespace simd
