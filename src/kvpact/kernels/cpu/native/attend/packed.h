// Packed tokens of a block: scores against K, weighted sums of V.
#pragma once
#include "attend/offset.h"
#include "attend/widened.h"

namespace KVP_NS {

constexpr int OFFSET_PAIRS = 16; // of an offset, whose factors are held at a time

// The factors of a group's channels go into q, its shifts into one number per query row.
INLINE void fold_keys(Pass &p, const float *q, int64_t t, float *inner, float *outer) {
    const kvp_stream &k = p.a.k;
    const int64_t unit = 2 * (int64_t)k.dim, width = p.job.k_width;
    const Place place(k, t);
    const uint16_t *fold = (const uint16_t *)place.group(k.fold, p.b, p.h, k.group, unit);
    const uint16_t *shift = (const uint16_t *)place.group(k.shift, p.b, p.h, k.group, unit);
    const vf middle = set1(k.middle);
    float *moved = k.shift_scaled ? inner : outer, *folded = p.scratch.folded;
    for (int r = 0; r < p.passed; r += 4) {
        vf acc[4] = {zero(), zero(), zero(), zero()};
        for (int64_t c = 0; c < width; c += W) {
            const vf factor = fold ? halves(fold, c, k.dim) : zero();
            const vf number = shift ? fma(factor, middle, halves(shift, c, k.dim)) : zero();
            for (int i = 0; i < 4; i++) { // rows on top are never looked at
                const vf x = load(q + (r + i) * width + c);
                acc[i] = fma(x, number, acc[i]);
                if (fold) store(folded + (r + i) * width + c, mul(x, factor));
            }
        }
        if (!shift) continue;
        alignas(16) float sums[4];
        sum4(sums, acc[0], acc[1], acc[2], acc[3]);
        for (int i = 0; i < 4; i++) moved[r + i] = sums[i];
    }
}

// The loops over tiles of K.
#if defined(KVP_WHOLE)
struct KeyLoops {
    Pass &p;
    KFunction one = nullptr, two = nullptr;
    WholeFunctions<8>::K whole_one = nullptr, whole_two = nullptr;
    WholeQuery whole;

    KeyLoops(Pass &pass, int groups) : p(pass), whole(query(pass)) {
        const kvp_stream &k = p.a.k;
        if (whole_format(k)) {
            by_whole_format(k, [&](auto f) {
                whole_one = f.k(p.passed, groups);
                whole_two = f.pair(p.passed, groups);
            });
            return;
        }
        one = by_format(k, [&](auto f) { return f.k(p.passed); });
        two = by_format(k, [&](auto f) { return groups == 1 ? f.pair(p.passed) : nullptr; });
    }
    static WholeQuery query(const Pass &p) {
        const Job &job = p.job;
        if (p.a.k.fold.base) return WholeQuery(p.scratch.query, MAX_ROWS, 0, job.k_width);
        return WholeQuery(job.whole + (p.b * p.a.heads + p.h) * job.whole_size, job.rows + MAX_ROWS, p.r0, job.k_width);
    }
    bool pairs() const { return two || whole_two; }
    // A group of tokens has other factors of channels: so has the query.
    INLINE void fold() {
        if (whole_one && p.a.k.fold.base) make_whole_query(whole, p.a.k, p.scratch.folded, p.passed);
    }
    INLINE void operator()(const KTile &tile, bool pair) const {
        if (whole_one) (pair ? whole_two : whole_one)(tile, p.scratch.key_levels, whole);
        else (pair ? two : one)(tile);
    }
};
#else
struct KeyLoops {
    KFunction one, two = nullptr;

