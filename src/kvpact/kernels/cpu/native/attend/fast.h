// The same loops in 8-bit integers (VPDPBUSD), for precision="int8": q as 8 bits, the weights of V as
// two digits of 8 bits. Levels are whole numbers of 8 bits, so they are exact. For codes of 2, 4 and 8
// bits without zero points; trellises are in digits.h.
#pragma once
#include "attend/keys.h"
#include "attend/values.h"

namespace KVP_NS {

// Byte j of a word shifted by k * BITS holds item j * N + k, N = 8 / BITS. This is where the bytes
// of 16 items in order have to go, so that one dword meets one shifted word.
template <int BITS> INLINE __m128i word_order() {
    if constexpr (BITS == 4) return _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    else return _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
}
template <int BITS> INLINE __m128i in_word_order(__m128i x) {
    if constexpr (BITS == 8) return x;
    else return _mm_shuffle_epi8(x, word_order<BITS>());
}
template <int BITS> INLINE vi in_word_order(vi x) { // four times 16 items
    if constexpr (BITS == 8) return x;
    else return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(word_order<BITS>()));
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

// Levels in units, and 128 more, as unsigned bytes. The division leaves the whole number that the level
// was made of.
static vi level_bytes(const kvp_stream &x) {
    alignas(16) uint8_t bytes[16] = {};
    if (x.kind == KVP_TABLE)
        for (int i = 0; i < 16; i++) bytes[i] = (uint8_t)(128 + lrintf(x.table[i] / x.unit));
    return _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)bytes));
}

static bool fast_format(const kvp_stream &x) {
    if (x.unit == 0 || x.zero.base || x.fold.base || x.shift.base) return false;
    if (x.kind == KVP_TABLE) return x.bits == 2 || x.bits == 4;
    return x.kind == KVP_LINEAR && x.bits == 8;
}

// The query rows of a KV head in bytes: rows of q in word order, 128 times their sums by channel
// group, and what a step of each row is worth.
struct FastKeys {
    vi table; // levels + 128, unsigned
    int64_t width;
    int8_t *q;           // [rows][width]
    int32_t (*sum)[32];
    float *step;

    FastKeys(const Job &job, int64_t pair, int64_t row, vi levels) : table(levels), width(job.k_width) {
        float *memory = job.bytes + pair * job.byte_size();
        const int64_t rows = job.rows + MAX_ROWS;
        q = (int8_t *)memory + row * width;
        sum = (int32_t (*)[32])(memory + rows * width / 4) + row;
        step = memory + rows * width / 4 + rows * 32 + row;
    }
};

template <int BITS> static void make_fast_keys(const FastKeys &f, const kvp_stream &k, const float *q, int64_t rows) {
    const int64_t width = f.width, groups = channel_groups(k.dim, k.channels);
    for (int64_t r = 0; r < rows; r++) {
        vf most = zero();
        for (int64_t c = 0; c < width; c += W) most = max(most, _mm512_abs_ps(load(q + r * width + c)));
        const float high = highest(most), scale = high > 0 ? high / 127 : 1;
        f.step[r] = scale * k.unit;
        for (int64_t g = 0; g < groups; g++) f.sum[r][g] = 0;
        for (int64_t c = 0; c < width; c += W) {
            vi x = _mm512_cvtps_epi32(mul(load(q + r * width + c), set1(1 / scale)));
            const int64_t g = c / k.channels;
            if (g < groups) f.sum[r][g] += 128 * _mm512_reduce_add_epi32(x);
            _mm_storeu_si128((__m128i *)(f.q + r * width + c), in_word_order<BITS>(_mm512_cvtepi32_epi8(x)));
        }
    }
}

template <int BITS, int RB, int TILES = 1, bool ONE = TILES == 2> void fast_k_tile(const KTile &a, const FastKeys &f) {
    constexpr int N = 8 / BITS, TV = 2 * TILES;
    const int words = (a.dim * BITS + 31) / 32, groups = ONE ? 1 : channel_groups(a.dim, a.channels);
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
                    const vi factor = four_bytes(f.q + r * f.width + (i * N + n) * 4);
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
    float unit;
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
    INLINE void put(int t, vf a, vf b) {
        const vi x = _mm512_cvtps_epi32(a), y = _mm512_cvtps_epi32(b);
        total = _mm512_add_epi32(total, _mm512_add_epi32(x, y));
        const vi all = _mm512_packs_epi32(x, y);
        const vi highs = _mm512_srai_epi16(_mm512_add_epi16(all, _mm512_set1_epi16(128)), 8);
        const vi lows = _mm512_sub_epi16(all, _mm512_slli_epi16(highs, 8));
        // Dwords of a lane of bytes: highs of x, of y, lows of x, of y, four tokens each.
        const vi order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const vi bytes = in_word_order<BITS>(_mm512_permutexvar_epi32(order, _mm512_packs_epi16(highs, lows)));
        _mm256_storeu_si256((__m256i *)(high + t), _mm512_castsi512_si256(bytes));
        _mm256_storeu_si256((__m256i *)(low + t), _mm512_extracti64x4_epi64(bytes, 1));
    }
    INLINE void end(FastValues &f, int g, int r, float range) const {
        const int32_t sum = _mm512_reduce_add_epi32(total);
        f.scale[g][r] = range / MOST_DIGITS * f.unit;
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

// exp(x - top) of 16 scores, to 8e-5, which is far less than 8 bits lose.
INLINE vf weights_of(const float *score, vf minus_top) {
    const vf x = max(fma(load(score), set1(LOG2E), minus_top), set1(LEAST_POWER));
    const vf whole = _mm512_roundscale_ps(x, 8), f = sub(x, whole);
    vf y = set1(5.5171665e-02f);
    y = fma(y, f, set1(2.4261112e-01f));
    y = fma(y, f, set1(6.9326099e-01f));
    y = fma(y, f, set1(9.9992807e-01f));
    return times_exp2(y, whole, x);
}

// The digits of a row from its scores, of which `top` is the highest; weights are exp(score - top)
// here, in the scores' place, and `decay` times that in the sums. Returns the sum of the weights.
template <int BITS>
static float weigh_digits(FastValues &f, int groups, int r, float *score, float top, float decay, const BlockScales &scales, int tokens) {
    const vf minus_top = set1(-top * LOG2E);
    vf total = zero();
    for (int t = 0; t < tokens; t += W) {
        const vf weight = weights_of(score + t, minus_top);
        total = add(total, weight);
        store(score + t, weight);
    }
    for (int g = 0; g < groups; g++) {
        const float *scale = scales.scale + g * BLOCK;
        Digits<BITS> digits(f, g, r);
        for (int t = 0; t < tokens; t += TILE)
            digits.put(t, mul(load(score + t), load(scale + t)), mul(load(score + t + W), load(scale + t + W)));
        digits.end(f, g, r, scales.range[g] * decay);
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
