// W vectors side by side: lane = vector. What is done to a vector is then done to W at a time, in
// the order of operations in which the torch bodies do it, and without any horizontal step.
#pragma once
#include <utility>

#include "simd/rotate.h"
#include "sizes.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace KVP_NS {

typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint8_t Bytes __attribute__((vector_size(W)));

INLINE vf pick_lanes(Ints mask, vf a, vf b) { return mask ? a : b; }
INLINE Ints truncated(vf x) { return __builtin_convertvector(x, Ints); }
INLINE vf floats(Ints x) { return __builtin_convertvector(x, vf); }
INLINE vf magnitude(vf x) { return (vf)((Ints)x & 0x7fffffff); }
INLINE vf square_root(vf x) {
#if defined(KVP_AVX512)
    return _mm512_sqrt_ps(x);
#elif defined(KVP_AVX2)
    return _mm256_sqrt_ps(x);
#else
    for (int i = 0; i < W; i++) x[i] = sqrtf(x[i]);
    return x;
#endif
}
// The lesser of a and b; b where they are equal.
INLINE vf least(vf a, vf b) {
#if defined(KVP_AVX512)
    return _mm512_min_ps(a, b);
#elif defined(KVP_AVX2)
    return _mm256_min_ps(a, b);
#elif defined(KVP_NEON)
    return (vf)vminq_f32((float32x4_t)a, (float32x4_t)b);
#elif defined(__SSE2__)
    return (vf)_mm_min_ps((__m128)a, (__m128)b);
#else
    return a < b ? a : b;
#endif
}
// The next whole number that is not less.
INLINE Ints ceiling(vf x) {
#if defined(KVP_AVX512)
    return (Ints)_mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
#elif defined(KVP_AVX2)
    return (Ints)_mm256_cvttps_epi32(_mm256_ceil_ps(x));
#elif defined(KVP_NEON)
    return (Ints)vcvtpq_s32_f32((float32x4_t)x);
#else
    const Ints whole = truncated(x);
    return whole - (Ints)(floats(whole) < x);
#endif
}
INLINE Ints gather(const uint32_t *table, Ints index) {
#if defined(KVP_AVX512)
    return (Ints)_mm512_i32gather_epi32((__m512i)index, table, 4);
#elif defined(KVP_AVX2)
    return (Ints)_mm256_i32gather_epi32((const int *)table, (__m256i)index, 4);
#else
    return Ints{(int32_t)table[index[0]], (int32_t)table[index[1]], (int32_t)table[index[2]], (int32_t)table[index[3]]};
#endif
}
// Codes <-> bytes. Compilers make a scalar loop of the general conversion.
INLINE void store_codes(uint8_t *p, Ints codes) {
#if defined(KVP_AVX512)
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)codes));
#elif defined(KVP_AVX2)
    const __m128i low = _mm256_castsi256_si128((__m256i)codes), high = _mm256_extracti128_si256((__m256i)codes, 1);
    const __m128i pairs = _mm_packus_epi32(low, high);
    _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(pairs, pairs));
#elif defined(KVP_NEON)
    const uint16x4_t pairs = vmovn_u32((uint32x4_t)codes);
    vst1_lane_u32((uint32_t *)p, vreinterpret_u32_u8(vmovn_u16(vcombine_u16(pairs, pairs))), 0);
#elif defined(__SSE2__)
    const __m128i pairs = _mm_packs_epi32((__m128i)codes, (__m128i)codes);
    const int bytes = _mm_cvtsi128_si32(_mm_packus_epi16(pairs, pairs));
    memcpy(p, &bytes, 4);
#else
    Bytes b = __builtin_convertvector(codes, Bytes);
    memcpy(p, &b, W);
#endif
}
INLINE Ints load_codes(const uint8_t *p) {
#if defined(KVP_AVX512)
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(KVP_AVX2)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#elif defined(KVP_NEON)
    return (Ints)vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(p))));
