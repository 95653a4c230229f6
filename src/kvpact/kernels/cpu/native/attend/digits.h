// Products with levels that are bytes (VPDPBUSD). The other factor is made a whole number of up to three
// digits of 8 bits, and each digit has a sum of its own. Sums of whole numbers are exact, so three digits
// lose what fp32 loses; one or two are for precision="int8".
#pragma once
#include "attend/fast.h"
#include "attend/widening.h"

namespace KVP_NS {

// The greatest whole number of some digits; less than there is room for, since the numbers are rounded.
template <int DIGITS, bool SIGNED> constexpr float GREATEST = 0;
template <> inline constexpr float GREATEST<1, true> = 127;
template <> inline constexpr float GREATEST<3, true> = 0x7f7f00;
template <> inline constexpr float GREATEST<2, false> = 0xffff;
template <> inline constexpr float GREATEST<3, false> = 0xffff00;

// What makes numbers whole: the greatest magnitude, or NaN where there is one, and its inverse. What is
// nothing beside the other numbers of attention counts as zero.
template <int DIGITS, bool SIGNED> struct WholeRange {
    float range, inverse;
    INLINE WholeRange(const float *x, int64_t count) {
        vi most = _mm512_setzero_si512();
        for (int64_t i = 0; i < count; i += W)
            most = _mm512_max_epi32(most, (vi)_mm512_abs_ps(load(x + i)));
        const int32_t bits = _mm512_reduce_max_epi32(most);
        memcpy(&range, &bits, 4);
        inverse = range > 1e-30f ? GREATEST<DIGITS, SIGNED> / range : 0;
    }
    INLINE vi operator()(vf x) const { return _mm512_cvtps_epi32(mul(x, set1(inverse))); }
    INLINE float step() const { return range / GREATEST<DIGITS, SIGNED>; }
};

// The bytes of 16 whole numbers: dword 4 * i + k has byte k of those that meet the i-th of four words of
// levels. C: bits of the indices that the levels come from.
template <int C> INLINE vi digits_of(vi x) {
    if constexpr (C == 4) {
        const vi order = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
        x = _mm512_permutexvar_epi32(order, x);
    }
    const __m128i bytes = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(bytes));
}

// The query rows of a KV head in digits with a sign; what the sum of each digit begins at, since levels
// are LEVEL_ZERO too large; what a row's numbers are to be multiplied with.
struct QueryDigits {
    int64_t width; // bytes of a row
    int8_t *digits;
    struct Row {
        int32_t start[3];
        float step;
    } *row;

    QueryDigits(const Job &job, int64_t pair, int64_t first) : width(4 * job.k_width) {
        float *memory = job.bytes + pair * job.byte_size();
        digits = (int8_t *)memory + first * width;
        row = (Row *)(memory + (job.rows + MAX_ROWS) * job.k_width) + first;
    }
};

template <int DIGITS> static void make_query_digits(const QueryDigits &to, const float *q, int64_t width, int64_t rows) {
    for (int64_t r = 0; r < rows; r++, q += width) {
        const WholeRange<DIGITS, true> whole(q, width);
        vi sums = _mm512_setzero_si512();
        for (int64_t c = 0; c < width; c += W) {
            // Balanced digits: from -128 to 127.
            const vi half = _mm512_set1_epi32(0x808080);
            const vi x = digits_of<8>(_mm512_xor_si512(_mm512_add_epi32(whole(load(q + c)), half), half));
            add_products(sums, _mm512_set1_epi8((char)LEVEL_ZERO), x);
            _mm512_storeu_si512(to.digits + r * to.width + 4 * c, x);
        }
        alignas(64) int32_t sum[W];
        _mm512_store_si512(sum, sums);
        for (int k = 0; k < 3; k++) to.row[r].start[k] = -(sum[k] + sum[k + 4] + sum[k + 8] + sum[k + 12]);
        to.row[r].step = whole.step();
    }
}

// The sum of the digits' sums.
template <int DIGITS> INLINE vf join(const vi *sums) {
    vf x = to_float(sums[DIGITS - 1]);
    for (int d = DIGITS - 2; d >= 0; d--) x = fma(x, set1(256.0f), to_float(sums[d]));
    return x;
}

// Scales of 8 bits as fp32.
INLINE vf scales_of(const uint8_t *from) {
    const vi byte = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
    const vi bits = shl<20>(_mm512_add_epi32(byte, _mm512_set1_epi32(888)));
    return as_float(_mm512_maskz_mov_epi32(_mm512_test_epi32_mask(byte, byte), bits));
}

