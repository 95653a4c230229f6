// Words into codes (formats/bitpack.py). Codes are [channel][32 tokens] bytes.
#pragma once
#include "planes.h"
#include "simd/lanes.h"

namespace KVP_NS {

// K: [2][words][16 tokens]; a word holds consecutive channels of a token. PART: of wider codes.
template <int WIDTH, bool PART>
INLINE void unpack_plane_by_token(uint8_t *codes, const uint32_t *words, int dim, int shift) {
    constexpr int items = 32 / WIDTH;
    for (int c = 0; c < dim; c += items, words += 16)
#pragma GCC unroll 4
        for (int t = 0; t < 16; t += W) {
            const vi word = load_words(words + t);
            const auto take = [&](int i) {
                uint8_t *to = codes + (c + i) * 32 + t;
                Ints code = (Ints)and_(shr_by(word, i * WIDTH), (1u << WIDTH) - 1);
                if constexpr (PART) code = code << shift | (shift ? load_codes(to) : Ints{});
                store_codes(to, code);
            };
            if (dim - c >= items) {
#pragma GCC unroll 32
                for (int i = 0; i < items; i++) take(i);
            } else {
                for (int i = 0; i < dim - c; i++) take(i);
            }
        }
}
INLINE void unpack_by_token(uint8_t *codes, const uint32_t *tile, int bits, int dim) {
    Plane planes[3];
    const int n = planes_of(bits, planes), words = words_per_token(bits, dim);
    for (int half = 0; half < 2; half++) {
        const uint32_t *from = tile + half * words * 16;
        uint8_t *to = codes + half * 16;
        for (int p = 0; p < n; p++) {
            const int width = planes[p].width, shift = planes[p].shift;
            if (bits == 8) unpack_plane_by_token<8, false>(to, from, dim, 0);
            else if (bits == 4) unpack_plane_by_token<4, false>(to, from, dim, 0);
            else if (bits == 2) unpack_plane_by_token<2, false>(to, from, dim, 0);
            else if (width == 4) unpack_plane_by_token<4, true>(to, from, dim, shift);
            else if (width == 2) unpack_plane_by_token<2, true>(to, from, dim, shift);
            else unpack_plane_by_token<1, true>(to, from, dim, shift);
            from += (dim * width + 31) / 32 * 16;
        }
    }
}

// 8 * WIDTH bits -> 8 codes, a byte each.
template <int WIDTH> INLINE uint64_t spread(uint64_t x) {
    if constexpr (WIDTH == 8) return x;
    constexpr uint64_t a = (1u << 2 * WIDTH) - 1, b = (1ull << 4 * WIDTH) - 1;
    x = (x | x << (32 - 4 * WIDTH)) & (b * 0x0000000100000001);
    x = (x | x << (16 - 2 * WIDTH)) & (a * 0x0001000100010001);
    return (x | x << (8 - WIDTH)) & (0x0101010101010101u * ((1u << WIDTH) - 1));
}
// V: [bits][dim]; a word holds consecutive tokens of a channel.
template <int WIDTH>
INLINE void unpack_plane_by_channel(uint8_t *codes, const uint32_t *words, int dim, int shift) {
    for (int c = 0; c < dim; c++) {
        uint64_t x[4];
        if (shift) memcpy(x, codes + c * 32, 32);
        for (int i = 0; i < 4; i++) {
            uint64_t part;
            if constexpr (WIDTH == 8) {
                part = words[2 * i * dim + c] | (uint64_t)words[(2 * i + 1) * dim + c] << 32;
            } else {
                constexpr int together = 4 / WIDTH; // groups of 8 tokens in a word
                part = words[i / together * dim + c] >> (i % together * 8 * WIDTH) & ((1ull << 8 * WIDTH) - 1);
            }
            part = spread<WIDTH>(part) << shift;
            x[i] = shift ? x[i] | part : part;
        }
        memcpy(codes + c * 32, x, 32);
    }
}
INLINE void unpack_by_channel(uint8_t *codes, const uint32_t *words, int bits, int dim) {
    Plane planes[3];
    const int n = planes_of(bits, planes);
    for (int p = 0; p < n; p++) {
        const int width = planes[p].width, shift = planes[p].shift;
        if (width == 8) unpack_plane_by_channel<8>(codes, words, dim, shift);
        else if (width == 4) unpack_plane_by_channel<4>(codes, words, dim, shift);
        else if (width == 2) unpack_plane_by_channel<2>(codes, words, dim, shift);
        else unpack_plane_by_channel<1>(codes, words, dim, shift);
        words += width * dim;
    }
}
} // namespace KVP_NS