#elif defined(__SSE2__)
    int bytes;
    memcpy(&bytes, p, 4);
    const __m128i none = _mm_setzero_si128(), x = _mm_unpacklo_epi8(_mm_cvtsi32_si128(bytes), none);
    return (Ints)_mm_unpacklo_epi16(x, none);
#else
    Bytes b;
    memcpy(&b, p, W);
    return __builtin_convertvector(b, Ints);
#endif
}
// To the nearest, ties to even, for -1 <= x <= 256.
INLINE vf rounded(vf x) {
    const vf big = set1(12582912.0f);
    return (x + big) - big;
}

// Rounds to fp16, ties to even.
INLINE uint16_t to_half(float x) {
#if defined(KVP_AVX2) || defined(KVP_AVX512)
    return (uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(KVP_NEON)
    const __fp16 half = (__fp16)x;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
#else
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits >= 0x7f800000) return (uint16_t)(sign | (bits > 0x7f800000 ? 0x7e00 : 0x7c00));
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) { // below 2**-14: 0.5 has the weight 2**-24 in its last place
        float y;
        memcpy(&y, &bits, 4);
        y += 0.5f;
        memcpy(&bits, &y, 4);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    bits += 0xc8000fff + (bits >> 13 & 1);
    return (uint16_t)(sign | bits >> 13);
#endif
}
INLINE float from_half(uint16_t h) {
#if defined(KVP_AVX2) || defined(KVP_AVX512)
    return _cvtsh_ss(h);
#elif defined(KVP_NEON)
    __fp16 half;
    memcpy(&half, &h, 2);
    return (float)half;
#else
    return half_to_float(h);
#endif
}
// Stores W numbers as fp16 and returns what was stored.
INLINE vf store_halves(uint16_t *p, vf x) {
#if defined(KVP_AVX512)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    return load_half(p);
#elif defined(KVP_AVX2)
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    return load_half(p);
#else
    for (int i = 0; i < W; i++) {
        p[i] = to_half(x[i]);
        x[i] = from_half(p[i]);
    }
    return x;
#endif
}

// Of rows a and b, lanes 0, STEP apart: what a transposition by halves exchanges.
template <int STEP, bool HIGH, size_t... I> INLINE vf mixed(vf a, vf b, std::index_sequence<I...>) {
    return __builtin_shufflevector(a, b, ((I & STEP) ? W + (I ^ STEP) + (HIGH ? STEP : 0) : I + (HIGH ? STEP : 0))...);
}
template <int STEP = 1> INLINE void transpose(vf *r) {
    if constexpr (STEP < W) {
        constexpr auto lanes = std::make_index_sequence<W>();
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) {
            if (i & STEP) continue;
            const vf a = r[i], b = r[i + STEP];
            r[i] = mixed<STEP, false>(a, b, lanes);
            r[i + STEP] = mixed<STEP, true>(a, b, lanes);
        }
        transpose<2 * STEP>(r);
    }
}

INLINE vf load_numbers(const char *p, int dtype) {
    if (dtype == KVP_F32) return load((const float *)p);
    return dtype == KVP_F16 ? load_half((const uint16_t *)p) : load_bf16((const uint16_t *)p);
}

// Rounds, ties to even; what is beyond fp16 becomes its largest number.
INLINE void store_numbers(char *p, vf x, int dtype) {
    if (dtype == KVP_F32) return store((float *)p, x);
    uint16_t *to = (uint16_t *)p;
    if (dtype == KVP_F16) {
        const vf most = set1(65504);
        x = pick_lanes((Ints)(x > most), most, x);
        x = pick_lanes((Ints)(x < -most), -most, x);
#if defined(KVP_AVX512)
        _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(KVP_AVX2)
        _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
        for (int i = 0; i < W; i++) to[i] = to_half(x[i]);
#endif
        return;
    }
    const Ints bits = (Ints)x, rounded = bits + (0x7fff + (bits >> 16 & 1));
    const Ints whole = ((Ints)(x != x) ? Ints{} + 0x7fc00000 : rounded) >> 16;
    for (int i = 0; i < W; i++) to[i] = (uint16_t)whole[i];
}

