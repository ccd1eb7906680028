// One row of a table in its storage: read as FP32 vectors, written with its rounding. Integer rows as
// in numerics/int_rows.py. Rows in work buffers are padded to a multiple of ROW_LANES.
#pragma once

#include <algorithm>
#include <cstring>

#include "buffer.h"
#include "codec.h"

namespace simd {

constexpr int ROW_LANES = SUBULP_LANES;  // the lanes that a row is summed in, see numerics/metrics.py
constexpr int PARTS = ROW_LANES / W;

inline int64_t padded(int64_t dim) { return (dim + ROW_LANES - 1) / ROW_LANES * ROW_LANES; }

inline F load_part(const float* p, int64_t n) {
  if (n >= W) return load_f32(p);
  alignas(64) float t[W] = {};
  std::memcpy(t, p, static_cast<size_t>(n) * sizeof(float));
  return load_f32(t);
}
inline void store_part(float* p, F x, int64_t n) {
  if (n >= W) return store_f32(p, x);
  alignas(64) float t[W];
  store_f32(t, x);
  std::memcpy(p, t, static_cast<size_t>(n) * sizeof(float));
}
inline float sum_lanes(const F (&parts)[PARTS]) {
  static_assert(PARTS <= 2, "a vector is a half of the lanes, or all of them");
  return reduce_halves(PARTS == 2 ? simd::add(parts[0], parts[PARTS - 1]) : parts[0]);
}

// The random bits of a row's elements: those of their places in the whole table.
class RowBits {
 public:
  RowBits(uint32_t seed, uint32_t stream, uint32_t step, int64_t dim)
      : step_(step), words_(dim + 4 * PHILOX + 4 * W + 8) {
    for (int round = 0; round < 10; ++round, seed += 0x9E3779B9u, stream += 0xBB67AE85u) {
      key_[2 * round] = seed;
      key_[2 * round + 1] = stream;
    }
  }
  // Numbers of `width` bits, one after the other.
  template <int width>
  const char* draw(uint64_t first, int64_t count, uint32_t slot) {
    constexpr uint64_t per_counter = 128 / width;
    const uint64_t counter = first / per_counter;
    const int64_t counters = static_cast<int64_t>((first + count - 1) / per_counter - counter + 1);
    int64_t i = 0;
    for (; i + PHILOX_FEW < counters; i += PHILOX) philox(counter + i, step_, slot, key_, words_.data() + 4 * i);
    if (i < counters) philox<PHILOX_FEW>(counter + i, step_, slot, key_, words_.data() + 4 * i);
    return reinterpret_cast<const char*>(words_.data()) + first % per_counter * (width / 8);
  }

 private:
  uint32_t key_[20];
  uint32_t step_;
  Buffer<uint32_t> words_;
};

// How a row is rounded: to nearest without bits.
struct RowRounding {
  RowBits* bits;
  uint64_t first;
  uint32_t slot;
};

// Calls visit(i, values of the elements from i on) for a whole row.
template <class Reader, class Visit>
inline void each_vector(const Reader row, int64_t dim, Visit visit) {
  int64_t i = 0;
  for (; i + W <= dim; i += W) visit(i, row.whole(i));
  if (i < dim) visit(i, row.part(i, dim - i));
}

// Rows of a floating-point format.
template <class Format>
struct FloatRow {
  static constexpr bool is_chain = false;
  static int64_t bytes(int64_t dim) { return dim * Format::bytes; }

  // The values of the elements from i on.
  class Reader {
   public:
    explicit Reader(const char* row) : row_(row) {}
    F whole(int64_t i) const { return Format::load(row_ + i * Format::bytes); }
    // Lanes past the n-th are zero.
    F part(int64_t i, int64_t n) const {
      char tail[W * 4] = {};
      std::memcpy(tail, row_ + i * Format::bytes, static_cast<size_t>(n * Format::bytes));
      return Format::load(tail);
    }

   private:
    const char* row_;
  };
  template <class Visit>
  static void each(const char* row, int64_t dim, Visit visit) {
    each_vector(Reader(row), dim, visit);
  }

