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

// acc += products of four bytes each. In assembly, or GCC moves the sums to and fro.
INLINE void add_products(vi &acc, vi bytes, vi factors) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(bytes), "v"(factors));
}
INLINE vi four_bytes(const int8_t *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return _mm512_set1_epi32(x);
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
    int32_t sum[MAX_ROWS][32];          // 128 times the sums of q, by channel group
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
            if (g < groups) f.sum[r][g] += 128 * _mm512_reduce_add_epi32(x);
            _mm_storeu_si128((__m128i *)(f.q[r] + c), in_word_order<BITS>(_mm512_cvtepi32_epi8(x)));
        }
    }
}

template <int BITS, int RB, int TILES = 1, bool ONE = TILES == 2> void fast_k_tile(const KTile &a, const FastKeys &f) {
    constexpr int N = 8 / BITS, TV = 2 * TILES;
    const int words = (a.dim * BITS + 31) / 32, groups = groups_in<ONE>(a);
    const vi mask = _mm512_set1_epi8((char)((1 << BITS) - 1));
    const uint32_t *at[TV];
    for (int k = 0; k < TV; k++) at[k] = a.words[k / 2] + k % 2 * words * 16;
    vf total[TV][RB];
    for (int r = 0; r < RB; r++)
        for (int k = 0; k < TV; k++) total[k][r] = zero();
    int i = 0;
    for (int g = 0; g < groups; g++) {
        const int end = g == groups - 1 ? words : (g + 1) * (a.channels / 32) * BITS;
        vi acc[TV][RB];
        for (int r = 0; r < RB; r++)
            for (int k = 0; k < TV; k++) acc[k][r] = _mm512_set1_epi32(-f.sum[r][g]);
        for (; i < end; i++) {
            vi w[TV];
            // Memory is asked for in its order.
            const char *ahead = TILES == 1 || i < words / 2 ? a.ahead[0] + i * TV * 64 : a.ahead[TILES - 1] + (i - words / 2) * TV * 64;
            for (int k = 0; k < TV; k++) {
                w[k] = load_words(at[k] + i * 16);
                prefetch(ahead + k * 64);
            }
            for (int n = 0; n < N; n++) {
                vi x[TV];
                for (int k = 0; k < TV; k++) {
                    if constexpr (BITS == 8) x[k] = w[k];
                    else x[k] = _mm512_shuffle_epi8(f.table, _mm512_and_si512(_mm512_srli_epi32(w[k], n * BITS), mask));
                }
                for (int r = 0; r < RB; r++) {
                    const vi factor = four_bytes(f.q[r] + (i * N + n) * 4);
                    for (int k = 0; k < TV; k++) add_products(acc[k][r], x[k], factor);
                }
            }
        }
        for (int k = 0; k < TV; k++) {
            const vf scale = a.scale[0] ? load_half(a.scale[k / 2] + g * 32 + k % 2 * W) : set1(1.0f);
            for (int r = 0; r < RB; r++) total[k][r] = fma(to_float(acc[k][r]), scale, total[k][r]);
        }
    }
    for (int r = 0; r < RB; r++)
        for (int k = 0; k < TV; k++) store(a.out + r * BLOCK + k * W, mul(total[k][r], set1(f.step[r])));
}

struct FastValues {
    vi table; // levels + 128, unsigned
    float step;
    // Two signed digits of each weight, weight = 256 * high + low, in word order; and what the sums
    // of their products with bytes begin at, since these are 128 too large.
    alignas(64) int8_t high[32][MAX_ROWS][BLOCK], low[32][MAX_ROWS][BLOCK];
    int32_t high_start[32][MAX_ROWS], low_start[32][MAX_ROWS];
    float scale[32][MAX_ROWS];
};

constexpr float MOST_DIGITS = 32639; // the greatest number of two balanced digits

