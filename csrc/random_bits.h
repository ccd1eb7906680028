// Random bits of a run of elements, addressed as in numerics/random_bits.py.
#pragma once

#include <cstdint>

namespace simd {

constexpr int BLOCK = 128;  // elements that a pass handles at a time

// Slots of the counter: which stored tensor the bits round.
constexpr uint32_t SLOT_PARAMETER = 0;
constexpr uint32_t SLOT_STATE = 1;

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
  void draw(uint64_t index, uint32_t slot) {
    constexpr int per_counter = 128 / width;
    constexpr int counters = BLOCK / per_counter + 1;
    index += offset_;
    const uint64_t first = index / per_counter;
    for (int i = 0; i < counters; i += PHILOX) philox(first + i, step_, slot, key_, words_ + 4 * i);
    start_ = reinterpret_cast<const char*>(words_) + (index % per_counter) * (width / 8);
  }

  // Bits of W elements of the block: in [0, 2^16) or [0, 2^32).
  template <int width>
  U bits(int i) const {
    if constexpr (width == 16) return load_u16(start_ + 2 * i);
    else return load_u32(start_ + 4 * i);
  }

 private:
  uint32_t key_[20];
  uint32_t step_;
  uint64_t offset_;
  const char* start_ = nullptr;
  // One counter more than a block needs, for an offset inside a counter; rounded up to the batch.
  alignas(64) uint32_t words_[4 * (BLOCK / 4 + 1 + PHILOX)];
};

}  // namespace simd
