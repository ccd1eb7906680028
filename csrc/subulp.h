/* The C interface of subulp's CPU kernels: plain C, no framework header, so that one build serves every
 * PyTorch. src/subulp/ops/native.py mirrors the types and functions; bump SUBULP_ABI whenever they change.
 * The tables are copies of what src/subulp/ops/facts.py derives from their sources: subulp_facts() spells
 * them out, and the library is refused if they differ.
 */
#ifndef SUBULP_H
#define SUBULP_H

#include <stdint.h>

#define SUBULP_ABI 15

#if defined(_WIN32)
#define SUBULP_EXPORT __declspec(dllexport)
#else
#define SUBULP_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of a table: name of the code, name in Python, and what C++ makes of it. */
#define SUBULP_CODE(code, ...) SUBULP_##code,

/* From narrow to wide, then what spells one of them out. */
#define SUBULP_ISAS(X) \
  X(PLAIN, "plain") X(AVX2, "avx2") X(AVX512, "avx512") X(AVX512_BF16, "avx512-bf16") X(AMX_BF16, "amx-bf16") \
  X(PLAIN_AMX, "plain-amx")
enum subulp_isa { SUBULP_ISAS(SUBULP_CODE) SUBULP_BEST = -1 };

/* Floating-point formats with their type in csrc/codec.h, and rows of integers of so many bits, each with an
 * FP32 scale and bias (csrc/rows.h). */
#define SUBULP_FLOATS(X) \
  X(FP32, "fp32", Fp32) X(BF16, "bf16", Bf16) X(FP16, "fp16", Fp16) X(E4M3, "e4m3", E4m3) X(E5M2, "e5m2", E5m2)
#define SUBULP_INTEGERS(X) X(INT8, "int8", 8) X(INT4, "int4", 4) X(INT2, "int2", 2)
enum subulp_format { SUBULP_FLOATS(SUBULP_CODE) SUBULP_INTEGERS(SUBULP_CODE) };

#define SUBULP_RULES(X) X(ROW_SGD, "sgd") X(ADAGRAD, "adagrad") X(ROWWISE_ADAGRAD, "rowwise-adagrad")
enum subulp_rule { SUBULP_RULES(SUBULP_CODE) };

#define SUBULP_RECIPES(X) X(TENSOR, "tensor") X(TWO_WAY, "subtensor-2way") X(THREE_WAY, "subtensor-3way")
enum subulp_recipe { SUBULP_RECIPES(SUBULP_CODE) };

#define SUBULP_SCALINGS(X) X(GAM, "gam") X(AMAX, "amax") X(E8M0, "e8m0")
enum subulp_scaling { SUBULP_SCALINGS(SUBULP_CODE) };

#define SUBULP_METRICS(X) \
  X(RELATIVE, "relative-error") X(SQUARED, "squared-relative-error") X(UNDERFLOW, "underflow")
enum subulp_metric { SUBULP_METRICS(SUBULP_CODE) };

/* How a step stores what it updates, the table of src/subulp/ops/strategy.py: code, name, how the parameter is
 * kept, how the slow state is kept, whether states are FP32, whether random bits are drawn, parameter dtypes. */
#define SUBULP_STRATEGIES(X)                                                            \
  X(WHOLE, "fp32", plain, plain, true, false, whole)                                    \
  X(NEAREST, "nearest", plain, plain, false, false, narrow)                             \
  X(STOCHASTIC, "stochastic", stochastic, stochastic, false, true, narrow)              \
  X(KAHAN, "kahan", kahan, plain, false, false, halves)                                 \
  X(LIGHT, "collage-light", expansion, plain, false, false, narrow)                     \
  X(PLUS, "collage-plus", expansion, expansion, false, false, narrow)                   \
  X(FP32_STATES, "fp32-states", plain, plain, true, false, halves)                      \
  X(MASTER, "master", master, plain, true, false, halves)                               \
  X(EXTRA_NEAREST, "extra-bits-K", signed_bits, plain, true, true, halves)              \
  X(EXTRA_DETERMINISTIC, "extra-bits-K-deterministic", signed_bits, plain, true, false, halves) \
  X(EXTRA_TRUNCATE, "extra-bits-K-truncate", extra_bits, plain, true, false, halves)    \
  X(EXTRA_STOCHASTIC, "extra-bits-K-stochastic", extra_bits, plain, true, true, halves)
