// The same loops in 8-bit integers (VPDPBUSD), for kernel="fast": q and the levels as 8 bits, the
// weights of V as two digits of 8 bits. For codes of 2, 4 and 8 bits without zero points.
#pragma once
#include "keys.h"
#include "values.h"

namespace KVP_NS {

// Byte j of a word shifted by k * BITS holds item j * N + k, N = 8 / BITS. This is where the bytes
// of 16 items in order have to go, so that one dword meets one shifted word.
template <int BITS> INLINE __m128i in_word_order(__m128i x) {
    if constexpr (BITS == 8) return x;
    else if constexpr (BITS == 4)
        return _mm_shuffle_epi8(x, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    else
        return _mm_shuffle_epi8(x, _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
}

// Levels as bytes, and what one step of them is worth.
struct ByteLevels {
    alignas(16) int8_t level[16];
    float step;
    ByteLevels(const kvp_stream &x) : level(), step(1) {
        if (x.bits == 8) return;
        float most = 0;
        bool whole = true;
        for (int i = 0; i < 16; i++) {
            most = fmaxf(most, fabsf(x.table[i]));
            whole = whole && x.table[i] == rintf(x.table[i]);
        }
        if (!whole) step = most / 127;
        for (int i = 0; i < 16; i++) level[i] = (int8_t)rintf(x.table[i] / step);
    }
    INLINE vi vector(int offset) const {
        __m128i all = _mm_add_epi8(_mm_load_si128((const __m128i *)level), _mm_set1_epi8((char)offset));
        return _mm512_broadcast_i32x4(all);
    }
};

static bool fast_format(const kvp_stream &x) {
    if (x.zero.base || x.fold.base || x.shift.base) return false;
    if (x.kind == KVP_TABLE) return x.bits == 2 || x.bits == 4;
    return x.kind == KVP_LINEAR && x.bits == 8;
}

struct FastKeys {
    vi table;                           // levels + 128, unsigned
    int8_t q[MAX_ROWS][1024];           // in word order
    float sum[MAX_ROWS][32];            // 128 times the sums of q, by channel group
    float step[MAX_ROWS];
};

template <int BITS> static void make_fast_keys(FastKeys &f, const kvp_stream &k, const float *q, int64_t width, int rows) {
    const ByteLevels levels(k);
    f.table = levels.vector(-128);
    const int groups = (k.dim + k.channels - 1) / k.channels;
    for (int r = 0; r < rows; r++) {
        vf most = zero();
        for (int64_t c = 0; c < width; c += W) most = max(most, _mm512_abs_ps(load(q + r * width + c)));
        const float high = highest(most), scale = high > 0 ? high / 127 : 1;
        f.step[r] = scale * levels.step;
        for (int g = 0; g < groups; g++) f.sum[r][g] = 0;
        for (int64_t c = 0; c < width; c += W) {
            vi x = _mm512_cvtps_epi32(mul(load(q + r * width + c), set1(1 / scale)));
            const int g = c / k.channels;
            if (g < groups) f.sum[r][g] += 128.0f * (float)_mm512_reduce_add_epi32(x);
            _mm_storeu_si128((__m128i *)(f.q[r] + c), in_word_order<BITS>(_mm512_cvtepi32_epi8(x)));
        }
    }
}

template <int BITS, int RB> void fast_k_tile(const KTile &a, const FastKeys &f) {
    constexpr int N = 8 / BITS;
    const int words = (a.dim * BITS + 31) / 32, groups = (a.dim + a.channels - 1) / a.channels;
    const vi mask = _mm512_set1_epi8((char)((1 << BITS) - 1));
    const uint32_t *low = a.words[0], *high = low + words * 16;
    vf total[2][RB];
    for (int r = 0; r < RB; r++) total[0][r] = total[1][r] = zero();
    int i = 0;
    for (int g = 0; g < groups; g++) {
        const int end = g == groups - 1 ? words : (g + 1) * (a.channels / 32) * BITS;
        vi acc[2][RB];
        for (int r = 0; r < RB; r++) acc[0][r] = acc[1][r] = _mm512_setzero_si512();
        for (; i < end; i++) {
            vi w[2] = {load_words(low + i * 16), load_words(high + i * 16)};
            prefetch(a.ahead[0] + i * 64);
            prefetch(a.ahead[0] + (words + i) * 64);
            for (int n = 0; n < N; n++) {
                vi x[2];
                for (int k = 0; k < 2; k++) {
                    if constexpr (BITS == 8) x[k] = w[k];
                    else x[k] = _mm512_shuffle_epi8(f.table, _mm512_and_si512(_mm512_srli_epi32(w[k], n * BITS), mask));
                }
                for (int r = 0; r < RB; r++) {
                    int32_t q;
                    memcpy(&q, f.q[r] + (i * N + n) * 4, 4);
                    const vi factor = _mm512_set1_epi32(q);
                    for (int k = 0; k < 2; k++) acc[k][r] = _mm512_dpbusd_epi32(acc[k][r], x[k], factor);
                }
            }
        }
        for (int k = 0; k < 2; k++) {
            const vf scale = a.scale[0] ? load_half(a.scale[0] + g * 32 + k * W) : set1(1.0f);
            for (int r = 0; r < RB; r++)
                total[k][r] = fma(sub(to_float(acc[k][r]), set1(f.sum[r][g])), scale, total[k][r]);
        }
    }
    for (int r = 0; r < RB; r++)
        for (int k = 0; k < 2; k++) store(a.out + r * BLOCK + k * W, mul(total[k][r], set1(f.step[r])));
}

struct FastValues {
    vi table; // levels + 128, unsigned
    float step;
    // Two signed digits of each weight, weight = 256 * high + low, in word order.
    alignas(64) int8_t high[32][MAX_ROWS][BLOCK], low[32][MAX_ROWS][BLOCK];
    int32_t high_sum[32][MAX_ROWS], low_sum[32][MAX_ROWS]; // 128 times the sums of the digits
    float scale[32][MAX_ROWS];
};

template <int BITS> static void make_digits(FastValues &f, const VRun &a, int rows) {
    const int groups = (a.dim + a.channels - 1) / a.channels, tokens = a.tiles * TILE;
    constexpr float MOST = 32639; // the greatest number of two balanced digits
    for (int g = 0; g < groups; g++)
        for (int r = 0; r < rows; r++) {
            const float *weight = a.weights + (g * MAX_ROWS + r) * BLOCK;
            vf most = zero();
            for (int t = 0; t < tokens; t += W) most = max(most, _mm512_abs_ps(load(weight + t)));
            const float range = highest(most);
            const vf unit = set1(range > 0 ? MOST / range : 0);
            f.scale[g][r] = range / MOST * f.step;
            vi highs = _mm512_setzero_si512(), lows = highs;
            for (int t = 0; t < tokens; t += W) {
                const vi x = _mm512_cvtps_epi32(mul(load(weight + t), unit));
                const vi high = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
                const vi low = _mm512_sub_epi32(x, shl<8>(high));
                highs = _mm512_add_epi32(highs, high);
                lows = _mm512_add_epi32(lows, low);
                _mm_storeu_si128((__m128i *)(f.high[g][r] + t), in_word_order<BITS>(_mm512_cvtepi32_epi8(high)));
                _mm_storeu_si128((__m128i *)(f.low[g][r] + t), in_word_order<BITS>(_mm512_cvtepi32_epi8(low)));
            }
            f.high_sum[g][r] = 128 * _mm512_reduce_add_epi32(highs);
            f.low_sum[g][r] = 128 * _mm512_reduce_add_epi32(lows);
        }
}

template <int BITS, int RB, int CV> INLINE void fast_v_channels(const VRun &a, const FastValues &f, int c, __mmask16 part) {
    constexpr int N = 8 / BITS;
    const int g = c / a.channels;
    const vi mask = _mm512_set1_epi8((char)((1 << BITS) - 1));
    vi high[CV][RB], low[CV][RB];
    for (int r = 0; r < RB; r++)
        for (int k = 0; k < CV; k++) high[k][r] = low[k][r] = _mm512_setzero_si512();
    for (int tile = 0; tile < a.tiles; tile++)
        for (int i = 0; i < BITS; i++) {
            const uint32_t *words = a.words[tile] + i * a.dim + c;
            vi w[CV];
            for (int k = 0; k < CV; k++) {
                w[k] = _mm512_maskz_loadu_epi32(k == CV - 1 ? part : (__mmask16)0xffff, words + k * W);
                prefetch(a.ahead[tile] + (i * a.dim + c + k * W) * 4);
            }
            for (int n = 0; n < N; n++) {
                vi x[CV];
                for (int k = 0; k < CV; k++) {
                    if constexpr (BITS == 8) x[k] = w[k];
                    else x[k] = _mm512_shuffle_epi8(f.table, _mm512_and_si512(_mm512_srli_epi32(w[k], n * BITS), mask));
                }
                const int at = tile * TILE + (i * N + n) * 4;
                for (int r = 0; r < RB; r++) {
                    int32_t h, l;
                    memcpy(&h, f.high[g][r] + at, 4);
                    memcpy(&l, f.low[g][r] + at, 4);
                    for (int k = 0; k < CV; k++) {
                        high[k][r] = _mm512_dpbusd_epi32(high[k][r], x[k], _mm512_set1_epi32(h));
                        low[k][r] = _mm512_dpbusd_epi32(low[k][r], x[k], _mm512_set1_epi32(l));
                    }
                }
            }
        }
    for (int r = 0; r < RB; r++)
        for (int k = 0; k < CV; k++) {
            float *to = a.acc + r * a.stride + c + k * W;
            const vi h = _mm512_sub_epi32(high[k][r], _mm512_set1_epi32(f.high_sum[g][r]));
            const vi l = _mm512_sub_epi32(low[k][r], _mm512_set1_epi32(f.low_sum[g][r]));
            const vf sum = fma(to_float(h), set1(256.0f), to_float(l));
            store(to, fma(sum, set1(f.scale[g][r]), load(to)));
        }
}

template <int BITS, int RB> void fast_v_run(const VRun &a, const FastValues &f) {
    constexpr int CV = RB <= 4 ? 2 : 1;
    int c = 0;
    for (; c + CV * W <= a.dim; c += CV * W) fast_v_channels<BITS, RB, CV>(a, f, c, 0xffff);
    for (; c + W <= a.dim; c += W) fast_v_channels<BITS, RB, 1>(a, f, c, 0xffff);
    if (c < a.dim) fast_v_channels<BITS, RB, 1>(a, f, c, first(a.dim - c));
}

template <int BITS> struct FastFunctions {
    static constexpr int bits = BITS;
    typedef void (*K)(const KTile &, const FastKeys &);
    typedef void (*V)(const VRun &, const FastValues &);
    static K k(int rows) {
        return rows == 1 ? fast_k_tile<BITS, 1> : rows == 2 ? fast_k_tile<BITS, 2> : rows == 3 ? fast_k_tile<BITS, 3>
             : rows == 4 ? fast_k_tile<BITS, 4> : fast_k_tile<BITS, 8>;
    }
    static V v(int rows) {
        return rows == 1 ? fast_v_run<BITS, 1> : rows == 2 ? fast_v_run<BITS, 2> : rows == 3 ? fast_v_run<BITS, 3>
             : rows == 4 ? fast_v_run<BITS, 4> : fast_v_run<BITS, 8>;
    }
};

template <class F> static auto by_fast_bits(int bits, F &&pick) {
    if (bits == 2) return pick(FastFunctions<2>());
    if (bits == 4) return pick(FastFunctions<4>());
    return pick(FastFunctions<8>());
}
} // namespace KVP_NS
