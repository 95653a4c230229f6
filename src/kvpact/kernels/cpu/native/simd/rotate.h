// The rotation of transforms/hadamard.py, in the same order of operations: the same bits.
#pragma once
#include "simd/level.h"

namespace KVP_NS {

// Stages of distance STEP and more inside of each of V registers: lanes with bit STEP hold
// partner - x, the others partner + x.
template <int STEP, int V> INLINE void butterflies_inside(vf (&x)[V]) {
    if constexpr (STEP < W) {
        alignas(64) float sign[W];
        for (int i = 0; i < W; i++) sign[i] = i & STEP ? -1.0f : 1.0f;
        const vf s = load(sign);
        for (int i = 0; i < V; i++) x[i] = add(mul(x[i], s), swap_lanes<STEP>(x[i]));
        butterflies_inside<2 * STEP>(x);
    }
}

// The stages of V registers that lie one after the other.
template <int V> INLINE void butterflies_of(float *at) {
    vf x[V];
    for (int i = 0; i < V; i++) x[i] = load(at + i * W);
    butterflies_inside<1>(x);
    for (int step = 1; step < V; step *= 2)
        for (int i = 0; i < V; i++) {
            if (i & step) continue;
            const vf a = x[i], b = x[i + step];
            x[i] = add(a, b);
            x[i + step] = sub(a, b);
        }
    for (int i = 0; i < V; i++) store(at + i * W, x[i]);
}

// The orthonormal Walsh-Hadamard transform of n numbers, n a power of two.
static void butterflies(float *x, int n) {
    constexpr int V = 8;
    int step = 1;
    if (n >= V * W) {
        for (int i = 0; i < n; i += V * W) butterflies_of<V>(x + i);
        step = V * W;
    } else if (n >= W) {
        for (int i = 0; i < n; i += W) butterflies_of<1>(x + i);
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
    const float norm = (float)(1.0 / sqrt((double)n));
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
