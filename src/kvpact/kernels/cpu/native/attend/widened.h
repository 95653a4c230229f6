// Packed keys whose codes are of a trellis: their words are made bytes of levels before they are read, and the
// products of q and what was taken off them are added.
#pragma once
#include "attend/pass.h"

namespace KVP_NS {

// out[row] = the product of x and of a row of q, for a multiple of 4 rows.
INLINE void dot_rows(float *out, const float *x, const float *q, int64_t width, int rows) {
    for (int r = 0; r < rows; r += 4) {
        vf acc[4] = {zero(), zero(), zero(), zero()};
        for (int64_t c = 0; c < width; c += W)
            for (int i = 0; i < 4; i++) acc[i] = fma(load(x + c), load(q + (r + i) * width + c), acc[i]);
        store_sums(out + r, 1, acc[0], acc[1], acc[2], acc[3]);
    }
}

// The products of q and the bases of keys.
struct BaseScores {
    const Pass &p;
    const kvp_trellis &x;
    const float *q;
    float of_mean[MAX_ROWS] = {0}, of_first[MAX_ROWS] = {0};
    int64_t group = -1;

    explicit BaseScores(const Pass &pass) : p(pass), x(*pass.a.k.trellis) {
        q = p.job.q + (p.b * p.a.heads + p.h) * p.job.q_size() + p.r0 * p.job.k_width;
        if (!x.first) return;
        const int dim = p.a.k.dim;
        memcpy(p.scratch.widened->mean, x.first + p.h * dim, sizeof(float) * (size_t)dim);
        for (int64_t c = dim; c < p.job.k_width; c++) p.scratch.widened->mean[c] = 0;
        dot_rows(of_first, p.scratch.widened->mean, q, p.job.k_width, p.passed);
    }
    // Writes those of the tile at `t` in the place of its scores.
    INLINE void write(const Place &place, int64_t t, float *out) {
        if (x.center && t / x.center != group) {
            group = t / x.center;
            const int8_t *mean = (const int8_t *)place.group(p.a.k.mean, p.b, p.h, x.center, p.a.k.dim);
            read_mean(p.scratch.widened->mean, mean, (const uint16_t *)place.group(p.a.k.step, p.b, p.h, x.center, 2), p.a.k.dim);
            dot_rows(of_mean, p.scratch.widened->mean, q, p.job.k_width, p.passed);
        }
        const uint32_t *flags = (const uint32_t *)place.tile(p.a.k.base, p.b, p.h, 8);
        Ints lanes = {};
        for (int i = 0; i < W; i++) lanes[i] = 2 * i;
        for (int i = 0; i < TILE; i += W) {
            const Ints flag = (Ints{} + (int32_t)(flags[i / 16] >> i % 16 * 2)) >> lanes & 3;
            for (int r = 0; r < p.passed; r++) {
                const vf other = pick_lanes(flag == 1, set1(of_first[r]), zero());
                store(out + r * BLOCK + i, pick_lanes(flag == 0, set1(of_mean[r]), other));
            }
        }
    }
};

// Makes tiles of K ready for the loops that read words in scratch memory.
struct WidenedKeys {
    Pass &p;
    Widened &own;
    BaseScores base;

    WidenedKeys(Pass &pass, KTile &tile) : p(pass), own(*pass.scratch.widened), base(pass) {
        tile.table = LEVEL_OFFSET;
        tile.dim = tile.channels = own.key.dim;
        tile.lines = (own.key.half * 16 + own.key.dim - 1) / own.key.dim;
        tile.half = own.key.half * 64;
        tile.more = p.a.k.base.base;
    }
    // The j-th tile of those that are read at once.
    INLINE void widen(KTile &tile, int j, const Place &place, int64_t t, float *out) {
        uint32_t *words = own.words + j * WIDE_TILE;
        uint16_t *scale = own.scale + j * TILE;
        key_levels(words, (const char *)tile.words[j], own.key);
        scales_to_halves(scale, (const uint8_t *)tile.scale[j]);
        tile.words[j] = words;
        tile.scale[j] = scale;
        if (tile.more) base.write(place, t, out);
    }
};
// Tiles that are read where they lie.
struct NotWidened {
    NotWidened(Pass &, KTile &) {}
    INLINE void widen(KTile &, int, const Place &, int64_t, float *) {}
};
} // namespace KVP_NS
