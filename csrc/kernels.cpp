// Compiled once per instruction set: SUBULP_ISA_NAME and SUBULP_SIMD name it. `simd` becomes a
// namespace of its own each time, so that no build of a template serves another instruction set.
#define SUBULP_JOIN2(a, b) a##b
#define SUBULP_JOIN(a, b) SUBULP_JOIN2(a, b)
#define simd SUBULP_JOIN(simd_, SUBULP_ISA_NAME)

#include SUBULP_SIMD

#include "all_finite.h"
#include "convert.h"
#include "embedding_pool.h"
#include "embedding_update.h"
#include "fingerprint.h"
#include "int_rows.h"
#include "kernels.h"
#include "logistic.h"
#include "mixture.h"
#include "mixture_any.h"
#include "step.h"

extern "C" const subulp_kernels SUBULP_JOIN(subulp_kernels_, SUBULP_ISA_NAME) = {
    simd::run_step<simd::Adam>,
    simd::run_step<simd::Sgd>,
    simd::run_all_finite,
    simd::run_fingerprint,
    simd::run_decode,
    simd::run_encode,
    simd::run_logistic,
    simd::run_decode_rows,
    simd::run_encode_rows,
    simd::run_encode_rows_randomly,
    simd::run_embedding_pool,
    simd::run_embedding_weight_grad,
    simd::run_embedding_update,
    simd::run_mixture_encode,
    simd::run_mixture_wide,
    simd::run_mixture_decode,
    simd::run_blocks_measure,
    simd::run_blocks_errors,
    simd::run_blocks_encode,
    simd::run_blocks_decode,
};