enum subulp_strategy { SUBULP_STRATEGIES(SUBULP_CODE) };

#define SUBULP_CONSTANTS(X)                                                                        \
  X(BAD_OFFSETS, -2) X(BAD_GRADIENT, -3) X(BAD_WEIGHTS, -4) X(BAD_TAGS, -5)                        \
  X(BAD_POSITIVES, -6)                                                                             \
  X(BLOCK_STEP, 32)             /* of blocks of a product, ops/bf16_product.py */                  \
  X(E4M3_LOW_SCALE, 16)         /* of a parameter's second component, strategy.low_scale */        \
  X(LANES, 16)                  /* of a sum in its fixed order, numerics/metrics.py */             \
  X(PARAMETER_BYTES, 8)         /* scale and bias of a row of integers, numerics/int_rows.py */    \
  X(COUNT_LIMIT, 0x7FFFFFFF)    /* and the next four: ops/embedding/job.py */                      \
  X(EMPTY, -1) X(BYPASS_SLOT, 0) X(EVICT_SLOT, 1) X(GRADIENT_SPAN, 64)
#define SUBULP_VALUE(name, value) SUBULP_##name = value,
enum subulp_constant { SUBULP_CONSTANTS(SUBULP_VALUE) };

/* Numbers of one tensor, rounded to FP32 once by the caller; SCALARS of src/subulp/ops/step/job.py. */
#define SUBULP_SCALARS(X)                                                                          \
  X(float, step_size)      /* Adam: lr / (1 - beta1^t). SGD: lr */                                 \
  X(float, inv_sqrt_bias2) /* Adam: 1 / sqrt(1 - beta2^t) */                                       \
  X(float, decay)          /* decoupled weight decay: lr * weight_decay */                         \
  X(float, fast_decode)    /* and the next three: powers of two around stored FP8 states, else 1 */ \
  X(float, fast_encode) X(float, slow_decode) X(float, slow_encode)                                \
  X(float, slow_floor)     /* Adam with FP8 states: the least second moment the update believes */ \
  X(uint32_t, step)        /* Philox counter word */                                               \
  X(uint32_t, first)       /* SGD: the momentum buffer begins with this gradient */                \
  X(uint32_t, fast_dither) /* and the next two: fractions of an ulp, in units of 2^-32 */          \
  X(uint32_t, slow_dither) X(uint32_t, extra_dither)                                               \
  X(uint32_t, stream)      /* Philox key word */                                                   \
  X(uint64_t, offset)      /* index of the first element in the unsharded tensor */                \
  X(uint64_t, run)         /* and the next five: numerics/random_bits.py, Region; 0 for one run */ \
  X(uint64_t, count_1) X(uint64_t, count_2)                                                        \
  X(uint64_t, stride_1) X(uint64_t, stride_2) X(uint64_t, stride_3)
#define SUBULP_MEMBER(type, name) type name;
typedef struct { SUBULP_SCALARS(SUBULP_MEMBER) } subulp_scalars;

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

/* An embedding table and its cache; see src/subulp/ops/embedding/job.py. Absent roles are null; only an
 * update reads what stands behind `tags`, `sets`, `ways` and `mixed`. */
