// Tails of extra bits: BLOCK unsigned integers of 1 to 17 bits, packed least significant bit first. Those of one byte or
// two a pass reads and writes where they lie.
#pragma once

#include <cstdint>
#include <cstring>

#include "random_bits.h"

namespace simd {

constexpr int MOST_TAIL_BITS = 17;

#if defined(__AVX2__)

// Eight tails take as many whole bytes as a tail has bits, so every eight of them move in the same way.
// Within them, four begin at each half: the upper half of the vector has bytes from `half_` on.
class Tails {
 public:
  explicit Tails(int width) : width_(width), half_(width / 2), mask_((1u << width) - 1) {
    std::memset(at_, NOWHERE, sizeof at_);
    for (int i = 0; i < 8; ++i) {
      const int bit = i * width - (i < 4 ? 0 : 8 * half_);
      unpack_shift_[i] = static_cast<uint32_t>(bit % 8);
      for (int b = 0; b < 4; ++b) from_[4 * i + b] = static_cast<uint8_t>(bit / 8 + b);
      if (i % 2) continue;
      // Two tails, next to each other in 64 bits.
      pack_shift_[i / 2] = static_cast<uint64_t>(bit % 8);
      uint8_t* const half = at_[i / 2 % 2] + 16 * (i / 4);
      for (int b = 0; b < 8; ++b) half[bit / 8 + b] = static_cast<uint8_t>(8 * (i / 2 % 2) + b);
    }
#if defined(__AVX512BW__)
    for (int i = 0; i < 16; ++i) {
      pair_[2 * i] = static_cast<uint16_t>(i * width / 16);
      pair_[2 * i + 1] = static_cast<uint16_t>(i * width / 16 + 1);
      pair_shift_[i] = static_cast<uint32_t>(i * width % 16);
    }
#endif
    for (int b = 0; b < 16; ++b) upper_[b] = b < half_ ? NOWHERE : static_cast<uint8_t>(b - half_);
  }

#if defined(__AVX512BW__)
  // Sixteen tails are as many 16-bit words as a tail has bits, and each lies in two of them.
  void unpack(const char* words, uint32_t* tail) const {
    const __m512i from = _mm512_loadu_si512(pair_), shift = _mm512_loadu_si512(pair_shift_);
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(mask_));
    const __mmask32 all = (uint32_t{1} << width_) - 1;
    for (int i = 0; i < BLOCK; i += 16, words += 2 * width_) {
      const __m512i x = _mm512_permutexvar_epi16(from, _mm512_maskz_loadu_epi16(all, words));
      _mm512_storeu_si512(tail + i, _mm512_and_si512(_mm512_srlv_epi32(x, shift), mask));
    }
  }
#else
  void unpack(const char* words, uint32_t* tail) const {
    // Vectors are read whole, also at the end.
    alignas(32) char bytes[BYTES];
    std::memcpy(bytes, words, static_cast<size_t>(BLOCK / 8 * width_));
    const __m256i from = vector(from_), shift = vector(unpack_shift_), mask = _mm256_set1_epi32(mask_);
    const char* p = bytes;
    for (int i = 0; i < BLOCK; i += 8, p += width_) {
      __m256i x = _mm256_set_m128i(half(p + half_), half(p));
      x = _mm256_srlv_epi32(_mm256_shuffle_epi8(x, from), shift);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(tail + i), _mm256_and_si256(x, mask));
    }
  }