    KeyLoops(Pass &p, int groups) {
        const kvp_stream &k = p.a.k;
        if (k.kind == KVP_TRELLIS_CODES) {
            one = Functions<Linear<8>, 8, true>::k(p.passed);
            return;
        }
        one = by_format(k, [&](auto f) { return f.k(p.passed); });
        two = by_format(k, [&](auto f) { return groups == 1 ? f.pair(p.passed) : nullptr; });
    }
    bool pairs() const { return two; }
    INLINE void fold() {}
    INLINE void operator()(const KTile &tile, bool pair) const { (pair ? two : one)(tile); }
};
#endif

// Writes the scores of n packed tokens from t on. TRELLIS: their codes are of one.
template <bool TRELLIS> static void packed_scores(Pass &p, int64_t t, int64_t n) {
    const kvp_stream &k = p.a.k;
    const int groups = p.k_size.groups;
    const float *q = p.job.rotated + (p.b * p.a.heads + p.h) * p.job.q_size() + p.r0 * p.job.k_width;
    float inner[MAX_ROWS] = {0}, outer[MAX_ROWS] = {0}, sums[MAX_ROWS * MOST_GROUPS];
    if (k.zero.base)
        for (int r = 0; r < p.passed; r++)
            for (int g = 0; g < groups; g++) {
                float total = 0;
                for (int c = g * k.channels; c < k.dim && c < (g + 1) * k.channels; c++)
                    total += q[r * p.job.k_width + c];
                sums[r * groups + g] = total;
            }
    KTile tile;
    tile.table = k.table;
    tile.q = k.fold.base ? p.scratch.folded : q;
    tile.sums = k.zero.base ? sums : nullptr;
    tile.inner = inner;
    tile.outer = outer;
    tile.width = p.job.k_width;
    tile.dim = k.dim;
    tile.channels = k.channels;
    tile.middle = k.middle;
    tile.more = false;
    KeyLoops loops(p, groups);
    std::conditional_t<TRELLIS, WidenedKeys, NotWidened> keys(p, tile);
    int64_t folded = -1;
    Place place(k, t);
    Ahead ahead(k, p.k_size, p, t);
    for (int64_t i = 0; i < n;) {
        if (k.group && (t + i) / k.group != folded) {
            folded = (t + i) / k.group;
            fold_keys(p, q, t + i, inner, outer);
            loops.fold();
        }
        const bool pair = loops.pairs() && i + TILE < n && (!k.group || (t + i + TILE) / k.group == folded);
        for (int j = 0; j <= pair; j++, place.step(k)) {
            tile.words[j] = (const uint32_t *)place.tile(k.codes, p.b, p.h, p.k_size.tile);
            tile.scale[j] = (const uint16_t *)place.tile(k.scale, p.b, p.h, p.k_size.side);
            tile.zero[j] = (const uint16_t *)place.tile(k.zero, p.b, p.h, p.k_size.side);
            tile.ahead[j] = ahead.next(tile.words[j]);
            keys.widen(tile, j, place, t + i + j * TILE, p.score[0] + i + j * TILE);
        }
        tile.out = p.score[0] + i;
        loops(tile, pair);
        i += pair ? 2 * TILE : TILE;
    }
}

// Adds the logits of what keys are stored without to the scores of ROWS query rows from r on.
template <int ROWS> INLINE void add_offset(Pass &p, int64_t t, int64_t n, int r) {
    const kvp_offset &o = p.a.k.offset;
    const float *q = p.job.q + (p.b * p.a.heads + p.h) * p.job.q_size() + (p.r0 + r) * p.job.k_width;
    for (int64_t first = 0; first < o.pairs; first += OFFSET_PAIRS) {
        const int count = (int)upto(OFFSET_PAIRS, o.pairs - first);
        float along[OFFSET_PAIRS][ROWS], across[OFFSET_PAIRS][ROWS];
        for (int k = 0; k < count; k++)
            for (int i = 0; i < ROWS; i++)
                offset_factors(o, p.h, first + k, q + i * p.job.k_width, &along[k][i], &across[k][i]);
        for (int64_t i = 0; i < n; i += W) {
            vf acc[ROWS];
            for (int j = 0; j < ROWS; j++) acc[j] = load(p.score[r + j] + i);
            for (int k = 0; k < count; k++) {
                const Waves waves(o, first + k, p.b, t);
                const vf c = waves.cosine(i), s = waves.sine(i);
                for (int j = 0; j < ROWS; j++)
                    acc[j] = fma(set1(along[k][j]), c, fma(set1(across[k][j]), s, acc[j]));
            }
            for (int j = 0; j < ROWS; j++) store(p.score[r + j] + i, acc[j]);
        }
    }
}

static void add_offsets(Pass &p, int64_t t, int64_t n) {
    int r = 0;
    for (; r + 4 <= p.rows; r += 4) add_offset<4>(p, t, n, r);
    for (; r < p.rows; r++) add_offset<1>(p, t, n, r);
}

// The slots of V from tile to tile.
struct ValueTiles {
    const uint16_t *scale[BLOCK / TILE], *zero[BLOCK / TILE];
    Place place;
    Ahead ahead;
    VRun run;

