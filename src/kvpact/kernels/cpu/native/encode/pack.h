// Codes into words (formats/bitpack.py). Codes are [channel][32 tokens] bytes.
#pragma once
#include "planes.h"
#include "simd/lanes.h"

namespace KVP_NS {

// K: [2][words][16 tokens]; a word holds consecutive channels of a token. PART: of wider codes.
template <int WIDTH, bool PART>
INLINE void pack_plane_by_token(uint32_t *out, const uint8_t *codes, int dim, int shift) {
    constexpr int items = 32 / WIDTH;
    for (int c = 0; c < dim; c += items, out += 16)
#pragma GCC unroll 4
        for (int t = 0; t < 16; t += W) {
            Ints word;
            memcpy(&word, out + t, sizeof word);
            const auto put = [&](int i) {
                Ints code = load_codes(codes + (c + i) * 32 + t);
                if constexpr (PART) code = code >> shift & ((1 << WIDTH) - 1);
                word |= code << (i * WIDTH);
            };
            if (dim - c >= items) {
#pragma GCC unroll 32
                for (int i = 0; i < items; i++) put(i);
            } else {
                for (int i = 0; i < dim - c; i++) put(i);
            }
            memcpy(out + t, &word, sizeof word);
        }
}
INLINE void pack_by_token(uint32_t *tile, const uint8_t *codes, int bits, int dim) {
    Plane planes[3];
    const int n = planes_of(bits, planes), words = words_per_token(bits, dim);
    for (int half = 0; half < 2; half++) {
        uint32_t *out = tile + half * words * 16;
        for (int p = 0; p < n; p++) {
            const int width = planes[p].width, shift = planes[p].shift;
            const uint8_t *from = codes + half * 16;
            if (bits == 8) pack_plane_by_token<8, false>(out, from, dim, 0);
            else if (bits == 4) pack_plane_by_token<4, false>(out, from, dim, 0);
            else if (bits == 2) pack_plane_by_token<2, false>(out, from, dim, 0);
            else if (width == 4) pack_plane_by_token<4, true>(out, from, dim, shift);
            else if (width == 2) pack_plane_by_token<2, true>(out, from, dim, shift);
            else pack_plane_by_token<1, true>(out, from, dim, shift);
            out += (dim * width + 31) / 32 * 16;
        }
    }
}

// 8 codes, a byte each -> 8 * WIDTH bits.
template <int WIDTH> INLINE uint64_t squeeze(uint64_t x) {
    if constexpr (WIDTH == 8) return x;
    constexpr uint64_t a = (1u << 2 * WIDTH) - 1, b = (1ull << 4 * WIDTH) - 1;
    x = (x | x >> (8 - WIDTH)) & (a * 0x0001000100010001);
    x = (x | x >> (16 - 2 * WIDTH)) & (b * 0x0000000100000001);
    return (x | x >> (32 - 4 * WIDTH)) & ((1ull << (8 * WIDTH % 64)) - 1);
}
#if defined(KVP_AVX512) || defined(KVP_AVX2)
// 4 words of as many channels.
INLINE void put_words(uint32_t *out, __m128i words) {
    __m128i *at = (__m128i *)out;
    _mm_storeu_si128(at, _mm_or_si128(_mm_loadu_si128(at), words));
}
INLINE void put_words(uint32_t *low, uint32_t *high, __m256i words) {
    put_words(low, _mm256_castsi256_si128(words));
    put_words(high, _mm256_extracti128_si256(words, 1));
}
// The first channels, 4 at a time; returns how many.
template <int WIDTH> INLINE int pack_channels(uint32_t *out, const uint8_t *codes, int dim, int shift) {
    if constexpr (WIDTH == 8) return 0;
    const __m256i mask = _mm256_set1_epi8((char)((1 << WIDTH) - 1));
    int c = 0;
    for (; c + 4 <= dim; c += 4) {
        __m256i x[4];
        for (int i = 0; i < 4; i++) {
            const __m256i wide = _mm256_loadu_si256((const __m256i *)(codes + (c + i) * 32));
            x[i] = _mm256_and_si256(_mm256_srl_epi16(wide, _mm_cvtsi32_si128(shift)), mask);
        }
        if constexpr (WIDTH == 1) {
            for (int i = 0; i < 4; i++) out[c + i] |= (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(x[i], 7));
        } else { // neighbours are joined until a byte is full
            const __m256i pair = _mm256_set1_epi16((short)(1 | 1 << (8 + WIDTH)));
            for (int i = 0; i < 4; i++) x[i] = _mm256_maddubs_epi16(x[i], pair);
            if constexpr (WIDTH == 4) {
                const __m256i a = _mm256_packus_epi16(x[0], x[1]), b = _mm256_packus_epi16(x[2], x[3]);
                const __m256 left = _mm256_castsi256_ps(a), right = _mm256_castsi256_ps(b);
                put_words(out + c, out + 2 * dim + c, _mm256_castps_si256(_mm256_shuffle_ps(left, right, 0x88)));
                put_words(out + dim + c, out + 3 * dim + c, _mm256_castps_si256(_mm256_shuffle_ps(left, right, 0xdd)));
            } else {
                for (int i = 0; i < 4; i++) x[i] = _mm256_madd_epi16(x[i], _mm256_set1_epi32(1 | 1 << 20));
                const __m256i a = _mm256_packs_epi32(x[0], x[1]), b = _mm256_packs_epi32(x[2], x[3]);
                put_words(out + c, out + dim + c, _mm256_packus_epi16(a, b));
            }
        }
    }
    return c;
}
#else
template <int> INLINE int pack_channels(uint32_t *, const uint8_t *, int, int) { return 0; }
#endif
// V: [bits][dim]; a word holds consecutive tokens of a channel.
template <int WIDTH> INLINE void pack_plane_by_channel(uint32_t *out, const uint8_t *codes, int dim, int shift) {
    constexpr uint64_t mask = 0x0101010101010101u * ((1u << WIDTH) - 1);
    for (int c = pack_channels<WIDTH>(out, codes, dim, shift); c < dim; c++) {
        uint64_t x[4];
        memcpy(x, codes + c * 32, 32);
        for (int i = 0; i < 4; i++) x[i] = squeeze<WIDTH>(x[i] >> shift & mask);
        if constexpr (WIDTH == 8) {
            for (int i = 0; i < 4; i++) {
                out[2 * i * dim + c] |= (uint32_t)x[i];
                out[(2 * i + 1) * dim + c] |= (uint32_t)(x[i] >> 32);
            }
        } else {
            constexpr int together = 4 / WIDTH; // groups of 8 tokens in a word
            for (int i = 0; i < 4; i++) out[i / together * dim + c] |= (uint32_t)x[i] << (i % together * 8 * WIDTH);
        }
    }
}
INLINE void pack_by_channel(uint32_t *out, const uint8_t *codes, int bits, int dim) {
    Plane planes[3];
    for (int p = 0, n = planes_of(bits, planes); p < n; p++) {
        const int width = planes[p].width, shift = planes[p].shift;
        if (width == 8) pack_plane_by_channel<8>(out, codes, dim, shift);
        else if (width == 4) pack_plane_by_channel<4>(out, codes, dim, shift);
        else if (width == 2) pack_plane_by_channel<2>(out, codes, dim, shift);
        else pack_plane_by_channel<1>(out, codes, dim, shift);
        out += width * dim;
    }
}

// One token alone, its codes 32 bytes apart.
INLINE void pack_one(uint32_t *tile, const uint8_t *codes, int bits, int dim, int token, bool by_channel) {
    Plane planes[3];
    const int n = planes_of(bits, planes);
    if (!by_channel) tile += (token / 16) * words_per_token(bits, dim) * 16 + token % 16;
    for (int p = 0; p < n; p++) {
        const int width = planes[p].width, shift = planes[p].shift, items = 32 / width;
        const uint32_t mask = (1u << width) - 1;
        if (by_channel) {
            uint32_t *out = tile + token * width / 32 * dim;
            for (int c = 0; c < dim; c++) out[c] |= (codes[c * 32] >> shift & mask) << token * width % 32;
            tile += width * dim;
        } else {
            for (int c = 0; c < dim; c += items, tile += 16) {
                uint32_t word = 0;
                for (int i = 0; i < items && c + i < dim; i++) word |= (codes[(c + i) * 32] >> shift & mask) << i * width;
                *tile |= word;
            }
        }
    }
}
} // namespace KVP_NS
