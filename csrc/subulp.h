/* The C interface of subulp's CPU kernels: plain C, no framework header, so that one build serves
 * every PyTorch. src/subulp/ops/native.py mirrors the types below, once; bump SUBULP_ABI whenever
 * they change.
 */
#ifndef SUBULP_H
#define SUBULP_H

#include <stdint.h>

#define SUBULP_ABI 2

#if defined(_WIN32)
#define SUBULP_EXPORT __declspec(dllexport)
#else
#define SUBULP_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum subulp_isa { SUBULP_PLAIN = 0, SUBULP_AVX2 = 1, SUBULP_AVX512 = 2, SUBULP_BEST = -1 };

enum subulp_dtype { SUBULP_FP32, SUBULP_BF16, SUBULP_FP16, SUBULP_E4M3, SUBULP_E5M2 };

/* How a step stores what it updates; see src/subulp/ops/strategy.py. */
enum subulp_strategy {
  SUBULP_WHOLE,       /* fp32 */
  SUBULP_NEAREST,
  SUBULP_STOCHASTIC,
  SUBULP_KAHAN,
  SUBULP_LIGHT,
  SUBULP_PLUS,
  SUBULP_FP32_STATES,
  SUBULP_MASTER,
  SUBULP_EXTRA_TRUNCATE,
  SUBULP_EXTRA_STOCHASTIC,
};

/* Numbers of one tensor, rounded to FP32 once by the caller. */
typedef struct {
  float step_size;      /* Adam: lr / (1 - beta1^t). SGD: lr */
  float inv_sqrt_bias2; /* Adam: 1 / sqrt(1 - beta2^t) */
  float decay;          /* decoupled weight decay: lr * weight_decay */
  float fast_decode, fast_encode; /* powers of two around the stored states (FP8), else 1 */
  float slow_decode, slow_encode;
  float slow_floor; /* Adam with FP8 states: the least second moment that the update believes */
  uint32_t step;   /* Philox counter word; SGD starts its momentum at 1 */
  uint32_t stream; /* Philox key word */
  uint64_t offset; /* index of the first element in the unsharded tensor */
} subulp_scalars;

/* One fused optimizer step over a list of tensors. Every pointer array has `count` entries; the
 * arrays of roles that the strategy does not have are null. */
typedef struct {
  int64_t count;
  const int64_t* numel;
  void* const* param;
  const void* const* grad;
  void* const* fast;  /* Adam: exp_avg. SGD: unused */
  void* const* slow;  /* Adam: exp_avg_sq. SGD: momentum_buffer, or null without momentum */
  void* const* extra; /* parameter_low, compensation, master or extra_bits */
  void* const* slow_low; /* second component of `slow` */
  const subulp_scalars* scalars;
  int32_t strategy;
  int32_t param_dtype;
  int32_t grad_dtype;
  int32_t extra_bits;
  uint32_t seed;
  int32_t threads;
  int32_t isa;
  int32_t maximize;
  int32_t decoupled; /* Adam: weight decay enters the update, not the gradient */
  int32_t nesterov;
  float beta1, one_minus_beta1; /* SGD: momentum, 1 - dampening */
  float beta2, one_minus_beta2;
  float eps;
  float weight_decay; /* coupled weight decay; 0 leaves it out */
} subulp_step;

SUBULP_EXPORT int subulp_abi(void);
SUBULP_EXPORT int64_t subulp_sizeof_step(void);
SUBULP_EXPORT int64_t subulp_sizeof_scalars(void);

/* The widest instruction set that this build and this processor share. */
SUBULP_EXPORT int subulp_best_isa(void);
/* Nonzero if kernels for `isa` are in this build and run on this processor. */
SUBULP_EXPORT int subulp_has_isa(int isa);

/* Return 0, or -1 if the combination of strategy and dtypes does not exist or the instruction set
 * is not available; nothing is written then. */
SUBULP_EXPORT int subulp_adam(const subulp_step* step);
SUBULP_EXPORT int subulp_sgd(const subulp_step* step);

/* 1 if every value of every tensor is finite, else 0; -1 as above. */
SUBULP_EXPORT int subulp_all_finite(int64_t count, const int64_t* numel, const void* const* data,
                                    const int32_t* dtype, int32_t threads, int32_t isa);

/* `to[i] = from[i] * scale`: from a narrow dtype to FP32, and from FP32 to a narrow dtype, rounded to
 * nearest even; -1 as above. */
SUBULP_EXPORT int subulp_decode(int32_t dtype, const void* from, float* to, int64_t count, float scale,
                                int32_t threads, int32_t isa);
SUBULP_EXPORT int subulp_encode(int32_t dtype, const float* from, void* to, int64_t count, float scale,
                                int32_t threads, int32_t isa);

/* FP32 (rows, columns): with `gradient`, z becomes sigmoid(z) * gain; `sums`, unless null, gets the sum
 * of softplus(z) over each row; -1 as above. */
SUBULP_EXPORT int subulp_logistic(float* logits, int64_t rows, int64_t columns, float gain, int32_t gradient,
                                  double* sums, int32_t threads, int32_t isa);

#ifdef __cplusplus
}
#endif

#endif
