// Packed tokens of a block: scores against K, weighted sums of V.
#pragma once
#include "attend/exact.h"
#if defined(KVP_AVX512)
#include "attend/fast.h"
#endif
#include "attend/formats.h"
#include "attend/offset.h"
#include "trellis_numbers.h"

namespace KVP_NS {

// Passes whose scores are computed one after the other before any of their values is read: the
// longer the pieces of memory that are read in their order, the faster.
constexpr int TURN = 8;
constexpr int OFFSET_PAIRS = 16; // of an offset, whose factors are held at a time
constexpr int64_t WIDENED = 4 << 10; // bytes of wider words of V that are made at a time

// Memory of one thread for its task.
struct TaskScratch {
    alignas(64) float folded[MAX_ROWS * MOST_DIM];
    alignas(64) float score[TURN][MAX_ROWS][BLOCK], weight[MAX_ROWS][BLOCK];
    alignas(64) float weights[MOST_GROUPS * MAX_ROWS * BLOCK]; // weight times scale, by channel group
    alignas(64) float shift[MOST_GROUPS * MAX_ROWS];
    Trellis key_trellis, value_trellis;
    alignas(64) uint32_t wide[2 * WIDE_TILE]; // their words
    alignas(64) uint16_t scale[BLOCK];        // and scales
    alignas(64) float mean[MOST_DIM];
#if defined(KVP_AVX512)
    vi key_table;
    FastValues values;
#endif
};

// Sizes of a stream's slots, reckoned once per task.
struct Sizes {
    int64_t tile, side; // bytes of a tile's codes, and of one number per token
    int groups;
    Sizes(const kvp_stream &s, bool key) : tile(tile_bytes(s, key)), groups(groups_of(s)) {
        side = side_bytes(s);
    }
};

// Everything that the query rows of one pass need.
struct Pass {
    const Job &job;
    const kvp_attend_args &a;
    const Sizes &k_size, &v_size;
    int64_t b, h, first_head, last_head, end; // of the task: its heads, and the end of its tokens
    int64_t r0;
    int rows, passed;
    TaskScratch &scratch;
    float (*score)[BLOCK];
    float (*weight)[BLOCK];
};

// The slots that are read next: those of the next head, or those a block later. Memory is read in
// its order, but prefetching by the hardware alone falls behind.
struct Ahead {
    const kvp_stream &x;
    const Sizes &size;
    int64_t b, h, left; // tokens that are left
    Place place;

    Ahead(const kvp_stream &stream, const Sizes &sizes, const Pass &p, int64_t t)
        : x(stream), size(sizes), b(p.b), h(p.h + 1), left(upto(x.exact_from, p.end) - t), place(x, t) {
        if (h < p.last_head) return;
        h = p.first_head;
        left -= p.job.block;
        place = Place(x, left > 0 ? t + p.job.block : t);
    }
    // Prefetches what stands beside the codes of a tile; returns where the codes are, and goes on.
    INLINE const char *next(const void *otherwise) {
        if (left <= 0) return (const char *)otherwise;
        lines(place.tile(x.scale, b, h, size.side), size.side);
        lines(place.tile(x.zero, b, h, size.side), size.side);
        if (x.group && (uint32_t)place.inside % (uint32_t)x.group == 0) {
            lines(place.group(x.fold, b, h, x.group, 2 * (int64_t)x.dim), 2 * (int64_t)x.dim);
            lines(place.group(x.shift, b, h, x.group, 2 * (int64_t)x.dim), 2 * (int64_t)x.dim);
        }
        const char *codes = place.tile(x.codes, b, h, size.tile);
        place.step(x);
        left -= TILE;
        return codes;
    }
    static INLINE void lines(const char *at, int64_t bytes) {
        if (at)
            for (int64_t i = 0; i < bytes; i += 64) prefetch(at + i);
    }
};

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
        memcpy(p.scratch.mean, x.first + p.h * dim, sizeof(float) * (size_t)dim);
        for (int64_t c = dim; c < p.job.k_width; c++) p.scratch.mean[c] = 0;
        dot_rows(of_first, p.scratch.mean, q, p.job.k_width, p.passed);
    }
    // Writes those of the tile at `t`.
    INLINE void write(const Place &place, int64_t t, float *out) {
        if (x.center && t / x.center != group) {
            group = t / x.center;
            const int8_t *mean = (const int8_t *)place.group(p.a.k.mean, p.b, p.h, x.center, p.a.k.dim);
            read_mean(p.scratch.mean, mean, (const uint16_t *)place.group(p.a.k.step, p.b, p.h, x.center, 2), p.a.k.dim);
            dot_rows(of_mean, p.scratch.mean, q, p.job.k_width, p.passed);
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
    const Trellis &x = p.scratch.key_trellis;
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
            scales_to_halves(p.scratch.scale + j * TILE, (const uint8_t *)place.tile(k.scale, p.b, p.h, p.k_size.side));
            tile.scale[j] = p.scratch.scale + j * TILE;
            tile.zero[j] = nullptr;
            if (based) base.write(place, t + i + j * TILE, tile.out + j * TILE);
        }
        for (int b = 0, lines = 0; b < x.blocks; b++) {
            const TrellisBlock &block = x.block[b];
            for (int j = 0; j < count; j++) {
                tile.ahead[j] = next[j] + lines * 64;
                uint32_t *to = x.place(p.scratch.wide, b) + j * WIDE_TILE;
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
    }
    INLINE void take(const Pass &p, int64_t tokens) {
        const kvp_stream &v = p.a.v;
        run.tiles = 0;
        for (int64_t i = 0; i < tokens; i += TILE, run.tiles++, place.step(v)) {
            run.words[run.tiles] = (const uint32_t *)place.tile(v.codes, p.b, p.h, p.v_size.tile);
            run.ahead[run.tiles] = ahead.next(run.words[run.tiles]);
            const char *side = place.tile(v.scale, p.b, p.h, p.v_size.side);
            if (v.kind == KVP_TRELLIS_CODES) {
                uint16_t *halves = p.scratch.scale + run.tiles * TILE;
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

// The same, a few tiles at a time, whose words are made wider first.
static void widened_values(const Pass &p, const VRun &all) {
    const Trellis &x = p.scratch.value_trellis;
    const TrellisBlock &block = x.block[0];
    const VFunction add = by_wide(block.bits, x.wide, [&](auto f) { return f.v(p.passed); });
    const int most = (int)from(WIDENED / (4 * x.wide_words), 1);
    for (int first = 0; first < all.tiles; first += most) {
        VRun a = all;
        a.tiles = (int)upto(most, all.tiles - first);
        for (int i = 0; i < a.tiles; i++) {
            uint32_t *to = p.scratch.wide + i * x.wide_words;
            widen_values(to, (const char *)all.words[first + i], block, x.wide);
            a.words[i] = to;
            a.ahead[i] = all.ahead[first + i];
        }
        a.weights += first * TILE;
        a.table = block.table;
        add(a);
    }
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