typedef struct {
  void* codes;
  float* cache;
  int32_t* tags;
  int32_t* counts;
  int32_t* stamps;
  int32_t* floors;
  float* accumulator;
  int64_t rows;
  int64_t row_bytes;
  int64_t dim;
  int64_t sets; /* 0 without a cache */
  /* Where the elements lie in a whole table, for random bits: row r is the whole's
   * r / taken * period + first + r % taken, of `whole_dim` numbers, and begins at its `column`. */
  int64_t period, first, taken, whole_dim, column;
  int32_t dtype;
  int32_t ways;
  int32_t mixed;
  int32_t stochastic;
  int32_t rule;
  uint32_t stream;
  float lr, weight_decay, eps;
  int32_t reserved;
} subulp_table;

/* Bags of rows, feature by feature. */
typedef struct {
  int64_t features;
  int64_t batch;  /* bags of a feature */
  int64_t stride; /* of a row of the output and of its gradient */
  int64_t count;  /* of the values */
  const int32_t* table;   /* of each feature */
  const int64_t* column;  /* of each feature, in the output */
  const int64_t* values;  /* row numbers */
  const int64_t* offsets; /* features * batch + 1 */
  const float* weights;   /* of the values, or null */
} subulp_lookups;

/* A matrix in a mixture of representations; see src/subulp/numerics/mixture.py. */
typedef struct {
  const void* x; /* (rows, columns), not read when decoding */
  int64_t rows, columns;
  int64_t block_rows, block_columns;
  int64_t group_rows, group_columns; /* in blocks */
  uint8_t* codes;
  uint8_t* types; /* of blocks, or of the tensor if it decides */
  float* mantissa;
  int8_t* exponents;
  double* numbers; /* of a summary */
  int32_t dtype; /* of x; when decoding, the wide format */
  int32_t recipe;
  int32_t scaling;
  float threshold;
  int32_t threads;
  int32_t isa;
  int32_t to_dtype; /* when decoding, FP32 or BF16 */
  int32_t reserved;
} subulp_mixture;

/* A narrow format that blocks may be in. */
typedef struct {
  int32_t first_normal; /* FP32 exponent field of the smallest normal value */
  int32_t mantissa_bits;
  int32_t sign_bit; /* its place */
} subulp_narrow;

/* A matrix in passes over its blocks, in any formats; see src/subulp/ops/mixture/passes.py. */
typedef struct {
  const void* x; /* (rows, columns), not read when decoding */
  int64_t rows, columns;
  int64_t block_rows, block_columns;
  const subulp_narrow* formats;
  float* amax;          /* of blocks, like all that follow but codes and wide */
  float* smallest;
  int64_t* counts;
  const float* factors; /* format after format; when decoding, of each block's own */
  float* sums;          /* format after format */
  uint8_t* codes;
  const uint8_t* types;
  const int64_t* offsets; /* of wide blocks in wide */
  uint8_t* wide;
  int32_t count; /* of formats */
  int32_t metric;
  int32_t dtype; /* of x; when decoding, the wide format */
  int32_t threads;
  int32_t isa;
  int32_t reserved;
} subulp_blocks;

/* Blocks of a factor, each with a scale of its own. A block has `lines` lines and `inner` numbers of each, multiples of
 * SUBULP_BLOCK_STEP, and there are `across` blocks along a line. */
typedef struct {
  const int8_t* exponents; /* a stored value times 2^-exponent is a number; from -126 to 126; null: no blocks */
  const uint8_t* types;    /* whether a block is in E5M2; null: all are in E4M3 */
  int64_t lines, inner, across;
} subulp_product_blocks;

/* c = a b c_scale + bias, (m, n) from (m, k) and (k, n): FP32 sums of operands that are multiplied by their scale, a
 * power of two, and rounded to BF16; see src/subulp/ops/bf16_product.py. */
typedef struct {
  const void* a;
  const void* b;
  void* c;
  const float* bias; /* of c's columns, or null */
  int64_t m, n, k;
  int64_t a_stride, b_stride, c_stride; /* between lines, in numbers */
  int32_t a_dtype, b_dtype;
  int32_t a_k_inner, b_k_inner; /* whether a line runs along k */
  float a_scale, b_scale;
  int32_t c_dtype; /* FP32 or BF16 */
  float c_scale;
  int32_t threads;
  int32_t isa;
  subulp_product_blocks a_blocks, b_blocks; /* of E4M3, whose own scale is 1 then */
} subulp_product;