// Writes the digits of a row's weights, 32 at a time, and adds the weights up.
template <int BITS> struct Digits {
    int8_t *high, *low;
    vi total = _mm512_setzero_si512();
    INLINE Digits(FastValues &f, int g, int r) : high(f.high[g][r]), low(f.low[g][r]) {}
    static INLINE void write(int8_t *to, __m256i x) {
        _mm_storeu_si128((__m128i *)to, in_word_order<BITS>(_mm256_castsi256_si128(x)));
        _mm_storeu_si128((__m128i *)(to + 16), in_word_order<BITS>(_mm256_extracti128_si256(x, 1)));
    }
    INLINE void put(int t, vf a, vf b) {
        const vi x = _mm512_cvtps_epi32(a), y = _mm512_cvtps_epi32(b);
        total = _mm512_add_epi32(total, _mm512_add_epi32(x, y));
        const vi all = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(x)), _mm512_cvtepi32_epi16(y), 1);
        const vi highs = _mm512_srai_epi16(_mm512_add_epi16(all, _mm512_set1_epi16(128)), 8);
        write(high + t, _mm512_cvtepi16_epi8(highs));
        write(low + t, _mm512_cvtepi16_epi8(all)); // the low byte, read as signed, is the rest
    }
    INLINE void end(FastValues &f, int g, int r, float range) const {
        const int32_t sum = _mm512_reduce_add_epi32(total);
        f.scale[g][r] = range / MOST_DIGITS * f.step;
        f.high_start[g][r] = -(sum >> 1);
        f.low_start[g][r] = -128 * (sum & 1);
    }
};

// The digits of weights that stand in memory.
template <int BITS> static void make_digits(FastValues &f, const VRun &a, int rows) {
    const int groups = (a.dim + a.channels - 1) / a.channels, tokens = a.tiles * TILE;
    for (int g = 0; g < groups; g++)
        for (int r = 0; r < rows; r++) {
            const float *weight = a.weights + (g * MAX_ROWS + r) * BLOCK;
            vf most = zero();
            for (int t = 0; t < tokens; t += W) most = max(most, _mm512_abs_ps(load(weight + t)));
            const float range = highest(most);
            const vf unit = set1(range > 0 ? MOST_DIGITS / range : 0);
            Digits<BITS> digits(f, g, r);
            for (int t = 0; t < tokens; t += TILE) digits.put(t, mul(load(weight + t), unit), mul(load(weight + t + W), unit));
            digits.end(f, g, r, range);
        }
}

// V's scales of a block as fp32, the greatest of a group of channels made MOST_DIGITS.
struct BlockScales {
    float *scale; // [groups][BLOCK]
    float range[32];
    BlockScales(float *memory, const uint16_t *const *halves, int groups, int tokens) : scale(memory) {
        for (int g = 0; g < groups; g++) {
            float *to = scale + g * BLOCK;
            vf most = zero();
            for (int t = 0; t < tokens; t += W) {
                const vf x = halves[0] ? load_half(halves[t / TILE] + g * TILE + t % TILE) : set1(1.0f);
                most = max(most, _mm512_abs_ps(x));
                store(to + t, x);
            }
            range[g] = highest(most);
            const vf unit = set1(range[g] > 0 ? MOST_DIGITS / range[g] : 0);
            for (int t = 0; t < tokens; t += W) store(to + t, mul(load(to + t), unit));
        }
    }
};

// exp(x - top) of 16 scores, to some 1e-5, which is far less than 8 bits lose.
INLINE vf weights_of(const float *score, vf minus_top) {
    const vf x = max(fma(load(score), set1(LOG2E), minus_top), set1(-150.0f));
    const vf whole = _mm512_roundscale_ps(x, 8), f = sub(x, whole);
    vf y = set1(9.6181291e-3f);
    y = fma(y, f, set1(5.5504109e-2f));
    y = fma(y, f, set1(2.4022651e-1f));
    y = fma(y, f, set1(6.9314718e-1f));
    y = fma(y, f, set1(1.0f));
    return _mm512_scalef_ps(y, whole);
}

