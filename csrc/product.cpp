// Compiled once per instruction set, like kernels.cpp but with the instructions that multiply and add: no other
// kernel may have them, so this one is in a namespace, and an object, of its own.
#define SUBULP_JOIN2(a, b) a##b
#define SUBULP_JOIN(a, b) SUBULP_JOIN2(a, b)
#define simd SUBULP_JOIN(simd_product_, SUBULP_ISA_NAME)

#include SUBULP_SIMD

#include "head.h"
#include "kernels.h"
#include "product.h"

extern "C" const subulp_products SUBULP_JOIN(subulp_products_, SUBULP_ISA_NAME) = {
    simd::run_product,
    simd::run_head,
    simd::head_scratch,
};