// y[channel][lane], each channel times its sign -> vectors. No pointer: no vector.
INLINE void store_lanes(char *const *rows, const float *y, int dim, int dtype, const float *signs) {
    const int size = dtype == KVP_F32 ? 4 : 2;
    for (int c = 0; c < dim; c += W) {
        vf r[W];
        const int count = dim - c < W ? dim - c : W;
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) {
            if (i >= count) r[i] = zero();
            else r[i] = signs ? load(y + (c + i) * W) * set1(signs[c + i]) : load(y + (c + i) * W);
        }
        transpose(r);
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) {
            if (!rows[i]) continue;
            if (count == W) {
                store_numbers(rows[i] + (int64_t)c * size, r[i], dtype);
            } else {
                char part[4 * W];
                store_numbers(part, r[i], dtype);
                memcpy(rows[i] + (int64_t)c * size, part, (size_t)(count * size));
            }
        }
    }
}

// 2 * W channels of bf16, from c on: pairs of channels change places, and are widened then.
INLINE void load_pairs(float *y, const char *const *rows, int c, const float *signs) {
    vf r[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) r[i] = rows[i] ? load((const float *)(rows[i] + (int64_t)c * 2)) : zero();
    transpose(r);
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) {
        const int at = c + 2 * i;
        const vf even = (vf)((Ints)r[i] << 16), odd = (vf)((Ints)r[i] & (int32_t)0xffff0000);
        store(y + at * W, signs ? even * set1(signs[at]) : even);
        store(y + (at + 1) * W, signs ? odd * set1(signs[at + 1]) : odd);
    }
}
// Vectors -> y[channel][lane], each channel times its sign. No pointer: zeros.
INLINE void load_lanes(float *y, const char *const *rows, int dim, int dtype, const float *signs) {
    const int size = dtype == KVP_F32 ? 4 : 2;
    int c = 0;
    if (dtype == KVP_BF16)
        for (; c + 2 * W <= dim; c += 2 * W) load_pairs(y, rows, c, signs);
    for (; c < dim; c += W) {
        vf r[W];
        const int count = dim - c < W ? dim - c : W;
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) {
            if (!rows[i]) {
                r[i] = zero();
            } else if (count == W) {
                r[i] = load_numbers(rows[i] + (int64_t)c * size, dtype);
            } else {
                char part[4 * W] = {};
                memcpy(part, rows[i] + (int64_t)c * size, (size_t)(count * size));
                r[i] = load_numbers(part, dtype);
            }
        }
        transpose(r);
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) {
            if (i >= count) break;
            store(y + (c + i) * W, signs ? r[i] * set1(signs[c + i]) : r[i]);
        }
    }
}