/* Elements of a matrix. */
typedef struct {
  int64_t count;
  const int64_t* rows; /* counted from `first` */
  const int64_t* columns;
  int64_t first;
} subulp_positives;

/* A step of a chunk of a classifier's rows whose products have BF16 operands; see src/subulp/ops/head/__init__.py. */
typedef struct {
  void* rows; /* (labels, dim) */
  int64_t labels, dim, batch;
  int64_t tile_rows;     /* of which the inputs' gradient is summed up before it is added */
  const void* x_logits;  /* (batch, dim) */
  const float* x;        /* (batch, dim), as the rows' gradient takes the inputs; not read without a step */
  float* grad_x;         /* (batch, dim), added to; or null */
  float* positive_logits; /* of the positives, not rounded; with `sums` */
  double* sums;          /* of each row's softplus, or null */
  const subulp_step* step; /* SGD of one tensor, whose addresses and size are left out; or null */
  void* scratch;         /* subulp_head_scratch() bytes */
  subulp_positives positives; /* ascending rows, counted from 0 */
  int32_t dtype;         /* of the rows */
  int32_t x_dtype;       /* of x_logits */
  float gain;
  float scale;           /* a power of two: a stored value times it is a weight */
  int32_t threads;
  int32_t isa;
} subulp_head;

SUBULP_EXPORT int subulp_abi(void);
/* The tables above, the sizes of the structures and samples of the row hash, a line each. */
SUBULP_EXPORT const char* subulp_facts(void);

/* The widest instruction set that this build and this processor share. */
SUBULP_EXPORT int subulp_best_isa(void);
/* Nonzero if kernels for `isa` are in this build and run on this processor. */
SUBULP_EXPORT int subulp_has_isa(int isa);

/* Return 0, or -1 if the combination of strategy and dtypes does not exist or the instruction set
 * is not available; nothing is written then. */
SUBULP_EXPORT int subulp_adam(const subulp_step* step);
SUBULP_EXPORT int subulp_sgd(const subulp_step* step);

/* Numbers that lie apart, as an optimizer's step counters do: `to[i] = *from[i]`, and `*numbers[i] += 1`. */
SUBULP_EXPORT void subulp_gather(int64_t count, const float* const* from, float* to);
SUBULP_EXPORT void subulp_count(int64_t count, float* const* numbers);

/* 1 if every value of every tensor is finite, else 0; -1 as above. */
SUBULP_EXPORT int subulp_all_finite(int64_t count, const int64_t* numel, const void* const* data,
                                    const int32_t* dtype, int32_t threads, int32_t isa);

/* A number of the bytes and their places: another one, as good as surely, where any of them differs. */
SUBULP_EXPORT uint64_t subulp_fingerprint(const void* data, int64_t bytes, int32_t threads, int32_t isa);

/* `to[i] = from[i] * scale`: from a narrow dtype to FP32, and from FP32 to a narrow dtype, rounded to
 * nearest even; -1 as above. */
SUBULP_EXPORT int subulp_decode(int32_t dtype, const void* from, float* to, int64_t count, float scale,
                                int32_t threads, int32_t isa);
SUBULP_EXPORT int subulp_encode(int32_t dtype, const float* from, void* to, int64_t count, float scale,
                                int32_t threads, int32_t isa);

/* Returns 0, or -1 as above. */
SUBULP_EXPORT int subulp_bf16_product(const subulp_product* product);

/* Returns 0, or SUBULP_BAD_POSITIVES, and then changes nothing; -1 as above. */
SUBULP_EXPORT int subulp_head_step(const subulp_head* head);
SUBULP_EXPORT int64_t subulp_head_scratch(const subulp_head* head);

