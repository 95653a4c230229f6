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

static void packed_scores(Pass &p, int64_t t, int64_t n) {
    const kvp_stream &k = p.a.k;
    if (k.kind == KVP_TRELLIS_CODES) return widened_scores(p, t, n);
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
    const KFunction one = by_format(k, [&](auto f) { return f.k(p.passed); });
    const KFunction two = by_format(k, [&](auto f) { return groups == 1 ? f.pair(p.passed) : nullptr; });
#if defined(KVP_AVX512)
    const bool in_bytes = p.a.fast && fast_format(k);
    const auto fast = by_fast_bits(k.bits, [&](auto f) { return f.k(p.passed); });
    const auto fast_pair = by_fast_bits(k.bits, [&](auto f) { return f.pair(p.passed, groups); });
    const FastKeys keys(p.job, p.b * p.a.heads + p.h, p.r0, p.scratch.key_table);
    const bool pairs = in_bytes ? fast_pair != nullptr : two != nullptr;
#else
    const bool pairs = two != nullptr;
#endif
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
    int64_t folded = -1;
    Place place(k, t);
    Ahead ahead(k, p.k_size, p, t);
    for (int64_t i = 0; i < n;) {
        if (k.group && (t + i) / k.group != folded) {
            folded = (t + i) / k.group;
            fold_keys(p, q, t + i, inner, outer);
        }
        const bool pair = pairs && i + TILE < n && (!k.group || (t + i + TILE) / k.group == folded);
        for (int j = 0; j <= pair; j++, place.step(k)) {
            tile.words[j] = (const uint32_t *)place.tile(k.codes, p.b, p.h, p.k_size.tile);
            tile.scale[j] = (const uint16_t *)place.tile(k.scale, p.b, p.h, p.k_size.side);
            tile.zero[j] = (const uint16_t *)place.tile(k.zero, p.b, p.h, p.k_size.side);
            tile.ahead[j] = ahead.next(tile.words[j]);
        }
        tile.out = p.score[0] + i;
#if defined(KVP_AVX512)
        if (in_bytes) (pair ? fast_pair : fast)(tile, keys);
        else
#endif
            (pair ? two : one)(tile);
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
    const int64_t step = v.group && v.group < BLOCK ? v.group : BLOCK;
    ValueTiles tiles(p, acc, t);
    VRun &a = tiles.run;
    for (int64_t i = 0; i < n;) {
        const int64_t end = upto(i + step - (t + i) % step, n);
        memset(p.scratch.shift, 0, sizeof(float) * groups * MAX_ROWS);
        tiles.take(p, end - i);
        for (int g = 0; g < groups; g++)
            for (int r = 0; r < p.passed; r += 4) {
                const int rows = (int)upto(4, p.passed - r);
                (rows == 1 ? weigh<1> : rows == 2 ? weigh<2> : rows == 3 ? weigh<3> : weigh<4>)(p, tiles, g, r, i);
            }
        a.fold = (const uint16_t *)Place(v, t + i).group(v.fold, p.b, p.h, v.group ? v.group : 1, 2 * (int64_t)v.dim);
        i = end;
#if defined(KVP_AVX512)
        if (p.a.fast && fast_format(v)) {
            FastValues &fast = p.scratch.values;
            by_fast_bits(v.bits, [&](auto f) {
                make_digits<decltype(f)::bits>(fast, a, p.passed);
                f.v(p.passed)(a, fast);
                return 0;
            });
            continue;
        }
#endif
        if (v.kind == KVP_TRELLIS_CODES) widened_values(p, a);
        else by_format(v, [&](auto f) { return f.v(p.passed); })(a);
    }
}
} // namespace KVP_NS
