// Packed tokens of a block whose codes are of a trellis: their words are made wider before they are read.
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

// Products with one or two tiles, which are added to the bases' where there are such.
#if defined(KVP_AVX512)
struct TileProducts {
    Pass &p;
    const Trellis &x;
    const QueryDigits q;
    ByteKeys tile;

    TileProducts(Pass &pass, const Trellis &trellis)
        : p(pass), x(trellis), q(pass.job, pass.b * pass.a.heads + pass.h, pass.r0) {
        tile.trellis = &x;
        tile.more = p.a.k.base.base;
    }
    int most() const { return DigitFunctions<3>::pairs(p.passed) ? 2 : 1; }
    INLINE void add(int count, const char *const *codes, const char *const *next, float *out) {
        for (int j = 0; j < count; j++) {
            uint32_t *words = p.scratch.widened->words + j * WIDE_TILE;
            for (int b = 0; b < x.blocks; b++) widen_keys<Wider>(x.in_bytes(words, b), codes[j], x, b);
            tile.words[j] = words;
            tile.scale[j] = p.scratch.widened->scale + j * TILE;
            tile.ahead[j] = next[j];
        }
        tile.out = out;
        DigitFunctions<3>::k(p.passed, count == 2)(tile, q);
    }
};
#else
struct TileProducts {
    Pass &p;
    const Trellis &x;
    const float *q;
    KFunction function;
    KTile tile;
    const float none[MAX_ROWS] = {0};

    TileProducts(Pass &pass, const Trellis &trellis) : p(pass), x(trellis) {
        q = p.job.rotated + (p.b * p.a.heads + p.h) * p.job.q_size() + p.r0 * p.job.k_width;
        function = by_wide(x.wide, [&](auto f) { return f.k(p.passed); });
        tile.zero[0] = nullptr;
        tile.sums = nullptr;
        tile.inner = tile.outer = none;
        tile.width = p.job.k_width;
        tile.channels = p.a.k.dim;
        tile.middle = 0;
        tile.half = x.half * 64;
    }
    int most() const { return 1; }
    INLINE void add(int, const char *const *codes, const char *const *next, float *out) {
        tile.out = out;
        tile.scale[0] = p.scratch.widened->scale;
        for (int b = 0, lines = 0; b < x.blocks; b++) {
            const TrellisBlock &block = x.block[b];
            uint32_t *words = x.in_bytes(p.scratch.widened->words, b);
            widen_keys<Wider>(words, codes[0], x, b);
            tile.words[0] = words;
            tile.ahead[0] = next[0] + lines * 64;
            tile.table = x.level_table(b);
            tile.q = q + block.first;
            tile.dim = block.dim;
            tile.more = p.a.k.base.base || b;
            tile.lines = (block.bits + 1) / 2;
            lines += block.dim * block.bits / 32;
            function(tile);
        }
    }
};
#endif

// The scores of keys of a trellis, whose words are made wider first.
static void widened_scores(Pass &p, int64_t t, int64_t n) {
    const kvp_stream &k = p.a.k;
    TileProducts products(p, p.scratch.widened->key);
    BaseScores base(p);
    Place place(k, t);
    Ahead ahead(k, p.k_size, p, t);
    for (int64_t i = 0; i < n;) {
        const int count = (int)upto(products.most(), (n - i + TILE - 1) / TILE);
        const char *codes[2], *next[2];
        float *out = p.score[0] + i;
        for (int j = 0; j < count; j++, place.step(k)) {
            codes[j] = place.tile(k.codes, p.b, p.h, p.k_size.tile);
            next[j] = ahead.next(codes[j]);
            scales_to_halves(p.scratch.widened->scale + j * TILE, (const uint8_t *)place.tile(k.scale, p.b, p.h, p.k_size.side));
            if (k.base.base) base.write(place, t + i + j * TILE, out + j * TILE);
        }
        products.add(count, codes, next, out);
        i += count * TILE;
    }
}

// Weighted sums of V of a trellis.
static void widened_values(Pass &p, VRun &a) {
    Widened &own = *p.scratch.widened;
    const Widening widening(own.value, own.words, own.edges);
#if defined(KVP_AVX512)
    if (own.value.wide == 4) own.weights.make<4, 3>(a, p.passed, widening.block.unit);
    else own.weights.make<8, 3>(a, p.passed, widening.block.unit);
    DigitFunctions<3>::v(p.passed)(a, widening, own.weights);
#else
    a.widening = &widening;
    a.table = own.value.level_table(0);
    by_wide(own.value.wide, [&](auto f) { return f.v(p.passed); })(a);
#endif
}
} // namespace KVP_NS