    ValueTiles(const Pass &p, float *acc, int64_t t) : place(p.a.v, t), ahead(p.a.v, p.v_size, p, t) {
        const kvp_stream &v = p.a.v;
        run.table = v.table;
        run.weights = p.scratch.weights;
        run.shift = p.scratch.shift;
        run.fold = nullptr;
        run.acc = acc;
        run.stride = p.job.partial_row();
        run.dim = v.dim;
        run.channels = v.channels;
        run.bits = v.bits;
        run.widening = nullptr;
    }
    INLINE void take(const Pass &p, int64_t tokens) {
        const kvp_stream &v = p.a.v;
        run.tiles = 0;
        for (int64_t i = 0; i < tokens; i += TILE, run.tiles++, place.step(v)) {
            run.words[run.tiles] = (const uint32_t *)place.tile(v.codes, p.b, p.h, p.v_size.tile);
            run.ahead[run.tiles] = ahead.next(run.words[run.tiles]);
            const char *side = place.tile(v.scale, p.b, p.h, p.v_size.side);
            if (v.kind == KVP_TRELLIS_CODES) {
                uint16_t *halves = p.scratch.widened->scale + run.tiles * TILE;
                scales_to_halves(halves, (const uint8_t *)side);
                side = (const char *)halves;
            }
            scale[run.tiles] = (const uint16_t *)side;
            zero[run.tiles] = (const uint16_t *)place.tile(v.zero, p.b, p.h, p.v_size.side);
        }
    }
};

// Runs with the tiles of n tokens from t on: those of a group of tokens, or all; `i`: tokens of the block before.
template <class F> INLINE void each_piece(const Pass &p, ValueTiles &tiles, int64_t t, int64_t n, F &&run) {
    const kvp_stream &v = p.a.v;
    const int64_t step = v.group && v.group < BLOCK ? v.group : BLOCK, unit = 2 * (int64_t)v.dim;
    for (int64_t i = 0; i < n;) {
        const int64_t end = upto(i + step - (t + i) % step, n);
        memset(p.scratch.shift, 0, sizeof(float) * p.v_size.groups * MAX_ROWS);
        tiles.take(p, end - i);
        tiles.run.fold = (const uint16_t *)Place(v, t + i).group(v.fold, p.b, p.h, v.group ? v.group : 1, unit);
        run(i);
        i = end;
    }
}

// The weights of R rows from token `i` of the block on, times the scales of a group of channels; and
// the sums of weights times zeros.
template <int R> static void weigh(Pass &p, const ValueTiles &tiles, int g, int r0, int64_t i) {
    const float(*from)[BLOCK] = p.weight + r0;
    float *to = p.scratch.weights + (g * MAX_ROWS + r0) * BLOCK;
    const vf middle = set1(p.a.v.middle);
    vf moved[4] = {zero(), zero(), zero(), zero()};
    for (int tile = 0; tile < tiles.run.tiles; tile++)
        for (int c = 0; c < TILE; c += W) {
            const int side = g * TILE + c, at = tile * TILE + c;
            const vf s = tiles.scale[tile] ? load_half(tiles.scale[tile] + side) : set1(1.0f);
            for (int r = 0; r < R; r++) store(to + r * BLOCK + at, mul(load(&from[r][i + at]), s));
            if (!tiles.zero[tile]) continue;
            const vf z = fma(s, middle, load_half(tiles.zero[tile] + side));
            for (int r = 0; r < R; r++) moved[r] = fma(load(&from[r][i + at]), z, moved[r]);
        }
    if (tiles.zero[0]) store_sums(p.scratch.shift + g * MAX_ROWS + r0, 1, moved[0], moved[1], moved[2], moved[3]);
}

static void packed_values(Pass &p, float *acc, int64_t t, int64_t n) {
    const kvp_stream &v = p.a.v;
    const int groups = p.v_size.groups;
    ValueTiles tiles(p, acc, t);
    VRun &a = tiles.run;
    each_piece(p, tiles, t, n, [&](int64_t i) {
        for (int g = 0; g < groups; g++)
            for (int r = 0; r < p.passed; r += 4) {
                const int rows = (int)upto(4, p.passed - r);
                (rows == 1 ? weigh<1> : rows == 2 ? weigh<2> : rows == 3 ? weigh<3> : weigh<4>)(p, tiles, g, r, i);
            }
        if (v.kind == KVP_TRELLIS_CODES) {
            Widened &own = *p.scratch.widened;
            const Widening widening(own.value, own.words, own.edges);
            a.widening = &widening;
            a.table = own.value.level_table();
            by_wide(own.value.wide, [&](auto f) { return f.v(p.passed); })(a);
        } else by_format(v, [&](auto f) { return f.v(p.passed); })(a);
    });
}
} // namespace KVP_NS
