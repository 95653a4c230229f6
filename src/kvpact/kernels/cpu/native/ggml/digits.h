// Weights times quantised values as whole numbers, for few rows: a weight times its token's scale is rounded to 16
// bits of the greatest of its tile, in two digits of 8 bits. Needs AVX-512 VNNI.
#pragma once
#include "ggml/codes.h"

#if defined(KVP_AVX512)
namespace KVP_NS {

constexpr int DIGIT_ROWS = 3; // whose sums stay in registers

// The 32 codes of a block, above zero.
template <int TYPE> INLINE __m256i code_bytes(const char *p, const ByteLookup<4> &levels) {
    const char *codes = p + Blocks<TYPE>::CODES;
    if constexpr (TYPE == ggml_abi::Q8_0)
        return _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)codes), _mm256_set1_epi8((char)128));
    const __m128i x = _mm_loadu_si128((const __m128i *)codes);
    __m256i all = _mm256_inserti128_si256(_mm256_castsi128_si256(x), _mm_srli_epi16(x, 4), 1);
    all = _mm256_and_si256(all, _mm256_set1_epi8(15));
    if constexpr (TYPE == ggml_abi::IQ4_NL) all = _mm256_shuffle_epi8(_mm512_castsi512_si256(levels.part[0]), all);
    if constexpr (Blocks<TYPE>::FIVE) {
        uint32_t fifth;
        memcpy(&fifth, codes - 4, 4);
        all = _mm256_or_si256(all, _mm256_maskz_mov_epi8(fifth, _mm256_set1_epi8(16)));
    }
    return all;
}

// A row's digits of a tile, 64 bytes each (tokens 16 j + 4 i to 16 j + 4 i + 3 in word 4 i + j), their unit, and minus
// the products with the code of zero.
struct Digits {
    __m512i high, low;
    float unit;
    int32_t middle;
};
INLINE Digits digits_of(const float *weight, const vf *scale, int zero) {
    vf x[TOKENS / W], top = KVP_NS::zero();
    for (int i = 0; i < TOKENS / W; i++) {
        x[i] = mul(load(weight + i * W), scale[i]);
        top = max(top, magnitude(x[i]));
    }
    const float most = highest(top);
    const vf per = set1(most > 1e-30f ? 32512 / most : 0);
    Digits to;
    __m512i upper[TOKENS / W], lower[TOKENS / W], all = _mm512_setzero_si512();
    for (int i = 0; i < TOKENS / W; i++) {
        const __m512i whole = _mm512_cvtps_epi32(mul(x[i], per));
        all = _mm512_add_epi32(all, whole);
        upper[i] = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
        lower[i] = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper[i], 8));
    }
    const auto packed = [](const __m512i *y) {
        return _mm512_packs_epi16(_mm512_packs_epi32(y[0], y[1]), _mm512_packs_epi32(y[2], y[3]));
    };
    to.high = packed(upper);
    to.low = packed(lower);
    to.unit = most / 32512;
    to.middle = -zero * _mm512_reduce_add_epi32(all);
    return to;
}