// log2(R) stages of butterflies, those of distance `step` first.
template <int R> INLINE void stages(float *y, int n, int step, float factor) {
    const vf f = set1(factor);
    for (int i = 0; i < n; i += R * step)
        for (int j = i; j < i + step; j++) {
            vf r[R];
#pragma GCC unroll 16
            for (int k = 0; k < R; k++) r[k] = load(y + (j + k * step) * W);
#pragma GCC unroll 4
            for (int s = 1; s < R; s *= 2)
#pragma GCC unroll 16
                for (int k = 0; k < R; k++) {
                    if (k & s) continue;
                    const vf a = r[k], b = r[k + s];
                    r[k] = a + b;
                    r[k + s] = a - b;
                }
#pragma GCC unroll 16
            for (int k = 0; k < R; k++) store(y + (j + k * step) * W, factor == 1 ? r[k] : r[k] * f);
        }
}
INLINE void hadamard_lanes(float *y, int n) {
    const float norm = (float)(1.0 / sqrt((double)n));
    if (n == 1) return;
    constexpr int R = REGISTERS >= 32 ? 16 : 8;
    int step = 1;
    for (; step * R < n; step *= R) stages<R>(y, n, step, 1);
    switch (n / step) {
    case 2: stages<2>(y, n, step, norm); break;
    case 4: stages<4>(y, n, step, norm); break;
    case 8: stages<8>(y, n, step, norm); break;
    default: stages<R>(y, n, step, norm);
    }
}
// transforms/hadamard.py; the first signs have been multiplied already.
INLINE void rotate_lanes(float *y, const float *signs, int dim) {
    const int n = power_below(dim);
    hadamard_lanes(y, n);
    if (n == dim) return;
    float *last = y + (dim - n) * W;
    for (int i = 0; i < n; i++) store(last + i * W, load(last + i * W) * set1(signs[dim + i]));
    hadamard_lanes(last, n);
}
INLINE void rotate_lanes(float *to, const float *y, const float *signs, int dim) {
    for (int c = 0; c < dim; c++) store(to + c * W, load(y + c * W) * set1(signs[c]));
    rotate_lanes(to, signs, dim);
}
// The first signs are still to be multiplied.
INLINE void rotate_lanes_back(float *y, const float *signs, int dim) {
    const int n = power_below(dim);
    float *last = y + (dim - n) * W;
    if (n != dim) {
        hadamard_lanes(last, n);
        for (int i = 0; i < n; i++) store(last + i * W, load(last + i * W) * set1(signs[dim + i]));
    }
    hadamard_lanes(y, n);
}

// Sums in the order of tree_sum (arithmetic.py): the upper half on the lower one, again and again.
INLINE vf tree(float *s, int size) {
    if (size == 8) { // without a detour through memory
        vf x[8];
        for (int i = 0; i < 8; i++) x[i] = load(s + i * W);
        return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
    }
    while (size > 1) {
        const int half = size / 2;
        for (int i = 0; i < half; i++) store(s + i * W, load(s + i * W) + load(s + (half + i) * W));
        if (size % 2) store(s + half * W, load(s + (size - 1) * W));
        size = half + size % 2;
    }
    return load(s);
}
// The first three rounds of it at once: leaf(channel) is called once for each channel.
template <int N, class Leaf> INLINE void leaves(float (*sums)[MOST_DIM * W], int dim, Leaf &&leaf) {
    if (dim % 8) {
        for (int c = 0; c < dim; c++) {
            vf x[N];
            leaf(c, x);
            for (int n = 0; n < N; n++) store(sums[n] + c * W, x[n]);
        }
        return;
    }
    const int m = dim / 8;
    for (int i = 0; i < m; i++) {
        vf x[8][N];
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) leaf(i + k * m, x[k]);
        for (int n = 0; n < N; n++)
            store(sums[n] + i * W, ((x[0][n] + x[4][n]) + (x[2][n] + x[6][n])) +
                                       ((x[1][n] + x[5][n]) + (x[3][n] + x[7][n])));
    }
}
// Sums over the tokens of `blocks` times W vectors, in the same order: of leaf(block, channel, k), for W
// channels from `first` on, k counting them; those beyond the last one are the last one.
template <class Leaf> INLINE vf over_tokens(int first, int dim, int blocks, Leaf &&leaf) {
    vf r[W];
    for (int k = 0; k < W; k++) {
        vf part[MOST_GROUP / W];
        const int c = first + k < dim ? first + k : dim - 1;
        for (int b = 0; b < blocks; b++) part[b] = leaf(b, c, k);
        for (int n = blocks / 2; n; n /= 2)
            for (int b = 0; b < n; b++) part[b] = part[b] + part[b + n];
        r[k] = part[0];
    }
    transpose(r);
#pragma GCC unroll 4
    for (int n = W / 2; n; n /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) r[i] = r[i] + r[i + n];
    return r[0];
}
INLINE int after_leaves(int dim) { return dim % 8 ? dim : dim / 8; }
} // namespace KVP_NS
