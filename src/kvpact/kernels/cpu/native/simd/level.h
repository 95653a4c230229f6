// Opens the namespace of one instruction set. KVP_NS is set per compilation of a kernel source;
// everything that may differ between instruction sets lives in that namespace, so that the linker
// can't put one level's code in place of another's.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE inline __attribute__((always_inline))
#if defined(KVP_AVX512) || defined(KVP_AVX2)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace KVP_NS {
#if defined(KVP_AVX512)
#include "simd/avx512.h"
#elif defined(KVP_AVX2)
#include "simd/avx2.h"
#elif defined(KVP_NEON)
#include "simd/neon.h"
#else
#include "simd/base.h"
#endif

// Into the second-level cache: the first level has few places for what memory hasn't answered yet.
INLINE void prefetch(const void *p) { __builtin_prefetch(p, 0, 2); }
} // namespace KVP_NS
