// A number that tells whether memory holds the same bytes as before: one read, at the speed of memory.
#pragma once

#include <algorithm>
#include <cstring>

#include "fetch.h"

namespace simd {

constexpr int FINGERS = 8;
constexpr int64_t STRIPE = 8 * FINGERS;

inline uint64_t mixed(uint64_t x) {
  x = (x ^ x >> 32) * 0xD6E8FEB86659FD93u;
  x = (x ^ x >> 32) * 0xD6E8FEB86659FD93u;
  return x ^ x >> 32;
}

// Of whole stripes. Each word enters one sum as a product with a number of its place, and another as it is: no change
// of a single word is missed, and words that change places are seen.
inline uint64_t fingerprint_of_run(const char* p, int64_t bytes, uint64_t number) {
  uint64_t sum[FINGERS] = {}, place[FINGERS], word[FINGERS];
  for (int j = 0; j < FINGERS; ++j) place[j] = mixed(number * FINGERS + static_cast<uint64_t>(j) + 1);
  for (int64_t at = 0; at < bytes; at += STRIPE) {
    std::memcpy(word, p + at, sizeof word);
    for (int j = 0; j < FINGERS; ++j) {
      const uint64_t keyed = word[j] ^ place[j];
      sum[j] += (keyed & 0xFFFFFFFFu) * (keyed >> 32) + word[j ^ 1];
      place[j] += 0x9E3779B97F4A7C15u;
    }
  }
  uint64_t all = 0;
  for (int j = 0; j < FINGERS; ++j) all = mixed(all ^ sum[j]);
  return all;
}

inline uint64_t run_fingerprint(const void* data, int64_t bytes, int threads) {
  constexpr int64_t run = 1 << 16;
  const char* const p = static_cast<const char*>(data);
  const int64_t runs = bytes / run;
  uint64_t all = 0;
#if defined(_OPENMP)
#pragma omp parallel for num_threads(threads) if (runs > 1 && threads > 1) reduction(+ : all)
#endif
  for (int64_t r = 0; r < runs; ++r) {
    for (int64_t page = 0; page < run; page += PAGE) fetch_pages_ahead(p + r * run + page, PAGE);
    all += mixed(fingerprint_of_run(p + r * run, run, static_cast<uint64_t>(r)));
  }
  // What is left, padded with zeros; their number is in the length.
  char last[STRIPE] = {};
  const int64_t begin = runs * run, whole = begin + (bytes - begin) / STRIPE * STRIPE;
  std::memcpy(last, p + whole, static_cast<size_t>(bytes - whole));
  all += mixed(fingerprint_of_run(p + begin, whole - begin, static_cast<uint64_t>(runs)));
  all += mixed(fingerprint_of_run(last, STRIPE, ~static_cast<uint64_t>(runs)) ^ static_cast<uint64_t>(bytes));
  (void)threads;
  return mixed(all);
}

}  // namespace simd
