// Random bits of a run of elements, addressed as in numerics/random_bits.py.
#pragma once

#include <cstdint>

namespace simd {

constexpr int BLOCK = 512;  // elements that a pass prepares at a time: random bits, tails

class RandomBits {
 public:
  RandomBits(uint32_t seed, uint32_t stream, uint32_t step, uint64_t offset) : step_(step), offset_(offset) {
    uint32_t k0 = seed, k1 = stream;
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
      key_[2 * round] = k0;
      key_[2 * round + 1] = k1;
    }
  }

  // Draws the bits of elements [index, index + BLOCK) of this tensor.
  template <int width>
  void draw(uint64_t index) {
    constexpr int per_counter = 128 / width;
    index += offset_;
    const uint64_t first = index / per_counter;
    // A block that starts inside a counter ends inside another.
    const int counters = BLOCK / per_counter + (index % per_counter != 0);
    for (int i = 0; i < counters; i += PHILOX) philox(first + i, step_, 0, key_, words_ + 4 * i);
    start_ = reinterpret_cast<const char*>(words_) + (index % per_counter) * (width / 8);
  }

  // The bits of the block's elements from i on: 16-bit numbers or 32-bit numbers.
  template <int width>
  const char* at(int64_t i) const { return start_ + i * (width / 8); }

 private:
  uint32_t key_[20];
  uint32_t step_;
  uint64_t offset_;
  const char* start_ = nullptr;
  // One counter more than a block needs, for an offset inside a counter; rounded up to the batch.
  alignas(64) uint32_t words_[4 * (BLOCK / 4 + 1 + PHILOX)];
};

}  // namespace simd