  static void encode(float* x, int64_t dim, char* row, const RowRounding& rounding) {
    const char* random = nullptr;
    if constexpr (Format::bytes < 4)
      if (rounding.bits) random = rounding.bits->template draw<Format::random_width>(rounding.first, dim, rounding.slot);
    for (int64_t i = 0; i < dim; i += W) {
      char part[W * 4];
      char* const to = i + W <= dim ? row + i * Format::bytes : part;
      const F value = load_f32(x + i);
      if constexpr (Format::bytes < 4) {
        if (random) {
          const char* const at = random + i * (Format::random_width / 8);
          store_stochastic<Format>(to, value, Format::random_width == 16 ? load_u16(at) : load_u32(at));
        } else {
          store_nearest<Format>(to, value);
        }
      } else {
        Format::store(to, value);
      }
      if (to == part) std::memcpy(row + i * Format::bytes, part, static_cast<size_t>((dim - i) * Format::bytes));
    }
  }
};

// W integers of `bits` bits from packed bytes.
template <int bits>
inline U load_packed(const char* p) {
  if constexpr (bits == 8) {
    return load_u8(p);
  } else {
    alignas(64) static constexpr uint32_t shifts[2][16] = {
        {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30},
        {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28},
    };
    uint32_t word[2] = {};
    std::memcpy(word, p, W * bits / 8);
    U words = u32(word[0]);
#if defined(__AVX512F__)
    if constexpr (bits == 4) words = _mm512_inserti32x8(words, _mm256_set1_epi32(static_cast<int>(word[1])), 1);
#endif
    return and_(shr(words, load_u32(shifts[bits / 4])), u32((1u << bits) - 1));
  }
}

// The same way back, of integers below 2^bits. From registers: bytes that are stored and read again wider than they
// were stored wait until the memory has them.
template <int bits>
inline void store_packed(void* p, U a) {
  if constexpr (bits == 8) {
    store_u8(p, a);
  } else {
#if defined(SUBULP_VECTORS_ARE_ARRAYS)
    constexpr int per_byte = 8 / bits;
    uint8_t q[W], packed[W / per_byte] = {};
    store_u8(q, a);
    for (int i = 0; i < W; ++i) packed[i / per_byte] |= static_cast<uint8_t>(q[i] << i % per_byte * bits);
    std::memcpy(p, packed, sizeof packed);
#else
    // Sums of neighbours, the later ones times 2^bits; of two bits, of their neighbours again.
    __m128i words = _mm_maddubs_epi16(narrow_u8(a), _mm_set1_epi16(1 | 1 << (bits + 8)));
    if constexpr (bits == 2) {
      const __m128i fours = _mm_madd_epi16(words, _mm_set1_epi32(1 | 1 << (2 * bits + 16)));
      words = _mm_packs_epi32(fours, fours);
    }
    const __m128i packed = _mm_packus_epi16(words, words);
    std::memcpy(p, &packed, W * bits / 8);
#endif
  }
}

// Rows of integers: FP32 scale and bias, then the packed integers.
template <int bits>
struct IntRow {
  static constexpr uint32_t top = (1u << bits) - 1;
  static constexpr int per_byte = 8 / bits;
  static constexpr int parameters = SUBULP_PARAMETER_BYTES;
  // Encoding is a long chain of operations: extremes, the scale, then all quotients.
  static constexpr bool is_chain = true;
  static int64_t packed(int64_t dim) { return (dim * bits + 7) / 8; }
  static int64_t bytes(int64_t dim) { return parameters + packed(dim); }

  // As above; lanes past the n-th are undefined.
  class Reader {
   public:
    explicit Reader(const char* row) : codes_(row + parameters) {
      float given[2];
      std::memcpy(given, row, sizeof given);
      scale_ = f32(given[0]), bias_ = f32(given[1]);
    }
    F whole(int64_t i) const { return value(codes_ + i / per_byte); }
    F part(int64_t i, int64_t n) const {
      char tail[W] = {};
      std::memcpy(tail, codes_ + i / per_byte, static_cast<size_t>(packed(n)));
      return value(tail);
    }