/* FP32 (rows, columns): with `gradient`, z becomes sigmoid(z) * gain, and (sigmoid(z) - 1) * gain at the positives;
 * `sums`, unless null, gets the sum of softplus(z) over each row. With `narrow`, z and what it becomes are rounded to
 * BF16. -1 as above, or if a positive is outside. */
SUBULP_EXPORT int subulp_logistic(float* logits, int64_t rows, int64_t columns, float gain, int32_t gradient,
                                  int32_t narrow, const subulp_positives* positives, double* sums, int32_t threads,
                                  int32_t isa);

/* Rows of integers of 8, 4 or 2 bits to FP32 (rows, dim) and back, rounded to nearest; -1 as above. */
SUBULP_EXPORT int subulp_decode_rows(int32_t bits, const void* from, float* to, int64_t rows, int64_t dim,
                                     int32_t threads, int32_t isa);
SUBULP_EXPORT int subulp_encode_rows(int32_t bits, const float* from, void* to, int64_t rows, int64_t dim,
                                     int32_t threads, int32_t isa);
/* Rounded stochastically, with the random bits of the elements from `first` on; -1 as above. */
SUBULP_EXPORT int subulp_encode_rows_randomly(int32_t bits, const float* from, void* to, int64_t rows, int64_t dim,
                                              uint32_t seed, uint32_t stream, uint32_t step, uint64_t first,
                                              int32_t threads, int32_t isa);

/* Sums of bags: `out` (batch, stride); `statistics` (tables, 2) get the lookups and cache hits added. Returns 0,
 * or 1 + the position of a row number that is out of range, or SUBULP_BAD_OFFSETS, and then adds nothing; -1 as
 * above. */
SUBULP_EXPORT int64_t subulp_embedding_pool(const subulp_table* tables, const subulp_lookups* lookups, float* out,
                                            int64_t* statistics, int32_t threads, int32_t isa);
/* The gradient of the weights; entries of values in no bag are left alone. Returns as above. */
SUBULP_EXPORT int64_t subulp_embedding_weight_grad(const subulp_table* tables, const subulp_lookups* lookups,
                                                   const float* grad, float* result, int32_t threads, int32_t isa);
/* One step of the rows in the bags; `evictions` of each table are added. Returns as above, or
 * SUBULP_BAD_GRADIENT or SUBULP_BAD_WEIGHTS if they are not finite, and then changes nothing;
 * SUBULP_BAD_TAGS if a set holds rows that the table does not have: they stay where they are. */
SUBULP_EXPORT int64_t subulp_embedding_update(const subulp_table* tables, int64_t count,
                                              const subulp_lookups* lookups, const float* grad, int64_t* evictions,
                                              uint32_t seed, uint32_t step, int32_t threads, int32_t isa);

/* Everything but the BF16 numbers, whose count is returned; -1 as above. */
SUBULP_EXPORT int64_t subulp_mixture_encode(const subulp_mixture* mixture);
/* The BF16 numbers: upper bytes into `codes`, lower ones into `wide`; -1 as above. */
SUBULP_EXPORT int subulp_mixture_wide(const subulp_mixture* mixture, uint8_t* wide);
/* (rows, columns), BF16 rounded to nearest; `wide` is null where there are no BF16 numbers; -1 as above. */
SUBULP_EXPORT int subulp_mixture_decode(const subulp_mixture* mixture, const uint8_t* wide, void* to);
SUBULP_EXPORT int subulp_blocks_measure(const subulp_blocks* blocks);
SUBULP_EXPORT int subulp_blocks_errors(const subulp_blocks* blocks);
SUBULP_EXPORT int subulp_blocks_encode(const subulp_blocks* blocks);
/* The 256 values of each format are given. */
SUBULP_EXPORT int subulp_blocks_decode(const subulp_blocks* blocks, const float* values, float* to);

#ifdef __cplusplus
}
#endif

#endif
