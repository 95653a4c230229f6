// Packed tokens of a block whose codes are of a trellis: their words are made wider before they are read.
#pragma once
#include "attend/pass.h"

namespace KVP_NS {

// Bytes of wider words of V that are made at a time: more would drive out what was prefetched.
constexpr int64_t WIDENED = 4 << 10;

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
    // Writes those of the tile at `t`.
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
        for (int t = 0; t < TILE; t += W) {
            const Ints flag = (Ints{} + (int32_t)(flags[t / 16] >> t % 16 * 2)) >> lanes & 3;
            for (int r = 0; r < p.passed; r++) {
                const vf other = pick_lanes(flag == 1, set1(of_first[r]), zero());
                store(out + r * BLOCK + t, pick_lanes(flag == 0, set1(of_mean[r]), other));
            }
        }
    }
};

// The scores of keys whose words are made wider first, block by block.
static void widened_scores(Pass &p, int64_t t, int64_t n) {
    const kvp_stream &k = p.a.k;
    const Trellis &x = p.scratch.widened->key;
    const float *q = p.job.rotated + (p.b * p.a.heads + p.h) * p.job.q_size() + p.r0 * p.job.k_width;
    const bool based = k.base.base;
    KFunction one[MOST_BLOCKS], two[MOST_BLOCKS];
    bool pairs = true;
    for (int i = 0; i < x.blocks; i++) {
        one[i] = by_wide(x.block[i].bits, x.wide, [&](auto f) { return f.k(p.passed); });
        two[i] = by_wide(x.block[i].bits, x.wide, [&](auto f) { return f.pair(p.passed); });
        pairs = pairs && two[i];
    }
    BaseScores base(p);
    const float none[MAX_ROWS] = {0};
    KTile tile;
    tile.sums = nullptr;
    tile.inner = tile.outer = none;
    tile.width = p.job.k_width;
    tile.channels = k.dim;
    tile.middle = 0;
    tile.half = x.half * 64;
    Place place(k, t);
    Ahead ahead(k, p.k_size, p, t);
    for (int64_t i = 0; i < n;) {
        const int count = pairs && i + TILE < n ? 2 : 1;
        const char *codes[2], *next[2];
        tile.out = p.score[0] + i;
        for (int j = 0; j < count; j++, place.step(k)) {
            codes[j] = place.tile(k.codes, p.b, p.h, p.k_size.tile);
            next[j] = ahead.next(codes[j]);
            scales_to_halves(p.scratch.widened->scale + j * TILE, (const uint8_t *)place.tile(k.scale, p.b, p.h, p.k_size.side));
            tile.scale[j] = p.scratch.widened->scale + j * TILE;
            tile.zero[j] = nullptr;
            if (based) base.write(place, t + i + j * TILE, tile.out + j * TILE);
        }
        for (int b = 0, lines = 0; b < x.blocks; b++) {
            const TrellisBlock &block = x.block[b];
            for (int j = 0; j < count; j++) {
                tile.ahead[j] = next[j] + lines * 64;
                uint32_t *to = x.place(p.scratch.widened->words, b) + j * WIDE_TILE;
                widen_keys(to, codes[j], x, b);
                tile.words[j] = to;
            }
            tile.table = block.table;
            tile.q = q + block.first;
            tile.dim = block.dim;
            tile.more = based || b;
            tile.lines = (block.bits + 1) / 2;
            lines += block.dim * block.bits / 32;
            (count == 2 ? two : one)[b](tile);
        }
        i += count * TILE;
    }
}

// Weighted sums of V, a few tiles at a time, whose words are made wider first.
static void widened_values(const Pass &p, const VRun &all) {
    const Trellis &x = p.scratch.widened->value;
    const TrellisBlock &block = x.block[0];
    const VFunction add = by_wide(block.bits, x.wide, [&](auto f) { return f.v(p.passed); });
    const int most = (int)from(WIDENED / (4 * x.wide_words), 1);
    for (int first = 0; first < all.tiles; first += most) {
        VRun a = all;
        a.tiles = (int)upto(most, all.tiles - first);
        for (int i = 0; i < a.tiles; i++) {
            uint32_t *to = p.scratch.widened->words + i * x.wide_words;
            widen_values(to, (const char *)all.words[first + i], block, x.wide);
            a.words[i] = to;
            a.ahead[i] = all.ahead[first + i];
        }
        a.weights += first * TILE;
        a.table = block.table;
        add(a);
    }
}
} // namespace KVP_NS
