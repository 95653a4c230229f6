// Quantised keys as whole numbers: 16 tokens side by side, four channels in a word, multiplied with queries of 8 bits,
// as ggml's own products are. Needs AVX-512 VNNI.
#pragma once
#include "ggml/formats.h"

#if defined(KVP_AVX512)
namespace KVP_NS {

constexpr int WORDS = BLOCK / 4;
constexpr int ROWS_AT_ONCE = 8;

// Of each of a tile's groups of W tokens and each block: the codes, above zero, and the scales (and least numbers).
struct CodePanel {
    vi *words;    // [group][block][WORDS]
    float *unit;  // [group][block][W]
    float *least; // the same; NULL: there are none
};
// Rows of queries, in blocks: 8 bits, their unit, minus the products with the code of zero, and their sum.
struct CodedRows {
    int8_t *code;
    float *unit, *sum;
    int32_t *middle;
};

static constexpr int zero_code(int type) {
    return type == ggml_abi::Q4_0 ? 8 : type == ggml_abi::Q5_0 ? 16 : has_least(type) ? 0 : 128;
}

static void code_row(const float *q, int64_t dim, float scale, int zero, int64_t row, const CodedRows &to) {
    for (int64_t b = 0; b < dim / BLOCK; b++) {
        const vf x = load(q + b * BLOCK), y = load(q + b * BLOCK + W);
        const float top = highest(max(magnitude(x), magnitude(y)));
        const vf per = set1(top > 1e-30f ? 127 / top : 0);
        const __m512i i = _mm512_cvtps_epi32(mul(x, per)), j = _mm512_cvtps_epi32(mul(y, per));
        const int64_t at = row * (dim / BLOCK) + b;
        _mm_storeu_si128((__m128i *)(to.code + at * BLOCK), _mm512_cvtsepi32_epi8(i));
        _mm_storeu_si128((__m128i *)(to.code + at * BLOCK + W), _mm512_cvtsepi32_epi8(j));
        const int32_t total = _mm512_reduce_add_epi32(_mm512_add_epi32(i, j));
        to.unit[at] = _cvtsh_ss(_cvtss_sh(top / 127, 0)) * scale; // as ggml stores it
        to.middle[at] = -zero * total;
        to.sum[at] = to.unit[at] * (float)total; // rounded the same way, so that only what differs in a block counts
    }
}

// COUNT words (4 or 8) of each of W tokens -> [word][token].
template <int COUNT> INLINE void transposed_words(const char *const *token, int64_t at, __m512i *out) {
    __m512i a[8], b[8];
    for (int i = 0; i < COUNT; i++) {
        if constexpr (COUNT == 8) {
            const auto bytes = [&](int t) { return _mm256_loadu_si256((const __m256i *)(token[t] + at)); };
            a[i] = _mm512_inserti64x4(_mm512_castsi256_si512(bytes(i)), bytes(i + 8), 1);
        } else {
            const auto bytes = [&](int t) { return _mm_loadu_si128((const __m128i *)(token[t] + at)); };
            const __m512i x = _mm512_inserti32x4(_mm512_castsi128_si512(bytes(i)), bytes(i + 4), 1);
            a[i] = _mm512_inserti32x4(_mm512_inserti32x4(x, bytes(i + 8), 2), bytes(i + 12), 3);
        }
    }
    for (int i = 0; i < COUNT; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < COUNT; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    if constexpr (COUNT == 8) {
        // a[w] and a[4 + w]: words w and w + 4 of the first and the last four tokens of each eight
        const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
        for (int w = 0; w < 4; w++) {
            out[w] = _mm512_permutex2var_epi64(a[w], low, a[4 + w]);
            out[4 + w] = _mm512_permutex2var_epi64(a[w], high, a[4 + w]);
        }
    } else {
        for (int w = 0; w < 4; w++) out[w] = a[w];
    }
}

INLINE vf halves_of(__m512i words) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)); }

// Four bytes of each of W tokens.
INLINE __m512i gathered(const char *const *token, int64_t at) {
    const auto some = [&](int i) {
        return _mm512_i64gather_epi32(_mm512_add_epi64(_mm512_loadu_si512(token + i), _mm512_set1_epi64(at)), nullptr, 1);
    };
    return _mm512_inserti64x4(_mm512_castsi256_si512(some(0)), some(8), 1);
}
// The levels of IQ4_NL, above zero.
INLINE ByteLookup<4> iq4_bytes() {
    uint8_t table[16];
    for (int i = 0; i < 16; i++) table[i] = (uint8_t)((int)IQ4_LEVELS[i] + 128);
    return ByteLookup<4>(table);
}