// The digits of a row from its scores, of which `top` is the highest; weights are exp(score - top)
// here and `decay` times that in the sums. Returns the sum of the weights.
template <int BITS>
static float weigh_digits(FastValues &f, int groups, int r, float *score, float top, float decay, const BlockScales &scales, int tokens) {
    const vf minus_top = set1(-top * LOG2E);
    vf total = zero();
    Digits<BITS> digits(f, 0, r);
    for (int t = 0; t < tokens; t += TILE) {
        const vf a = weights_of(score + t, minus_top), b = weights_of(score + t + W, minus_top);
        total = add(total, add(a, b));
        digits.put(t, mul(a, load(scales.scale + t)), mul(b, load(scales.scale + t + W)));
        if (groups == 1) continue;
        store(score + t, a);
        store(score + t + W, b);
    }
    digits.end(f, 0, r, scales.range[0] * decay);
    for (int g = 1; g < groups; g++) {
        const float *scale = scales.scale + g * BLOCK;
        Digits<BITS> more(f, g, r);
        for (int t = 0; t < tokens; t += TILE)
            more.put(t, mul(load(score + t), load(scale + t)), mul(load(score + t + W), load(scale + t + W)));
        more.end(f, g, r, scales.range[g] * decay);
    }
    return sum(total) * decay;
}

template <int BITS, int RB, int CV> INLINE void fast_v_channels(const VRun &a, const FastValues &f, int c, __mmask16 part) {
    constexpr int N = 8 / BITS;
    const int g = c / a.channels;
    const vi mask = _mm512_set1_epi8((char)((1 << BITS) - 1));
    vi high[CV][RB], low[CV][RB];
    for (int r = 0; r < RB; r++)
        for (int k = 0; k < CV; k++) {
            high[k][r] = _mm512_set1_epi32(f.high_start[g][r]);
            low[k][r] = _mm512_set1_epi32(f.low_start[g][r]);
        }
    const int8_t *highs = f.high[g][0], *lows = f.low[g][0];
    for (int tile = 0; tile < a.tiles; tile++) {
        const uint32_t *words = a.words[tile] + c;
        // As many bytes of the tiles ahead as are read here, in their order in memory.
        const int share = c / (CV * W) * a.tiles + tile, shares = a.dim < CV * W ? 1 : a.dim / (CV * W);
        const char *ahead = a.ahead[share / shares % (BLOCK / TILE)] + share % shares * (BITS * CV * 64);
        for (int i = 0; i < BITS; i++, words += a.dim, ahead += CV * 64) {
            vi w[CV];
            for (int k = 0; k < CV; k++) {
                w[k] = _mm512_maskz_loadu_epi32(k == CV - 1 ? part : (__mmask16)0xffff, words + k * W);
                prefetch(ahead + k * W * 4);
            }
#pragma GCC unroll 4
            for (int n = 0; n < N; n++, highs += 4, lows += 4) {
                vi x[CV];
                for (int k = 0; k < CV; k++) {
                    if constexpr (BITS == 8) x[k] = w[k];
                    else x[k] = _mm512_shuffle_epi8(f.table, _mm512_and_si512(_mm512_srli_epi32(w[k], n * BITS), mask));
                }
                for (int r = 0; r < RB; r++) {
                    const vi h = four_bytes(highs + r * BLOCK), l = four_bytes(lows + r * BLOCK);
                    for (int k = 0; k < CV; k++) {
                        add_products(high[k][r], x[k], h);
                        add_products(low[k][r], x[k], l);
                    }
                }
            }
        }
    }
    for (int r = 0; r < RB; r++)
        for (int k = 0; k < CV; k++) {
            float *to = a.acc + r * a.stride + c + k * W;
            const vf sum = fma(to_float(high[k][r]), set1(256.0f), to_float(low[k][r]));
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
    template <bool ONE> static K two(int rows) {
        return rows == 1 ? fast_k_tile<BITS, 1, 2, ONE> : rows == 2 ? fast_k_tile<BITS, 2, 2, ONE>
             : rows == 3 ? fast_k_tile<BITS, 3, 2, ONE> : rows == 4 ? fast_k_tile<BITS, 4, 2, ONE> : nullptr;
    }
    static K pair(int rows, int groups) { return groups == 1 ? two<true>(rows) : BITS == 8 ? two<BITS != 8>(rows) : nullptr; }
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
