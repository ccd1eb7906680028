// Where a row of an embedding table lies: in its FP32 cache or among the stored rows. ops/embedding/job.py
// defines the layout. Each row misses the processor's cache, so the next ones are prefetched while one is
// worked on.
#pragma once

#include <algorithm>

#include "mix.h"
#include "rows.h"

namespace simd {

constexpr int64_t AHEAD = 32;  // rows prefetched

// To the nearest cache. Zen 5 asked for the second level alone (`prefetcht1`) does not bring a line that only memory has:
// after work that has emptied the third level, each load of an accumulator waited as long as if nobody had asked.
// Not __builtin_prefetch alone: GCC 12 takes a function that does nothing else for pure, and leaves out its calls.
inline void fetch_line(const void* p) {
#if defined(SUBULP_X86) && defined(__GNUC__)
  asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p);
#endif
}

// A line that will be written, as this processor core's alone: one that others have too would have to be
// asked for again by the store.
inline void fetch_own_line(const void* p) {
#if defined(SUBULP_X86) && defined(__GNUC__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p, 1, 2);
#endif
}

template <class Fetch>
inline void each_line(const void* p, int64_t bytes, Fetch fetch) {
  // As many calls wherever in a line the bytes begin: a processor foresees their end. The last line may come twice.
  const char* const first = static_cast<const char*>(p);
  for (int64_t i = 0; i < bytes; i += 64) fetch(first + i);
  fetch(first + bytes - 1);
}
inline void prefetch(const void* p, int64_t bytes) { each_line(p, bytes, fetch_line); }
inline void prefetch_own(const void* p, int64_t bytes) { each_line(p, bytes, fetch_own_line); }

inline int64_t set_of(const subulp_table& t, uint32_t row) {
  if (t.mixed) row = subulp_mix(row);
  return row % static_cast<uint32_t>(t.sets);
}

// The first of `ways` tags that is `tag`, or -1. Two vectors at a time, as many as 32 ways are with AVX-512: in
// which of them a tag lies no processor foresees.
inline int find_tag(const int32_t* tags, int ways, int32_t tag) {
  static_assert(2 * W <= 32, "a bit for each tag of two vectors");
  int w = 0;
  const U wanted = u32(static_cast<uint32_t>(tag));
  for (; w + 2 * W <= ways; w += 2 * W) {
    const uint32_t later = equal_lanes(load_u32(tags + w + W), wanted);
    if (const uint32_t found = equal_lanes(load_u32(tags + w), wanted) | later << W) return w + __builtin_ctz(found);
  }
  for (; w < ways; ++w)
    if (tags[w] == tag) return w;
  return -1;
}

// Where a row lies in the cache, or -1.
inline int64_t find_row(const subulp_table& t, int64_t row) {
  if (!t.sets) return -1;
  const int64_t first = set_of(t, static_cast<uint32_t>(row)) * t.ways;
  const int way = find_tag(t.tags + first, t.ways, static_cast<int32_t>(row));
  return way < 0 ? -1 : first + way;
}

inline char* stored_row(const subulp_table& t, int64_t row) { return static_cast<char*>(t.codes) + row * t.row_bytes; }

// Whether every bag begins where the one before ends, from the first value on.
inline bool offsets_fit(const subulp_lookups& l) {
  const int64_t bags = l.features * l.batch;
  bool fit = l.offsets[0] == 0 && l.offsets[bags] <= l.count;
  for (int64_t b = 0; b < bags; ++b) fit &= l.offsets[b] <= l.offsets[b + 1];
  return fit;
}

// What is wrong with lookups, as subulp_embedding_pool returns it: pointers made from them would lead anywhere.
inline int64_t fault_of(const subulp_table* tables, const subulp_lookups& l) {
  if (!offsets_fit(l)) return SUBULP_BAD_OFFSETS;
  for (int64_t feature = 0; feature < l.features; ++feature) {
    const uint64_t rows = static_cast<uint64_t>(tables[l.table[feature]].rows);
    const int64_t first = l.offsets[feature * l.batch], last = l.offsets[(feature + 1) * l.batch];
    uint64_t largest = 0;
    for (int64_t k = first; k < last; ++k) largest = std::max(largest, static_cast<uint64_t>(l.values[k]));
    if (first < last && largest >= rows)
      for (int64_t k = first; k < last; ++k)
        if (static_cast<uint64_t>(l.values[k]) >= rows) return k + 1;
  }
  return 0;
}

// Vectors of a sum that stay in registers while what it adds goes by.
#if defined(SUBULP_VECTORS_ARE_ARRAYS)
constexpr int WIDEST = 2;
#else
constexpr int WIDEST = 8;
#endif

}  // namespace simd
