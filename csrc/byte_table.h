// Halves of 16 bits looked up by bytes: a sign and one of 128 magnitudes. AVX-512 holds the table in registers.
#pragma once

#include "codec.h"

#if defined(__AVX512BW__)
#define SUBULP_BYTE_TABLE

namespace simd {

// The lowest lanes of a mask.
inline uint32_t first_lanes(int64_t count) { return count >= 32 ? ~0u : count <= 0 ? 0u : (1u << count) - 1; }

class ByteTable {
 public:
  // `make(codes)` turns W bytes into halves in 32-bit lanes; sign bits are added here.
  template <class Make>
  explicit ByteTable(Make make) {
    alignas(64) char codes[128];
    alignas(64) uint16_t halves[128];
    for (int i = 0; i < 128; ++i) codes[i] = static_cast<char>(i);
    for (int i = 0; i < 128; i += W) store_u16(halves + i, make(codes + i));
    for (int i = 0; i < 4; ++i) magnitudes_[i] = load_u32(halves + 32 * i);
  }

  // 32 of them. An index counts 64 entries: its sixth bit says of which half, its seventh is the sign.
  U halves(__m256i codes) const {
    const U wide = _mm512_cvtepu8_epi16(codes);
    const U small = _mm512_permutex2var_epi16(magnitudes_[0], wide, magnitudes_[1]);
    const U large = _mm512_permutex2var_epi16(magnitudes_[2], wide, magnitudes_[3]);
    const U found = _mm512_mask_mov_epi16(small, _mm512_test_epi16_mask(wide, _mm512_set1_epi16(0x40)), large);
    constexpr int first_or_both_others = 0xF8;
    return _mm512_ternarylogic_epi32(found, _mm512_slli_epi16(wide, 8), _mm512_set1_epi16(static_cast<short>(0x8000)),
                                     first_or_both_others);
  }

 private:
  U magnitudes_[4];
};

}  // namespace simd
#endif
