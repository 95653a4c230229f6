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
    INLINE void write(const Place &place, int64_t t, KeyTile &tile) {
        if (x.center && t / x.center != group) {
            group = t / x.center;
            const int8_t *mean = (const int8_t *)place.group(p.a.k.mean, p.b, p.h, x.center, p.a.k.dim);
            read_mean(p.scratch.widened->mean, mean, (const uint16_t *)place.group(p.a.k.step, p.b, p.h, x.center, 2), p.a.k.dim);
            dot_rows(of_mean, p.scratch.widened->mean, q, p.job.k_width, p.passed);
        }
        tile.flags = (const uint32_t *)place.tile(p.a.k.base, p.b, p.h, 8);
        for (int r = 0; r < p.passed; r++) {
            tile.base[r][0] = of_mean[r];
            tile.base[r][1] = of_first[r];
            tile.base[r][2] = tile.base[r][3] = 0;
        }
    }
};

// Writes the scores of one or two tiles.
#if defined(KVP_AVX512)
struct TileScores {
    Pass &p;
    const Trellis &x;
    const QueryDigits q;
    int digits;

    TileScores(Pass &pass, const Trellis &trellis)
        : p(pass), x(trellis), q(pass.job, pass.b * pass.a.heads + pass.h, pass.r0), digits(p.a.fast ? 1 : 3) {}
    int most() const { return p.passed * digits <= AT_MOST_PAIRS ? 2 : 1; }
    INLINE void write(const KeyTile *tile, int count) {
        const uint32_t *words[2];
        for (int j = 0; j < count; j++) {
            uint32_t *to = p.scratch.widened->words + j * WIDE_TILE;
            key_levels(to, tile[j].codes, x);
            words[j] = to;
        }
        (digits == 1 ? digit_keys<1> : digit_keys<3>)(p.passed, count == 2)(tile, words, x, q);
    }
};
#else
struct TileScores {
    Pass &p;
    const Trellis &x;
    KFunction function;
    KTile part;
    const float none[MAX_ROWS] = {0};

    TileScores(Pass &pass, const Trellis &trellis) : p(pass), x(trellis) {
        function = Functions<Linear<8>, 8, true>::k(p.passed);
        part.words[0] = p.scratch.widened->words;
        part.scale[0] = p.scratch.widened->scale;
        part.table = LEVEL_OFFSET;
        part.q = p.job.rotated + (p.b * p.a.heads + p.h) * p.job.q_size() + p.r0 * p.job.k_width;
        part.dim = x.dim;
        part.lines = (x.half * 16 + x.dim - 1) / x.dim;
        part.zero[0] = nullptr;
        part.sums = nullptr;
        part.inner = part.outer = none;
        part.width = p.job.k_width;
        part.channels = x.dim;
        part.middle = 0;
        part.half = x.half * 64;
    }
    int most() const { return 1; }
    INLINE void write(const KeyTile *tile, int) {
        if (tile->flags) write_bases(*tile);
        scales_to_halves(p.scratch.widened->scale, tile->scale);
        key_levels(p.scratch.widened->words, tile->codes, x);
        part.ahead[0] = tile->ahead;
        part.more = tile->flags;
        part.out = tile->out;
        function(part);
    }
    INLINE void write_bases(const KeyTile &tile) {
        Ints lanes = {};
        for (int i = 0; i < W; i++) lanes[i] = 2 * i;
        for (int t = 0; t < TILE; t += W) {
            const Ints flag = (Ints{} + (int32_t)(tile.flags[t / 16] >> t % 16 * 2)) >> lanes & 3;
            for (int r = 0; r < p.passed; r++) {
                const vf other = pick_lanes(flag == 1, set1(tile.base[r][1]), zero());
                store(tile.out + r * BLOCK + t, pick_lanes(flag == 0, set1(tile.base[r][0]), other));
            }
        }
    }
};
#endif

// The scores of keys of a trellis, whose words are made wider first.
static void widened_scores(Pass &p, int64_t t, int64_t n) {
    const kvp_stream &k = p.a.k;
    TileScores scores(p, p.scratch.widened->key);
    BaseScores base(p);
    Place place(k, t);
    Ahead ahead(k, p.k_size, p, t);
    KeyTile tile[2];
    tile[0].flags = tile[1].flags = nullptr;
    for (int64_t i = 0; i < n;) {
        int count = 0;
        for (; count < scores.most() && i < n; count++, i += TILE, place.step(k)) {
            KeyTile &x = tile[count];
            x.codes = place.tile(k.codes, p.b, p.h, p.k_size.tile);
            x.ahead = ahead.next(x.codes);
            x.scale = (const uint8_t *)place.tile(k.scale, p.b, p.h, p.k_size.side);
            x.out = p.score[0] + i;
            if (k.base.base) base.write(place, t + i, x);
        }
        scores.write(tile, count);
    }
}

// Weighted sums of V of a trellis.
static void widened_values(Pass &p, VRun &a) {
    Widened &own = *p.scratch.widened;
    const Widening widening(own.value, own.words, own.edges);
#if defined(KVP_AVX512)
    const auto by_digits = [&](auto digits) {
        if (own.value.wide == 4) own.weights.make<4, digits()>(a, p.passed, widening.block.unit);
        else own.weights.make<8, digits()>(a, p.passed, widening.block.unit);
        digit_values<digits()>(p.passed)(a, widening, own.weights);
    };
    if (p.a.fast) by_digits(std::integral_constant<int, 2>());
    else by_digits(std::integral_constant<int, 3>());
#else
    a.widening = &widening;
    a.table = own.value.level_table();
    by_wide(own.value.wide, [&](auto f) { return f.v(p.passed); })(a);
#endif
}
} // namespace KVP_NS
