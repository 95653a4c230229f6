// Scores of one or two tiles of packed K: 32 tokens each, up to MAX_ROWS query rows.
#pragma once
#include "attend/codes.h"
#include "attend/job.h"

namespace KVP_NS {

struct KTile {
    const uint32_t *words[2];
    const uint16_t *scale[2], *zero[2]; // [channel groups, 32] fp16, or NULL
    const float *table;
    const float *q;               // [rows][width], zeros after dim
    const float *sums;            // [rows][channel groups]: sums of q, for zero; or NULL
    const float *inner, *outer;   // [rows]: added before and after scaling
    const char *ahead[2];         // what to prefetch, as many bytes as words
    float *out;                   // [rows][BLOCK]
    int64_t width;
    int dim, channels;
    float middle;                 // of the codes, added to zero scaled
    // Where words stand in scratch memory: whether the products are added to what `out` holds; and of what
    // to prefetch, lines for 16 channels, and bytes from a half of a tile to the other.
    bool more;
    int lines;
    int64_t half;
};

// Adds the products of some channels; word(vector, plane, index) gives the packed words.
template <class Level, int BITS, int RB, int TV, int CHANNELS, class F>
INLINE void add_channels(vf (&acc)[TV][RB], const Level &level, const float *q, int64_t width, F &&word) {
    for (int i = 0; i < Planes<BITS>::width[0] * CHANNELS / 32; i++) {
        Codes<BITS, TV> codes(i, word);
#pragma GCC unroll 8
        for (int j = 0; j < codes.items; j++, q++) {
            vf x[TV];
            for (int k = 0; k < TV; k++) x[k] = level(codes.code(k));
            for (int r = 0; r < RB; r++) {
                vf factor = set1(q[r * width]);
                for (int k = 0; k < TV; k++) acc[k][r] = fma(x[k], factor, acc[k][r]);
            }
            codes.next();
        }
    }
}

template <class Level, int BITS, int RB, int TILES = 1, bool SCRATCH = false> void k_tile(const KTile &a) {
    using P = Planes<BITS>;
    // Channels that are taken at a time: blocks of a trellis are multiples of 16.
    constexpr int CHANNELS = SCRATCH ? 16 : 32;
    constexpr int FIT = REGISTERS == 32 ? 16 : 8;
    constexpr int MOST = RB >= FIT ? 1 : FIT / RB;
    constexpr int COUNT = TILES * TILE;
    constexpr int TV = MOST >= 4 && 4 * W <= COUNT ? 4 : (MOST >= 2 ? 2 : 1);
    const Level level(a.table);
    int64_t begin[4] = {0, 0, 0, 0};
    for (int p = 0; p < P::count; p++)
        begin[p + 1] = begin[p] + (a.dim * P::width[p] + 31) / 32;
    const int64_t half = begin[P::count] * 16;
    const int whole = a.dim / CHANNELS, rest = a.dim % CHANNELS;
    const int groups = TILES == 2 ? 1 : channel_groups(a.dim, a.channels); // a constant keeps sums in registers
    for (int t = 0; t < COUNT; t += TV * W) {
        const uint32_t *at[TV];
        const char *ahead[TV];
        for (int k = 0; k < TV; k++) {
            const int tile = (t + k * W) / TILE, inside = (t + k * W) % TILE;
            at[k] = a.words[tile] + inside / 16 * half + inside % 16;
            ahead[k] = a.ahead[tile] + inside / 16 * (SCRATCH ? a.half : half * 4);
        }
        vf total[TV][RB];
        for (int r = 0; r < RB; r++)
            for (int k = 0; k < TV; k++)
                total[k][r] = SCRATCH && a.more ? load(a.out + r * BLOCK + t + k * W) : zero();
        int c = 0;
        for (int g = 0; g < groups; g++) {
            vf acc[TV][RB];
            for (int r = 0; r < RB; r++)
                for (int k = 0; k < TV; k++) acc[k][r] = set1(a.inner[r]);
            const int end = g == groups - 1 ? whole : (g + 1) * (a.channels / 32);
            for (; c < end; c++) {
                for (int k = 0; k < TV && !SCRATCH; k++)
                    for (int i = 0; i < BITS; i++)
                        if ((t + k * W) % 16 == 0) prefetch(ahead[k] + (c * BITS + i) * 64);
                for (int i = 0; SCRATCH && i < a.lines; i++)
                    for (int k = 0; k < TV; k++)
                        if ((t + k * W) % 16 == 0) prefetch(ahead[k] + (c * a.lines + i) * 64);
                add_channels<Level, BITS, RB, TV, CHANNELS>(
                    acc, level, a.q + c * CHANNELS, a.width,
                    [&](int k, int p, int i) __attribute__((always_inline)) {
                        return load_words(at[k] + (begin[p] + c * (P::width[p] * CHANNELS / 32) + i) * 16);
                    });
            }
            if (g == groups - 1 && rest) {
                // The last words, with zeros after them: other memory may not be read.
                uint32_t last[TV][3][8][W];
                memset(last, 0, sizeof last);
                for (int k = 0; k < TV; k++)
                    for (int p = 0; p < P::count; p++)
                        for (int i = 0; i < (rest * P::width[p] + 31) / 32; i++)
                            memcpy(last[k][p][i], at[k] + (begin[p] + whole * (P::width[p] * CHANNELS / 32) + i) * 16, 4 * W);
                add_channels<Level, BITS, RB, TV, CHANNELS>(
                    acc, level, a.q + whole * CHANNELS, a.width,
                    [&](int k, int p, int i) __attribute__((always_inline)) { return load_words(last[k][p][i]); });
            }
            for (int k = 0; k < TV; k++) {
                const int tile = (t + k * W) / TILE, side = g * TILE + (t + k * W) % TILE;
                vf scale = a.scale[0] ? load_half(a.scale[tile] + side) : set1(1.0f);
                for (int r = 0; r < RB; r++) total[k][r] = fma(acc[k][r], scale, total[k][r]);
                if (a.zero[0]) {
                    vf z = fma(scale, set1(a.middle), load_half(a.zero[tile] + side));
                    for (int r = 0; r < RB; r++)
                        total[k][r] = fma(z, set1(a.sums[r * groups + g]), total[k][r]);
                }
            }
        }
        for (int r = 0; r < RB; r++)
            for (int k = 0; k < TV; k++)
                store(a.out + r * BLOCK + t + k * W, add(total[k][r], set1(a.outer[r])));
    }
}
} // namespace KVP_NS