// Scores of one or two tiles of K; `words` are bytes of levels, [2][dim / 4][16].
template <int RB, int DIGITS, int TILES>
void digit_k_tile(const KeyTile *tile, const uint32_t *const *words, const Trellis &trellis, const QueryDigits &q) {
    constexpr int TV = RB * DIGITS > 12 ? 1 : TILES == 1 ? 2 : 4;
    const int count = trellis.dim / 4, bytes = 64 * trellis.half, piece = bytes / count;
    for (int t = 0; t < TILES * TILE; t += TV * W) {
        vi acc[TV][RB][DIGITS];
        for (int r = 0; r < RB; r++)
            for (int d = 0; d < DIGITS; d++)
                for (int k = 0; k < TV; k++) acc[k][r][d] = _mm512_set1_epi32(q.row[r].start[d]);
        const uint32_t *at[TV];
        const char *ahead[TV];
        for (int k = 0; k < TV; k++) {
            const int half = (t + k * W) % TILE / W;
            at[k] = words[(t + k * W) / TILE] + half * count * 16;
            ahead[k] = tile[(t + k * W) / TILE].ahead + half * bytes;
        }
        const int8_t *factors = q.digits;
        for (int i = 0; i < count; i++, factors += 16) {
            vi x[TV];
            for (int k = 0; k < TV; k++) {
                x[k] = load_words(at[k] + i * 16);
                prefetch(ahead[k] + i * piece);
            }
            for (int r = 0; r < RB; r++)
                for (int d = 0; d < DIGITS; d++) {
                    const vi factor = four_bytes(factors + r * q.width + d * 4);
                    for (int k = 0; k < TV; k++) add_products(acc[k][r][d], x[k], factor);
                }
        }
#pragma GCC unroll 4 // or the sums of a single row lie in memory
        for (int k = 0; k < TV; k++) {
            const KeyTile &a = tile[(t + k * W) / TILE];
            const int inside = (t + k * W) % TILE;
            const vf scale = scales_of(a.scale + inside);
            const vi places = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            const vi flags = a.flags ? _mm512_srlv_epi32(_mm512_set1_epi32((int)a.flags[inside / W]), places) : vi{};
            for (int r = 0; r < RB; r++) {
                const vf x = mul(join<DIGITS>(acc[k][r]), set1(q.row[r].step));
                // Flags choose by their lowest two bits; those above them are of other tokens.
                const vf base = a.flags ? _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_load_ps(a.base[r])), flags) : zero();
                store(a.out + r * BLOCK + inside, fma(x, scale, base));
            }
        }
    }
}

// The weights of a block's tokens, times their scales, in digits without a sign.
struct WeightDigits {
    alignas(64) uint8_t digits[MAX_ROWS][4 * BLOCK];
    float step[MAX_ROWS];

    template <int C, int DIGITS> INLINE void make(const VRun &a, int rows, float unit) {
        for (int r = 0; r < rows; r++) {
            const float *weight = a.weights + r * BLOCK;
            const WholeRange<DIGITS, false> whole(weight, a.tiles * TILE);
            for (int t = 0; t < a.tiles * TILE; t += W)
                _mm512_store_si512(digits[r] + 4 * t, digits_of<C>(whole(load(weight + t))));
            step[r] = whole.step() * unit;
        }
    }
};

template <int RB, int DIGITS, int CV> INLINE void digit_v_channels(const VRun &a, const Widening &widening, const WeightDigits &w, int c, int n) {
    vi acc[CV][RB][DIGITS];
    for (int r = 0; r < RB; r++)
        for (int d = 0; d < DIGITS; d++)
            for (int k = 0; k < CV; k++) acc[k][r][d] = _mm512_setzero_si512();
    for (int tile = 0; tile < a.tiles; tile++) {
        const uint32_t *words = widening.channels(a.words, a.tiles, tile, c, c + n, CV * W);
        const uint8_t *factors = w.digits[0] + tile * TILE * 4;
        for (int i = 0; i < TILE / 4; i++, words += CV * W, factors += 16) {
            vi x[CV];
            for (int k = 0; k < CV; k++) {
                x[k] = load_words(words + k * W);
                if (i < a.bits) prefetch(a.ahead[tile] + (i * a.dim + c + k * W) * 4);
            }
            for (int r = 0; r < RB; r++)
                for (int d = 0; d < DIGITS; d++) {
                    const vi factor = four_bytes((const int8_t *)factors + r * 4 * BLOCK + d * 4);
                    for (int k = 0; k < CV; k++) add_products(acc[k][r][d], factor, x[k]);
                }
        }
    }
    for (int r = 0; r < RB; r++)
        for (int k = 0; k < CV; k++) {
            float *to = a.acc + r * a.stride + c + k * W;
            store(to, fma(join<DIGITS>(acc[k][r]), set1(w.step[r]), load(to)));
        }
}

template <int RB, int DIGITS> void digit_v_run(const VRun &a, const Widening &widening, const WeightDigits &w) {
    constexpr int CV = RB * DIGITS > 12 ? 1 : RB * DIGITS > 6 ? 2 : 4;
    int c = 0;
    for (; c + CV * W <= a.dim; c += CV * W) digit_v_channels<RB, DIGITS, CV>(a, widening, w, c, CV * W);
    for (; c < a.dim; c += W) digit_v_channels<RB, DIGITS, 1>(a, widening, w, c, a.dim - c < W ? a.dim - c : W);
}

// Sums of so many rows and digits leave registers for two tiles.
constexpr int AT_MOST_PAIRS = 6;

template <int RB, int DIGITS> static auto digit_keys(bool pair) {
    if constexpr (RB * DIGITS <= AT_MOST_PAIRS)
        if (pair) return digit_k_tile<RB, DIGITS, 2>;
    return digit_k_tile<RB, DIGITS, 1>;
}
template <int DIGITS> static auto digit_keys(int rows, bool pair) {
    return rows == 1 ? digit_keys<1, DIGITS>(pair) : rows == 2 ? digit_keys<2, DIGITS>(pair) : rows == 3 ? digit_keys<3, DIGITS>(pair)
         : rows == 4 ? digit_keys<4, DIGITS>(pair) : digit_keys<8, DIGITS>(pair);
}
template <int DIGITS> static auto digit_values(int rows) {
    return rows == 1 ? digit_v_run<1, DIGITS> : rows == 2 ? digit_v_run<2, DIGITS> : rows == 3 ? digit_v_run<3, DIGITS>
         : rows == 4 ? digit_v_run<4, DIGITS> : digit_v_run<8, DIGITS>;
}
} // namespace KVP_NS
