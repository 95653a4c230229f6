// Slots that hold a number per channel and token, [dim, 32] in a tile: fp32, fp16, bf16, fp8.
#pragma once
#include "attend/keys.h"
#include "attend/values.h"

namespace KVP_NS {

struct Float32 {
    typedef float type;
    static constexpr float factor = 1;
    static INLINE vf read(const float *p) { return load(p); }
};
struct Float16 {
    typedef uint16_t type;
    static constexpr float factor = 1;
    static INLINE vf read(const uint16_t *p) { return load_half(p); }
};
struct Bfloat16 {
    typedef uint16_t type;
    static constexpr float factor = 1;
    static INLINE vf read(const uint16_t *p) { return load_bf16(p); }
};
struct E5m2 {
    typedef uint8_t type;
    static constexpr float factor = 1;
    static INLINE vf read(const uint8_t *p) { return load_e5m2(p); }
};
struct E4m3 {
    typedef uint8_t type;
    static constexpr float factor = 256; // see load_e4m3
    static INLINE vf read(const uint8_t *p) { return load_e4m3(p); }
};

template <class Number, int RB> void raw_k_tile(const KTile &a) {
    typedef typename Number::type T;
    constexpr int TV = REGISTERS == 32 || RB < 4 ? 2 : 1;
    const T *numbers = (const T *)a.words[0];
    for (int t = 0; t < TILE; t += TV * W) {
        vf acc[TV][RB];
        for (int r = 0; r < RB; r++)
            for (int k = 0; k < TV; k++) acc[k][r] = zero();
        const T *at = numbers + t;
        const float *q = a.q;
#pragma GCC unroll 4
        for (int c = 0; c < a.dim; c++, at += TILE, q++) {
            if (t == 0) prefetch(a.ahead[0] + c * TILE * sizeof(T));
            vf x[TV];
            for (int k = 0; k < TV; k++) x[k] = Number::read(at + k * W);
            for (int r = 0; r < RB; r++) {
                vf factor = set1(q[r * a.width]);
                for (int k = 0; k < TV; k++) acc[k][r] = fma(x[k], factor, acc[k][r]);
            }
        }
        for (int k = 0; k < TV; k++) {
            vf scale = set1(Number::factor);
            if (a.scale[0]) scale = mul(scale, load_half(a.scale[0] + t + k * W));
            for (int r = 0; r < RB; r++) store(a.out + r * BLOCK + t + k * W, mul(acc[k][r], scale));
        }
    }
}

// Tokens stand side by side here, so the sums go across the vectors: several channels at a time.
template <class Number, int RB> void raw_v_run(const VRun &a) {
    typedef typename Number::type T;
    constexpr int C = REGISTERS == 32 || RB < 4 ? 4 : 2;
    for (int c = 0; c < a.dim; c += C) {
        vf acc[C * RB];
        for (int i = 0; i < C * RB; i++) acc[i] = zero();
        for (int tile = 0; tile < a.tiles; tile++) {
            const T *numbers = (const T *)a.words[tile];
            const T *at[C];
            for (int i = 0; i < C; i++) {
                at[i] = numbers + (c + i < a.dim ? c + i : a.dim - 1) * TILE;
                prefetch(a.ahead[tile] + (at[i] - numbers) * sizeof(T));
            }
            for (int t = 0; t < TILE; t += W) {
                vf w[RB];
                for (int r = 0; r < RB; r++) w[r] = load(a.weights + r * BLOCK + tile * TILE + t);
                for (int i = 0; i < C; i++) {
                    const vf x = Number::read(at[i] + t);
                    for (int r = 0; r < RB; r++) acc[r * C + i] = fma(x, w[r], acc[r * C + i]);
                }
            }
        }
        alignas(64) float sums[C * RB];
        for (int i = 0; i < C * RB; i += 4) sum4(sums + i, acc[i], acc[i + 1], acc[i + 2], acc[i + 3]);
        for (int r = 0; r < RB; r++)
            for (int i = 0; i < C && c + i < a.dim; i++)
                a.acc[r * a.stride + c + i] += Number::factor * sums[r * C + i];
    }
}

template <class Number> struct RawFunctions {
    static constexpr bool wide = false;
    static void (*pair(int))(const KTile &) { return nullptr; }
    static void (*k(int rows))(const KTile &) { return rows == 1 ? raw_k_tile<Number, 1> : raw_k_tile<Number, 4>; }
    static void (*v(int rows))(const VRun &) { return rows == 1 ? raw_v_run<Number, 1> : raw_v_run<Number, 4>; }
};
} // namespace KVP_NS