   private:
    F value(const char* p) const { return simd::add(mul(cvt_f32(load_packed<bits>(p)), scale_), bias_); }
    const char* codes_;
    F scale_, bias_;
  };
  template <class Visit>
  static void each(const char* row, int64_t dim, Visit visit) {
    each_vector(Reader(row), dim, visit);
  }

  // `x` has room for padding.
  static void encode(float* x, int64_t dim, char* row, const RowRounding& rounding) {
    const int64_t whole = padded(dim);
    for (int64_t i = dim; i < whole; ++i) x[i] = x[0];
    F low = load_f32(x), high = low;
    U largest = magnitude(low);
    for (int64_t i = W; i < whole; i += W) {
      const F value = load_f32(x + i);
      low = simd::min(low, value);
      high = simd::max(high, value);
      largest = simd::max(largest, magnitude(value));
    }
    // Adding 0 makes -0 a 0.
    const float bias = reduce_min(low) + 0.0f, span = reduce_max(high) - bias;
    float scale = span / static_cast<float>(top);
    if (reduce_max(largest) >= INFINITE || span > 3.4028234663852886e38f) {
      const uint32_t nan[2] = {QUIET_NAN, QUIET_NAN};
      std::memcpy(row, nan, sizeof nan);
      std::memset(row + parameters, 0, static_cast<size_t>(packed(dim)));
      return;
    }
    if (!(scale > 0.0f)) scale = 0.0f;
    std::memcpy(row, &scale, sizeof scale);
    std::memcpy(row + sizeof scale, &bias, sizeof bias);
    if (scale == 0.0f) {
      std::memset(row + parameters, 0, static_cast<size_t>(packed(dim)));
      return;
    }
    const F b = f32(bias), s = f32(scale), magic = f32(12582912.0f), zero = f32(0.0f);
    const char* const random =
        rounding.bits ? rounding.bits->template draw<32>(rounding.first, dim, rounding.slot) : nullptr;
    char* const codes = row + parameters;
    for (int64_t i = 0; i < dim; i += W) {
      // The maximum makes -0 a 0.
      const F t = simd::max(div(sub(load_f32(x + i), b), s), zero);
      // Adding 1.5 * 2^23 leaves no fraction bits: rounded to nearest even, the integer lowest.
      const F shifted = simd::add(t, magic);
      U n = sub(as_u32(shifted), u32(0x4B400000u));
      if (random) {
        const F whole_part = sub(shifted, magic);
        const M above = greater(as_u32(whole_part), as_u32(t));
        const F below = as_f32(select(above, as_u32(sub(whole_part, f32(1.0f))), as_u32(whole_part)));
        const F u = mul(cvt_f32(shr<8>(load_u32(random + 4 * i))), f32(5.9604644775390625e-8f));
        n = sub(n, select(above, u32(1), u32(0)));
        n = simd::add(n, select(greater(as_u32(sub(t, below)), as_u32(u)), u32(1), u32(0)));
      }
      n = simd::min(n, u32(top));
      if (i + W <= dim) {
        store_packed<bits>(codes + i / per_byte, n);
      } else {
        // What is beyond the row is zero in its last byte.
        uint32_t last[W] = {};
        alignas(64) uint32_t all[W];
        store_u32(all, n);
        std::memcpy(last, all, static_cast<size_t>(dim - i) * sizeof *all);
        char part[W];
        store_packed<bits>(part, load_u32(last));
        std::memcpy(codes + i / per_byte, part, static_cast<size_t>(packed(dim - i)));
      }
    }
  }
};

// Work on rows with the type of their storage; false if there is none.
template <class Work>
inline bool with_row_type(int format, Work work) {
  switch (format) {
#define SUBULP_FLOAT_ROWS(code, name, Format) \
  case SUBULP_##code: work(FloatRow<Format>{}); return true;
#define SUBULP_INTEGER_ROWS(code, name, bits) \
  case SUBULP_##code: work(IntRow<bits>{}); return true;
    SUBULP_FLOATS(SUBULP_FLOAT_ROWS)
    SUBULP_INTEGERS(SUBULP_INTEGER_ROWS)
#undef SUBULP_FLOAT_ROWS
#undef SUBULP_INTEGER_ROWS
    default: return false;
  }
}

}  // namespace simd