// Adds to R rows of 32 channels: `block` bytes into each of 64 tokens' values.
template <int TYPE, int R>
static void add_digits(const char *const *token, int64_t block, const Digits *d, const ByteLookup<4> &levels, float *acc, int64_t row) {
    __m512i high[R][4], low[R][4];
    for (int i = 0; i < R; i++)
        for (int j = 0; j < 4; j++) high[i][j] = low[i][j] = _mm512_setzero_si512();
    const __m512i first = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4);
    for (int t = 0; t < TOKENS; t += 8) { // two fours of tokens, one in each half
        const __m512i pair = _mm512_add_epi32(first, _mm512_set1_epi32(t / 16 + t % 16));
        __m512i x[4], y[4];
        for (int k = 0; k < 4; k++)
            x[k] = _mm512_inserti64x4(_mm512_castsi256_si512(code_bytes<TYPE>(token[t + k] + block, levels)),
                                      code_bytes<TYPE>(token[t + 4 + k] + block, levels), 1);
        for (int k = 0; k < 2; k++) {
            y[k] = _mm512_unpacklo_epi8(x[2 * k], x[2 * k + 1]);
            y[2 + k] = _mm512_unpackhi_epi8(x[2 * k], x[2 * k + 1]);
        }
        for (int k = 0; k < 2; k++) {
            x[2 * k] = _mm512_unpacklo_epi16(y[2 * k], y[2 * k + 1]);
            x[2 * k + 1] = _mm512_unpackhi_epi16(y[2 * k], y[2 * k + 1]);
        }
        for (int i = 0; i < R; i++) {
            const __m512i h = _mm512_permutexvar_epi32(pair, d[i].high), l = _mm512_permutexvar_epi32(pair, d[i].low);
            for (int j = 0; j < 4; j++) {
                high[i][j] = _mm512_dpbusd_epi32(high[i][j], x[j], h);
                low[i][j] = _mm512_dpbusd_epi32(low[i][j], x[j], l);
            }
        }
    }
    for (int i = 0; i < R; i++) {
        __m512i z[4], u[4];
        for (int j = 0; j < 4; j++) z[j] = _mm512_add_epi32(_mm512_slli_epi32(high[i][j], 8), low[i][j]);
        // z[j]: channels 4 j to 4 j + 3 and 16 more, of the first fours of tokens and of the second ones
        for (int j = 0; j < 2; j++) {
            u[j] = _mm512_shuffle_i32x4(z[2 * j], z[2 * j + 1], 0x88);
            u[2 + j] = _mm512_shuffle_i32x4(z[2 * j], z[2 * j + 1], 0xdd);
        }
        for (int j = 0; j < 2; j++) {
            const __m512i both = _mm512_add_epi32(_mm512_shuffle_i32x4(u[2 * j], u[2 * j + 1], 0x88),
                                                  _mm512_shuffle_i32x4(u[2 * j], u[2 * j + 1], 0xdd));
            float *to = acc + i * row + j * W;
            store(to, fma(to_float(_mm512_add_epi32(both, _mm512_set1_epi32(d[i].middle))), set1(d[i].unit), load(to)));
        }
    }
}

// Adds a tile's values, times the weights of `count` rows.
template <int TYPE> static void add_values(const char *const *token, int64_t blocks, const float *weight, int64_t count, float *acc, int64_t row) {
    constexpr int64_t SIZE = (int64_t)block_size(TYPE);
    const ByteLookup<4> levels = iq4_bytes();
    for (int64_t b = 0; b < blocks; b++) {
        vf scale[TOKENS / W], least[TOKENS / W];
        for (int i = 0; i < TOKENS / W; i++) {
            const __m512i head = gathered(token + i * W, b * SIZE);
            scale[i] = halves_of(head);
            least[i] = halves_of(_mm512_srli_epi32(head, 16));
        }
        for (int64_t r = 0; r < count; r += DIGIT_ROWS) {
            const int64_t some = count - r < DIGIT_ROWS ? count - r : DIGIT_ROWS;
            Digits d[DIGIT_ROWS];
            float *to = acc + r * row + b * BLOCK;
            for (int64_t i = 0; i < some; i++) {
                const float *own = weight + (r + i) * TOKENS;
                d[i] = digits_of(own, scale, zero_code(TYPE));
                if constexpr (has_least(TYPE)) {
                    vf all = zero();
                    for (int j = 0; j < TOKENS / W; j++) all = fma(load(own + j * W), least[j], all);
                    const vf most = set1(sum(all));
                    for (int j = 0; j < VECTORS_OF_BLOCK; j++) store(to + i * row + j * W, add(load(to + i * row + j * W), most));
                }
            }
            if (some == 3) add_digits<TYPE, 3>(token, b * SIZE, d, levels, to, row);
            else if (some == 2) add_digits<TYPE, 2>(token, b * SIZE, d, levels, to, row);
            else add_digits<TYPE, 1>(token, b * SIZE, d, levels, to, row);
        }
    }
}
} // namespace KVP_NS
#endif