#endif

  void pack(const uint32_t* tail, char* words) const {
    alignas(64) char bytes[BYTES];
    char* p = bytes;
#if defined(__AVX512BW__)
    // As below, but for sixteen.
    const auto twice = [](const void* x) { return _mm512_broadcast_i64x4(vector(x)); };
    const __m512i low = _mm512_set1_epi64(0xFFFFFFFF), shift = twice(pack_shift_);
    const __m512i first = twice(at_[0]), second = twice(at_[1]), upper = _mm512_broadcast_i32x4(half(upper_));
    const __m128i width = _mm_cvtsi32_si128(width_);
    for (int i = 0; i < BLOCK; i += 16, p += 2 * width_) {
      const __m512i x = _mm512_loadu_si512(tail + i);
      const __m512i odd = _mm512_sll_epi64(_mm512_srli_epi64(x, 32), width);
      const __m512i two = _mm512_sllv_epi64(_mm512_or_si512(_mm512_and_si512(x, low), odd), shift);
      const __m512i four = _mm512_or_si512(_mm512_shuffle_epi8(two, first), _mm512_shuffle_epi8(two, second));
      const __m512i high = _mm512_shuffle_i32x4(four, four, 0xF5);
      const __m512i eight = _mm512_or_si512(four, _mm512_shuffle_epi8(high, upper));
      store(p, _mm512_castsi512_si128(eight), _mm512_castsi512_si128(high));
      store(p + width_, _mm512_extracti32x4_epi32(eight, 2), _mm512_extracti32x4_epi32(high, 2));
    }
#else
    const __m256i low = _mm256_set1_epi64x(0xFFFFFFFF), shift = vector(pack_shift_);
    const __m256i first = vector(at_[0]), second = vector(at_[1]);
    const __m128i upper = half(upper_), width = _mm_cvtsi32_si128(width_);
    for (int i = 0; i < BLOCK; i += 8, p += width_) {
      const __m256i x = vector(tail + i);
      const __m256i odd = _mm256_sll_epi64(_mm256_srli_epi64(x, 32), width);
      const __m256i two = _mm256_sllv_epi64(_mm256_or_si256(_mm256_and_si256(x, low), odd), shift);
      const __m256i four = _mm256_or_si256(_mm256_shuffle_epi8(two, first), _mm256_shuffle_epi8(two, second));
      const __m128i high = _mm256_extracti128_si256(four, 1);
      store(p, _mm_or_si128(_mm256_castsi256_si128(four), _mm_shuffle_epi8(high, upper)), high);
    }
#endif
    std::memcpy(words, bytes, static_cast<size_t>(BLOCK / 8 * width_));
  }

 private:
  static constexpr uint8_t NOWHERE = 0x80;  // a shuffle makes such a byte zero
  static constexpr int BYTES = BLOCK / 8 * MOST_TAIL_BITS + 32;

  // What is stored beyond `width_` bytes, the next eight overwrite.
  void store(char* p, __m128i eight, __m128i high) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), eight);
    if (width_ == MOST_TAIL_BITS) p[16] = static_cast<char>(_mm_extract_epi8(high, 8));
  }
  static __m256i vector(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static __m128i half(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

  int width_, half_;
  uint32_t mask_;
  uint32_t unpack_shift_[8];
  uint64_t pack_shift_[4];
  uint8_t from_[32], at_[2][32], upper_[16];
#if defined(__AVX512BW__)
  uint16_t pair_[32];
  uint32_t pair_shift_[16];
#endif
};

#else

class Tails {
 public:
  explicit Tails(int width) : width_(width) {}

  void unpack(const char* words, uint32_t* tail) const {
    const uint64_t mask = (uint64_t{1} << width_) - 1;
    for (int group = 0; group < BLOCK / 32; ++group, words += 4 * width_, tail += 32) {
      uint32_t w[MOST_TAIL_BITS + 1] = {};
      std::memcpy(w, words, 4 * static_cast<size_t>(width_));
      for (int i = 0, bit = 0; i < 32; ++i, bit += width_) {
        const uint64_t pair = w[bit / 32] | uint64_t{w[bit / 32 + 1]} << 32;
        tail[i] = static_cast<uint32_t>(pair >> (bit % 32) & mask);
      }
    }
  }

  void pack(const uint32_t* tail, char* words) const {
    for (int group = 0; group < BLOCK / 32; ++group, words += 4 * width_, tail += 32) {
      uint32_t w[MOST_TAIL_BITS + 1] = {};
      for (int i = 0, bit = 0; i < 32; ++i, bit += width_) {
        const uint64_t pair = uint64_t{tail[i]} << (bit % 32);
        w[bit / 32] |= static_cast<uint32_t>(pair);
        w[bit / 32 + 1] |= static_cast<uint32_t>(pair >> 32);
      }
      std::memcpy(words, w, 4 * static_cast<size_t>(width_));
    }
  }

 private:
  int width_;
};

#endif

}  // namespace simd
