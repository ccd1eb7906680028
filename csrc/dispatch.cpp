// The C interface: chooses the kernels of an instruction set at run time.
#include "kernels.h"

#if defined(SUBULP_X86)
#include <cpuid.h>
#endif
#if defined(SUBULP_TILE_UNITS)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(SUBULP_X86)
// Not every compiler knows the name of this one.
bool converts_fp16() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

#if defined(SUBULP_TILE_UNITS)
// Whether there are tiles, and Linux lets this process use them: it keeps 8 KiB more of each thread that does, and may
// refuse where a thread's stack for signals has no room for them.
bool has_tiles() {
  static const bool has = [] {
    constexpr unsigned bf16_and_tiles = 1u << 22 | 1u << 24;
    constexpr long request_permission = 0x1023, tile_data = 18;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & bf16_and_tiles) == bf16_and_tiles &&
           syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  }();
  return has;
}
#endif

bool runs(int isa) {
  switch (isa) {
    case SUBULP_PLAIN:
    case SUBULP_PLAIN_AMX: return true;
#if defined(SUBULP_X86)
    case SUBULP_AVX2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && converts_fp16();
#if defined(SUBULP_BF16_UNITS)
    case SUBULP_AVX512_BF16: return runs(SUBULP_AVX512) && __builtin_cpu_supports("avx512bf16");
#endif
#if defined(SUBULP_TILE_UNITS)
    case SUBULP_AMX_BF16: return runs(SUBULP_AVX512_BF16) && has_tiles();
#endif
    case SUBULP_AVX512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
    default: return false;
  }
}

// Whether it is faster than those below. On Intel's processors AVX-512's units of BF16 are not: two cores of Emerald Rapids
// multiply pairs at 150 GFLOPS, FP32 at 310, and tiles at 1,500.
bool gains([[maybe_unused]] int isa) {
#if defined(SUBULP_X86)
  if (isa == SUBULP_AVX512_BF16) return !__builtin_cpu_is("intel");
#endif
  return true;
}

const subulp_kernels* kernels(int isa) {
  if (isa == SUBULP_BEST) isa = subulp_best_isa();
  if (!runs(isa)) return nullptr;
  switch (isa) {
#if defined(SUBULP_X86)
    case SUBULP_AVX2: return &subulp_kernels_avx2;
    // Units of BF16 serve products alone.
    case SUBULP_AVX512:
    case SUBULP_AVX512_BF16:
    case SUBULP_AMX_BF16: return &subulp_kernels_avx512;
#endif
    default: return &subulp_kernels_plain;
  }
}

const subulp_products* products(int isa) {
  if (isa == SUBULP_BEST) isa = subulp_best_isa();
  if (!runs(isa)) return nullptr;
  switch (isa) {
#if defined(SUBULP_X86)
    case SUBULP_AVX2: return &subulp_products_avx2;
    case SUBULP_AVX512: return &subulp_products_avx512;
#if defined(SUBULP_BF16_UNITS)
    case SUBULP_AVX512_BF16: return &subulp_products_avx512_bf16;
#endif
#if defined(SUBULP_TILE_UNITS)
    case SUBULP_AMX_BF16: return &subulp_products_amx_bf16;
#endif
#endif
    case SUBULP_PLAIN_AMX: return &subulp_products_plain_amx;
    default: return &subulp_products_plain;
  }
}

}  // namespace

