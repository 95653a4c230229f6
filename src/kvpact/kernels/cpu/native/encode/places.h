// Codes of a trellis into words (formats/bitpack.py, `places` of methods/trellis_codec.py).
// Codes are [channel][32 tokens] bytes, channels in the order of the blocks' steps.
#pragma once
#include "encode/pack.h"

namespace KVP_NS {

constexpr int MOST_WORDS = MOST_DIM / 4; // of a token

// Words of a token of K: each plane of each block has words of its own, but planes of one bit share theirs.
INLINE int words_per_token(const kvp_trellis &t) {
    Plane planes[3];
    int words = 0, singles = 0;
    for (int b = 0; b < t.blocks; b++)
        for (int p = 0, n = t.block[b].bits ? planes_of(t.block[b].bits, planes) : 0; p < n; p++) {
            if (planes[p].width == 1) singles += t.block[b].dim;
            else words += (t.block[b].dim * planes[p].width + 31) / 32;
        }
    return words + (singles + 31) / 32;
}

// Where K's bits come from: of each word of a token, the rows of codes (or NONE) and their bits.
struct Places {
    static constexpr uint16_t NONE = 0xffff;
    int words;
    uint8_t width[MOST_WORDS];
    uint16_t row[MOST_WORDS][32];
    uint8_t shift[MOST_WORDS][32];

    void fill(const kvp_trellis &t) {
        words = 0;
        Plane planes[3];
        int singles = 0; // codes of the run of one bit, which lies after the others
        for (const bool one : {false, true}) {
            if (one) begin_run();
            for (int b = 0, first = 0; b < t.blocks; first += t.block[b].dim, b++) {
                const kvp_block &block = t.block[b];
                if (!block.bits) continue;
                const int n = planes_of(block.bits, planes), widest = block.bits > 1 ? planes[0].width : t.interleave;
                for (int p = 0; p < n; p++) {
                    if ((planes[p].width == 1) != one) continue;
                    if (!one) begin_run();
                    for (int k = 0; k < block.dim; k++)
                        put(one ? singles + k : k, planes[p], first + step(k, block.dim, widest, t.interleave), t.interleave);
                    if (one) singles += block.dim;
                }
            }
        }
    }

  private:
    int run; // its first word
    void begin_run() { run = words; }
    // The step of a trellis that the code k of a block stands for.
    static int step(int k, int dim, int width, int interleave) {
        const int count = dim * width / 32, wider = interleave / width, items = 32 / interleave;
        const int word = k / (32 / width), rest = k % (32 / width);
        return (rest % items * wider + rest / items) * count + word;
    }
    void put(int k, Plane plane, int code, int interleave) {
        const int per_word = 32 / plane.width, word = run + k / per_word, inside = k % per_word;
        const int items = 32 / interleave;
        for (; words <= word; words++) {
            width[words] = (uint8_t)plane.width;
            memset(row[words], 0xff, sizeof row[words]);
        }
        const int place = inside % items * (interleave / plane.width) + inside / items;
        row[word][place] = (uint16_t)code;
        shift[word][place] = (uint8_t)plane.shift;
    }
};

template <int WIDTH> INLINE Ints word_of(const uint8_t *codes, const uint16_t *row, const uint8_t *shift) {
    Ints word{};
    for (int i = 0; i < 32 / WIDTH; i++)
        if (row[i] != Places::NONE) word |= (load_codes(codes + row[i] * TILE) >> shift[i] & ((1 << WIDTH) - 1)) << i * WIDTH;
    return word;
}
// K: [2][words][16 tokens].
INLINE void pack_placed(uint32_t *out, const uint8_t *codes, const Places &places) {
    for (int half = 0; half < 2; half++, codes += 16)
        for (int k = 0; k < places.words; k++, out += 16)
            for (int t = 0; t < 16; t += W) {
                const uint16_t *row = places.row[k];
                const uint8_t *shift = places.shift[k], width = places.width[k];
                Ints word, found = width == 4   ? word_of<4>(codes + t, row, shift)
                                   : width == 2 ? word_of<2>(codes + t, row, shift)
                                                : word_of<1>(codes + t, row, shift);
                memcpy(&word, out + t, sizeof word);
                word |= found;
                memcpy(out + t, &word, sizeof word);
            }
}
// One token alone.
INLINE void pack_one_placed(uint32_t *tile, const uint8_t *codes, const Places &places, int token) {
    uint32_t *out = tile + token / 16 * places.words * 16 + token % 16;
    for (int k = 0; k < places.words; k++, out += 16) {
        const int width = places.width[k];
        uint32_t word = 0;
        for (int i = 0; i < 32 / width; i++) {
            if (places.row[k][i] == Places::NONE) continue;
            const uint32_t code = codes[places.row[k][i] * TILE] >> places.shift[k][i];
            word |= (code & ((1u << width) - 1)) << i * width;
        }
        *out |= word;
    }
}

// V: [bits][dim]. A word of a plane holds C / WIDTH runs of 32 / C tokens, wider codes of C bits.
template <int WIDTH, int C> INLINE void pack_plane_interleaved(uint32_t *out, const uint8_t *codes, int dim, int shift) {
    constexpr uint64_t mask = 0x0101010101010101u * ((1u << WIDTH) - 1);
    constexpr int items = 32 / C, runs = C / WIDTH; // of tokens: in a run, and runs in a word
    for (int c = 0; c < dim; c++)
        for (int word = 0; word < WIDTH; word++) {
            uint64_t found = 0;
            for (int q = 0; q < runs; q++) {
                uint64_t x = 0;
                memcpy(&x, codes + c * TILE + (word * runs + q) * items, items);
                found |= (x >> shift & mask) << q * WIDTH;
            }
            out[word * dim + c] |= (uint32_t)(C == 8 ? found : squeeze<4>(found));
        }
}
INLINE void pack_interleaved(uint32_t *out, const uint8_t *codes, int bits, int dim, int interleave) {
    Plane planes[3];
    for (int p = 0, n = planes_of(bits, planes); p < n; p++) {
        const int width = planes[p].width, shift = planes[p].shift;
        if (interleave == 4) {
            if (width == 2) pack_plane_interleaved<2, 4>(out, codes, dim, shift);
            else pack_plane_interleaved<1, 4>(out, codes, dim, shift);
        } else if (width == 4) pack_plane_interleaved<4, 8>(out, codes, dim, shift);
        else if (width == 2) pack_plane_interleaved<2, 8>(out, codes, dim, shift);
        else pack_plane_interleaved<1, 8>(out, codes, dim, shift);
        out += width * dim;
    }
}
INLINE void pack_one_interleaved(uint32_t *out, const uint8_t *codes, int bits, int dim, int interleave, int token) {
    Plane planes[3];
    for (int p = 0, n = planes_of(bits, planes); p < n; p++) {
        const int width = planes[p].width, per_word = 32 / width, items = 32 / interleave;
        const int inside = token % per_word, place = inside % items * interleave + inside / items * width;
        uint32_t *words = out + token / per_word * dim;
        for (int c = 0; c < dim; c++)
            words[c] |= (uint32_t)(codes[c * TILE] >> planes[p].shift & ((1 << width) - 1)) << place;
        out += width * dim;
    }
}
} // namespace KVP_NS