// W tokens, of which each has `blocks` blocks.
template <int TYPE> INLINE void code_tokens(const char *const *token, int64_t blocks, int64_t group, const CodePanel &to) {
    constexpr int64_t SIZE = (int64_t)block_size(TYPE);
    constexpr int CODES = Blocks<TYPE>::CODES;
    const ByteLookup<4> levels = iq4_bytes();
    for (int64_t b = 0; b < blocks; b++) {
        __m512i word[8];
        const __m512i head = gathered(token, b * SIZE);
        store(to.unit + (group * blocks + b) * W, halves_of(head));
        if constexpr (has_least(TYPE)) store(to.least + (group * blocks + b) * W, halves_of(_mm512_srli_epi32(head, 16)));
        if constexpr (TYPE == ggml_abi::Q8_0) {
            transposed_words<8>(token, b * SIZE + CODES, word);
            for (int w = 0; w < 8; w++) word[w] = _mm512_xor_si512(word[w], _mm512_set1_epi8((char)128));
        } else {
            transposed_words<4>(token, b * SIZE + CODES, word);
            for (int w = 0; w < 4; w++) {
                word[4 + w] = and_(_mm512_srli_epi16(word[w], 4), 0x0f0f0f0f);
                word[w] = and_(word[w], 0x0f0f0f0f);
            }
            if constexpr (TYPE == ggml_abi::IQ4_NL)
                for (int w = 0; w < 8; w++) word[w] = levels(word[w]);
            if constexpr (Blocks<TYPE>::FIVE) {
                __m512i fifth = gathered(token, b * SIZE + CODES - 4);
                for (int w = 0; w < 8; w++) { // bit i of four to byte i
                    const __m512i spread = _mm512_mullo_epi32(and_(fifth, 15), _mm512_set1_epi32(0x00204081));
                    word[w] = _mm512_or_si512(word[w], _mm512_slli_epi32(and_(spread, 0x01010101), 4));
                    fifth = _mm512_srli_epi32(fifth, 4);
                }
            }
        }
        for (int w = 0; w < 8; w++) _mm512_store_si512(to.words + (group * blocks + b) * WORDS + w, word[w]);
    }
}

// Scores of R rows with `groups` * W tokens.
template <int R> static void coded_scores(const CodedRows &q, int64_t row, int64_t blocks, int64_t groups, const CodePanel &k, float *out) {
    for (int64_t g = 0; g < groups; g++) {
        vf all[R];
        for (int i = 0; i < R; i++) all[i] = zero();
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t at = g * blocks + b;
            const vf unit = load(k.unit + at * W);
            __m512i acc[R];
            for (int i = 0; i < R; i++) acc[i] = _mm512_set1_epi32(q.middle[(row + i) * blocks + b]);
            for (int w = 0; w < WORDS; w++) {
                const __m512i x = _mm512_load_si512(k.words + at * WORDS + w);
                for (int i = 0; i < R; i++) {
                    int32_t y;
                    memcpy(&y, q.code + ((row + i) * blocks + b) * BLOCK + w * 4, 4);
                    acc[i] = _mm512_dpbusd_epi32(acc[i], x, _mm512_set1_epi32(y));
                }
            }
            for (int i = 0; i < R; i++) {
                all[i] = fma(mul(to_float(acc[i]), unit), set1(q.unit[(row + i) * blocks + b]), all[i]);
                if (k.least) all[i] = fma(load(k.least + at * W), set1(q.sum[(row + i) * blocks + b]), all[i]);
            }
        }
        for (int i = 0; i < R; i++) store(out + i * TOKENS + g * W, all[i]);
    }
}
template <int R = ROWS_AT_ONCE>
static void coded_rows(const CodedRows &q, int64_t row, int64_t count, int64_t blocks, int64_t groups, const CodePanel &k, float *out) {
    for (; count >= R; row += R, count -= R, out += R * TOKENS) coded_scores<R>(q, row, blocks, groups, k, out);
    if constexpr (R > 1)
        if (count) coded_rows<R - 1>(q, row, count, blocks, groups, k, out);
}
} // namespace KVP_NS
#endif