extern "C" {

int subulp_abi(void) { return SUBULP_ABI; }

int subulp_best_isa(void) {
  int isa = SUBULP_AMX_BF16;
  while (!runs(isa) || !gains(isa)) --isa;
  return isa;
}
int subulp_has_isa(int isa) { return runs(isa) ? 1 : 0; }

int subulp_adam(const subulp_step* step) {
  const subulp_kernels* k = kernels(step->isa);
  return k ? k->adam(*step) : -1;
}
int subulp_sgd(const subulp_step* step) {
  const subulp_kernels* k = kernels(step->isa);
  return k ? k->sgd(*step) : -1;
}
void subulp_gather(int64_t count, const float* const* from, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = *from[i];
}
void subulp_count(int64_t count, float* const* numbers) {
  for (int64_t i = 0; i < count; ++i) *numbers[i] += 1.0f;
}
int subulp_all_finite(int64_t count, const int64_t* numel, const void* const* data, const int32_t* dtype,
                      int32_t threads, int32_t isa) {
  const subulp_kernels* k = kernels(isa);
  return k ? k->all_finite(count, numel, data, dtype, threads) : -1;
}
uint64_t subulp_fingerprint(const void* data, int64_t bytes, int32_t threads, int32_t isa) {
  const subulp_kernels* k = kernels(isa);
  return k ? k->fingerprint(data, bytes, threads) : 0;
}
int subulp_decode(int32_t dtype, const void* from, float* to, int64_t count, float scale, int32_t threads,
                  int32_t isa) {
  const subulp_kernels* k = kernels(isa);
  return k ? k->decode(dtype, from, to, count, scale, threads) : -1;
}
int subulp_encode(int32_t dtype, const float* from, void* to, int64_t count, float scale, int32_t threads,
                  int32_t isa) {
  const subulp_kernels* k = kernels(isa);
  return k ? k->encode(dtype, from, to, count, scale, threads) : -1;
}
int subulp_bf16_product(const subulp_product* product) {
  const subulp_products* p = products(product->isa);
  return p ? p->product(*product) : -1;
}
int subulp_head_step(const subulp_head* head) {
  const subulp_products* p = products(head->isa);
  return p ? p->head(*head, *kernels(head->isa)) : -1;
}
int64_t subulp_head_scratch(const subulp_head* head) {
  const subulp_products* p = products(head->isa);
  return p ? p->head_scratch(*head) : -1;
}
int subulp_logistic(float* logits, int64_t rows, int64_t columns, float gain, int32_t gradient, int32_t narrow,
                    const subulp_positives* positives, double* sums, int32_t threads, int32_t isa) {
  const subulp_kernels* k = kernels(isa);
  return k ? k->logistic(logits, rows, columns, gain, gradient, narrow, *positives, sums, threads) : -1;
}
int subulp_decode_rows(int32_t bits, const void* from, float* to, int64_t rows, int64_t dim, int32_t threads,
                       int32_t isa) {
  const subulp_kernels* k = kernels(isa);
  return k ? k->decode_rows(bits, from, to, rows, dim, threads) : -1;
}
int subulp_encode_rows(int32_t bits, const float* from, void* to, int64_t rows, int64_t dim, int32_t threads,
                       int32_t isa) {
  const subulp_kernels* k = kernels(isa);
  return k ? k->encode_rows(bits, from, to, rows, dim, threads) : -1;
}
int subulp_encode_rows_randomly(int32_t bits, const float* from, void* to, int64_t rows, int64_t dim, uint32_t seed,
                                uint32_t stream, uint32_t step, uint64_t first, int32_t threads, int32_t isa) {
  const subulp_kernels* k = kernels(isa);
  return k ? k->encode_rows_randomly(bits, from, to, rows, dim, seed, stream, step, first, threads) : -1;
}
int64_t subulp_embedding_pool(const subulp_table* tables, const subulp_lookups* lookups, float* out,
                              int64_t* statistics, int32_t threads, int32_t isa) {
  const subulp_kernels* k = kernels(isa);
  return k ? k->embedding_pool(tables, *lookups, out, statistics, threads) : -1;
}
int64_t subulp_embedding_weight_grad(const subulp_table* tables, const subulp_lookups* lookups, const float* grad,
                                     float* result, int32_t threads, int32_t isa) {
  const subulp_kernels* k = kernels(isa);
  return k ? k->embedding_weight_grad(tables, *lookups, grad, result, threads) : -1;
}
int64_t subulp_embedding_update(const subulp_table* tables, int64_t count, const subulp_lookups* lookups,
                                const float* grad, int64_t* evictions, uint32_t seed, uint32_t step, int32_t threads,
                                int32_t isa) {
  const subulp_kernels* k = kernels(isa);
  return k ? k->embedding_update(tables, count, *lookups, grad, evictions, seed, step, threads) : -1;
}
int64_t subulp_mixture_encode(const subulp_mixture* mixture) {
  const subulp_kernels* k = kernels(mixture->isa);
  return k ? k->mixture_encode(*mixture, mixture->threads) : -1;
}
int subulp_mixture_wide(const subulp_mixture* mixture, uint8_t* wide) {
  const subulp_kernels* k = kernels(mixture->isa);
  return k ? k->mixture_wide(*mixture, wide, mixture->threads) : -1;
}
int subulp_mixture_decode(const subulp_mixture* mixture, const uint8_t* wide, void* to) {
  const subulp_kernels* k = kernels(mixture->isa);
  return k ? k->mixture_decode(*mixture, wide, to, mixture->threads) : -1;
}
int subulp_blocks_measure(const subulp_blocks* blocks) {
  const subulp_kernels* k = kernels(blocks->isa);
  return k ? k->blocks_measure(*blocks, blocks->threads) : -1;
}
int subulp_blocks_errors(const subulp_blocks* blocks) {
  const subulp_kernels* k = kernels(blocks->isa);
  return k ? k->blocks_errors(*blocks, blocks->threads) : -1;
}
int subulp_blocks_encode(const subulp_blocks* blocks) {
  const subulp_kernels* k = kernels(blocks->isa);
  return k ? k->blocks_encode(*blocks, blocks->threads) : -1;
}
int subulp_blocks_decode(const subulp_blocks* blocks, const float* values, float* to) {
  const subulp_kernels* k = kernels(blocks->isa);
  return k ? k->blocks_decode(*blocks, values, to, blocks->threads) : -1;
}

}  // extern "C"
