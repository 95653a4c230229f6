// Weighted sums of packed V over tiles of 32 tokens.
#pragma once
#include "attend/codes.h"
#include "attend/job.h"
#include "attend/widening.h"

namespace KVP_NS {

struct VRun {
    const uint32_t *words[BLOCK / TILE];
    const char *ahead[BLOCK / TILE]; // what to prefetch, as many bytes as words
    int tiles;
    const float *table;
    const float *weights;            // [channel groups][MAX_ROWS][BLOCK]
    const float *shift;              // [channel groups][MAX_ROWS]: added to all channels
    const uint16_t *fold;            // [dim] fp16 factors of the sums, or NULL
    float *acc;                      // [rows][stride], added to
    int64_t stride;
    int dim, channels;
    int bits; // of the codes in the slots
    const Widening *widening; // of a trellis
};

template <class Level, int BITS, int RB, int CV, bool PART, bool SCRATCH>
INLINE void v_channels(const VRun &a, const Level &level, int c, int n) {
    using P = Planes<BITS>;
    const int group = c / a.channels;
    const float *weights = a.weights + group * MAX_ROWS * BLOCK;
    vf acc[CV][RB];
    for (int r = 0; r < RB; r++)
        for (int k = 0; k < CV; k++) {
            acc[k][r] = set1(a.shift[group * MAX_ROWS + r]);
        }
    for (int tile = 0; tile < a.tiles; tile++) {
        const uint32_t *words = a.words[tile] + c;
        int64_t row = a.dim;
        if constexpr (SCRATCH) {
            row = CV * W;
            words = a.widening->channels(a.words, a.tiles, tile, c, c + (PART ? n : CV * W), CV * W);
        }
        for (int i = 0; i < (SCRATCH ? a.bits : BITS); i++)
            for (int k = 0; k < CV; k += 16 / W)
                prefetch(a.ahead[tile] + (i * a.dim + c + k * W) * 4);
        const float *weight = weights + tile * TILE;
        for (int i = 0; i < P::width[0]; i++) {
            Codes<BITS, CV> codes(i, [&](int k, int p, int index) __attribute__((always_inline)) {
                const uint32_t *at = words + (P::below[p] + index) * row + k * W;
                return PART ? load_words_first(at, n) : load_words(at);
            });
#pragma GCC unroll 8
            for (int j = 0; j < codes.items; j++, weight++) {
                vf x[CV];
                for (int k = 0; k < CV; k++) x[k] = level(codes.code(k));
                for (int r = 0; r < RB; r++) {
                    vf factor = set1(weight[r * BLOCK]);
                    for (int k = 0; k < CV; k++) acc[k][r] = fma(x[k], factor, acc[k][r]);
                }
                codes.next();
            }
        }
    }
    for (int k = 0; k < CV; k++) {
        vf fold = zero();
        if (a.fold) {
            alignas(64) uint16_t part[W] = {0};
            memcpy(part, a.fold + c + k * W, 2 * (PART ? n : W));
            fold = load_half(part);
        }
        for (int r = 0; r < RB; r++) {
            float *to = a.acc + r * a.stride + c + k * W;
            // Added as a whole, so that long contexts lose nothing to rounding.
            if constexpr (SCRATCH) store(to, fma(acc[k][r], set1(a.widening->block.unit), load(to)));
            else store(to, a.fold ? fma(acc[k][r], fold, load(to)) : add(acc[k][r], load(to)));
        }
    }
}

template <class Level, int BITS, int RB, bool SCRATCH = false> void v_run(const VRun &a) {
    constexpr int FIT = REGISTERS == 32 ? 16 : 8;
    constexpr int MOST = RB >= FIT ? 1 : FIT / RB;
    constexpr int CV = MOST >= 2 ? 2 : 1;
    const Level level(a.table);
    int c = 0;
    // Four vectors where no group of channels ends between them.
    if constexpr (REGISTERS == 32 && MOST >= 4)
        if (a.channels % (4 * W) == 0 || a.channels >= a.dim)
            for (; c + 4 * W <= a.dim; c += 4 * W) v_channels<Level, BITS, RB, 4, false, SCRATCH>(a, level, c, W);
    for (; c + CV * W <= a.dim; c += CV * W) v_channels<Level, BITS, RB, CV, false, SCRATCH>(a, level, c, W);
    for (; c + W <= a.dim; c += W) v_channels<Level, BITS, RB, 1, false, SCRATCH>(a, level, c, W);
    if (c < a.dim) v_channels<Level, BITS, RB, 1, true, SCRATCH>(a, level, c, a.dim - c);
}
} // namespace KVP_NS
