// Random bits of a run of elements, addressed as in numerics/random_bits.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "subulp.h"

namespace simd {

constexpr int BLOCK = 512;  // elements that a pass prepares at a time: random bits, tails

class RandomBits {
 public:
  RandomBits(uint32_t seed, const subulp_scalars& tensor) : tensor_(tensor) {
    uint32_t k0 = seed, k1 = tensor.stream;
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
      key_[2 * round] = k0;
      key_[2 * round + 1] = k1;
    }
  }

  // Draws the bits of elements [index, index + BLOCK) of this tensor.
  template <int width>
  void draw(uint64_t index) {
    const uint64_t run = tensor_.run;
    if (run == 0) return draw_run<width>(tensor_.offset + index, BLOCK);
    // A shard: its runs lie apart in the whole tensor.
    for (uint64_t done = 0; done < BLOCK;) {
      const uint64_t at = index + done, count = std::min<uint64_t>(run - at % run, BLOCK - done);
      draw_run<width>(whole_index(at), static_cast<int>(count));
      if (count == BLOCK) return;
      std::memcpy(gathered_ + done * (width / 8), start_, count * (width / 8));
      done += count;
    }
    start_ = gathered_;
  }

  // The bits of the block's elements from i on: 16-bit numbers or 32-bit numbers.
  template <int width>
  const char* at(int64_t i) const { return start_ + i * (width / 8); }

 private:
  uint64_t whole_index(uint64_t index) const {
    const subulp_scalars& t = tensor_;
    const uint64_t run = index / t.run, outer = run / t.count_1;
    return t.offset + index % t.run + run % t.count_1 * t.stride_1 + outer % t.count_2 * t.stride_2 +
           outer / t.count_2 * t.stride_3;
  }

  // The bits of `count` elements of the whole tensor, BLOCK at most.
  template <int width>
  void draw_run(uint64_t index, int count) {
    constexpr int per_counter = 128 / width;
    const uint64_t first = index / per_counter;
    const int skipped = static_cast<int>(index % per_counter);
    // A block that starts inside a counter ends inside another.
    const int counters = (skipped + count + per_counter - 1) / per_counter;
    for (int i = 0; i < counters; i += PHILOX) philox(first + i, tensor_.step, 0, key_, words_ + 4 * i);
    start_ = reinterpret_cast<const char*>(words_) + skipped * (width / 8);
  }

  uint32_t key_[20];
  const subulp_scalars& tensor_;
  const char* start_ = nullptr;
  // One counter more than a block needs, for an offset inside a counter; rounded up to the batch.
  alignas(64) uint32_t words_[4 * (BLOCK / 4 + 1 + PHILOX)];
  alignas(64) char gathered_[4 * BLOCK];
};

}  // namespace simd
