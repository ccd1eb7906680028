// The kernels of one instruction set, as a table.
#pragma once

#include "subulp.h"

struct subulp_kernels {
  int (*adam)(const subulp_step&);
  int (*sgd)(const subulp_step&);
  int (*all_finite)(int64_t, const int64_t*, const void* const*, const int32_t*, int);
  uint64_t (*fingerprint)(const void*, int64_t, int);
  int (*decode)(int, const void*, float*, int64_t, float, int);
  int (*encode)(int, const float*, void*, int64_t, float, int);
  int (*logistic)(float*, int64_t, int64_t, float, int, int, const subulp_positives&, double*, int);
  int (*decode_rows)(int, const void*, float*, int64_t, int64_t, int);
  int (*encode_rows)(int, const float*, void*, int64_t, int64_t, int);
  int (*encode_rows_randomly)(int, const float*, void*, int64_t, int64_t, uint32_t, uint32_t, uint32_t, uint64_t, int);
  int64_t (*embedding_pool)(const subulp_table*, const subulp_lookups&, float*, int64_t*, int);
  int64_t (*embedding_weight_grad)(const subulp_table*, const subulp_lookups&, const float*, float*, int);
  int64_t (*embedding_update)(const subulp_table*, int64_t, const subulp_lookups&, const float*, int64_t*, uint32_t,
                          uint32_t, int);
  int64_t (*mixture_encode)(const subulp_mixture&, int);
  int (*mixture_wide)(const subulp_mixture&, uint8_t*, int);
  int (*mixture_decode)(const subulp_mixture&, const uint8_t*, void*, int);
  int (*blocks_measure)(const subulp_blocks&, int);
  int (*blocks_errors)(const subulp_blocks&, int);
  int (*blocks_encode)(const subulp_blocks&, int);
  int (*blocks_decode)(const subulp_blocks&, const float*, float*, int);
};

// What multiplies and adds in one instruction.
struct subulp_products {
  int (*product)(const subulp_product&);
  int (*head)(const subulp_head&, const subulp_kernels&);
  int64_t (*head_scratch)(const subulp_head&);
};

extern "C" {
extern const subulp_kernels subulp_kernels_plain;
#if defined(SUBULP_X86)
extern const subulp_kernels subulp_kernels_avx2;
extern const subulp_kernels subulp_kernels_avx512;
#endif
extern const subulp_products subulp_products_plain;
extern const subulp_products subulp_products_plain_amx;
#if defined(SUBULP_X86)
extern const subulp_products subulp_products_avx2;
extern const subulp_products subulp_products_avx512;
extern const subulp_products subulp_products_avx512_bf16;
extern const subulp_products subulp_products_amx_bf16;
#endif
}
