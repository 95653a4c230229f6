// The rotation of transforms/hadamard.py, in the same order of operations: the same bits.
#pragma once
#include "level.h"

namespace KVP_NS {

template <int STEP> INLINE void butterflies_inside(float *x, int n) {
    if constexpr (STEP < W) {
        // Lanes with bit STEP: partner - x; the others: partner + x.
        alignas(64) float sign[W];
        for (int i = 0; i < W; i++) sign[i] = i & STEP ? -1.0f : 1.0f;
        const vf s = load(sign);
        for (int i = 0; i < n; i += W) {
            vf a = load(x + i);
            store(x + i, add(mul(a, s), swap_lanes<STEP>(a)));
        }
        butterflies_inside<2 * STEP>(x, n);
    }
}

// The orthonormal Walsh-Hadamard transform of n numbers, n a power of two.
INLINE void butterflies(float *x, int n) {
    const float norm = (float)(1.0 / sqrt((double)n));
    int step = 1;
    if (n >= W) {
        butterflies_inside<1>(x, n);
        step = W;
    }
    for (; step < n; step *= 2)
        for (int i = 0; i < n; i += 2 * step) {
            if (step >= W) {
                for (int j = i; j < i + step; j += W) {
                    vf a = load(x + j), b = load(x + j + step);
                    store(x + j, add(a, b));
                    store(x + j + step, sub(a, b));
                }
            } else {
                for (int j = i; j < i + step; j++) {
                    float a = x[j], b = x[j + step];
                    x[j] = a + b;
                    x[j + step] = a - b;
                }
            }
        }
    for (int i = 0; i < n; i++) x[i] *= norm;
}

INLINE int power_below(int dim) {
    int n = 1;
    while (2 * n <= dim) n *= 2;
    return n;
}

// `signs` has dim + n numbers, n the largest power of two up to dim.
INLINE void rotate(float *x, const float *signs, int dim) {
    const int n = power_below(dim);
    for (int i = 0; i < dim; i++) x[i] *= signs[i];
    butterflies(x, n);
    if (n == dim) return;
    float *last = x + dim - n;
    for (int i = 0; i < n; i++) last[i] *= signs[dim + i];
    butterflies(last, n);
}

INLINE void rotate_back(float *x, const float *signs, int dim) {
    const int n = power_below(dim);
    if (n != dim) {
        float *last = x + dim - n;
        butterflies(last, n);
        for (int i = 0; i < n; i++) last[i] *= signs[dim + i];
    }
    butterflies(x, n);
    for (int i = 0; i < dim; i++) x[i] *= signs[i];
}
} // namespace KVP_NS
