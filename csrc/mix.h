// The hash that chooses the set of a row in a cache: numerics.random_bits.mix.
#pragma once

#include <cstdint>

inline uint32_t subulp_mix(uint32_t h) {
  h = (h ^ h >> 16) * 0x85EBCA6Bu;
  h = (h ^ h >> 13) * 0xC2B2AE35u;
  return h ^ h >> 16;
}
