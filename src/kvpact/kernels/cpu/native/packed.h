// Packed tokens of a block: scores against K, weighted sums of V.
#pragma once
#include "exact.h"
#if defined(KVP_AVX512)
#include "fast.h"
#endif
#include "formats.h"

namespace KVP_NS {

// Memory of one thread for its task.
struct Scratch {
    alignas(64) float folded[MAX_ROWS * MOST_DIM];
    alignas(64) float score[MAX_ROWS][BLOCK], weight[MAX_ROWS][BLOCK];
    alignas(64) float weights[MOST_GROUPS * MAX_ROWS * BLOCK]; // weight times scale, by channel group
    alignas(64) float shift[MOST_GROUPS * MAX_ROWS];
#if defined(KVP_AVX512)
    int64_t fast_row; // the first query row that `keys` was made for; -1: none
    FastKeys keys;
    FastValues values;
#endif
};

// Sizes of a stream's slots, reckoned once per task.
struct Sizes {
    int64_t tile, side; // bytes of a tile's codes, and of one number per token
    int groups;
    Sizes(const kvp_stream &s, bool key) : tile(4 * words_of_tile(s, key)), groups(groups_of(s)) {
        side = 2 * TILE * (int64_t)groups;
    }
};

// Everything that the query rows of one pass need.
struct Pass {
    const Job &job;
    const kvp_attend_args &a;
    const Sizes &k_size, &v_size;
    int64_t b, h, r0;
    int rows, passed;
    Scratch &scratch;
    float (*score)[BLOCK];
    float (*weight)[BLOCK];
};

// What stands beside the codes of a tile is small and far away: no hardware would guess it.
INLINE void prefetch_side(const kvp_stream &x, const Sizes &size, const Pass &p, int64_t t, const Place &place) {
    const char *scale = place.tile(x.scale, p.b, p.h, size.side), *zero = place.tile(x.zero, p.b, p.h, size.side);
    if (scale)
        for (int64_t i = 0; i < size.side; i += 64) prefetch(scale + i);
    if (zero)
        for (int64_t i = 0; i < size.side; i += 64) prefetch(zero + i);
    if (!x.group || (uint32_t)t % (uint32_t)x.group) return;
    const int64_t bytes = 2 * (int64_t)x.dim;
    const char *fold = place.group(x.fold, p.b, p.h, x.group, bytes);
    const char *shift = place.group(x.shift, p.b, p.h, x.group, bytes);
    if (fold)
        for (int64_t i = 0; i < bytes; i += 64) prefetch(fold + i);
    if (shift)
        for (int64_t i = 0; i < bytes; i += 64) prefetch(shift + i);
}

INLINE void fold_keys(Pass &p, const float *q, int64_t t, float *inner, float *outer) {
    const kvp_stream &k = p.a.k;
    const int64_t unit = 2 * (int64_t)k.dim;
    const Place place(k, t);
    const char *fold = place.group(k.fold, p.b, p.h, k.group, unit);
    const char *shift = place.group(k.shift, p.b, p.h, k.group, unit);
    alignas(64) float number[MOST_DIM], moved[MOST_DIM];
    memset(number, 0, sizeof(float) * p.job.k_width);
    if (fold) to_floats(number, fold, KVP_F16, k.dim);
    if (shift) {
        memset(moved, 0, sizeof(float) * p.job.k_width);
        to_floats(moved, shift, KVP_F16, k.dim);
        if (k.middle != 0) add_scaled(moved, number, k.middle, p.job.k_width);
        for (int r = 0; r < p.passed; r++)
            (k.shift_scaled ? inner : outer)[r] = dot(q + r * p.job.k_width, moved, p.job.k_width);
    }
    if (fold) {
        for (int r = 0; r < p.passed; r++)
            for (int64_t c = 0; c < p.job.k_width; c += W) {
                const int64_t i = r * p.job.k_width + c;
                store(p.scratch.folded + i, mul(load(q + i), load(number + c)));
            }
    }
}

static void packed_scores(Pass &p, int64_t t, int64_t n) {
    const kvp_stream &k = p.a.k, &v = p.a.v;
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
    const KFunction two = by_format(k, [&](auto f) { return f.pair(p.passed); });
#if defined(KVP_AVX512)
    const bool in_bytes = p.a.fast && fast_format(k);
    const auto fast = by_fast_bits(k.bits, [&](auto f) { return f.k(p.passed); });
    if (in_bytes && p.scratch.fast_row != p.r0) {
        by_fast_bits(k.bits, [&](auto f) {
            make_fast_keys<decltype(f)::bits>(p.scratch.keys, k, q, p.job.k_width, p.passed);
            return 0;
        });
        p.scratch.fast_row = p.r0;
    }
#else
    const bool in_bytes = false;
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
    int64_t folded = -1;
    for (int64_t i = 0; i < n;) {
        if (k.group && (t + i) / k.group != folded) {
            folded = (t + i) / k.group;
            fold_keys(p, q, t + i, inner, outer);
        }
        const bool pair = two && groups == 1 && !in_bytes && i + TILE < n && (!k.group || (t + i + TILE) / k.group == folded);
        for (int j = 0; j <= pair; j++) {
            const int64_t at = t + i + j * TILE;
            const Place place(k, at);
            tile.words[j] = (const uint32_t *)place.tile(k.codes, p.b, p.h, p.k_size.tile);
            tile.scale[j] = (const uint16_t *)place.tile(k.scale, p.b, p.h, p.k_size.side);
            tile.zero[j] = (const uint16_t *)place.tile(k.zero, p.b, p.h, p.k_size.side);
            tile.ahead[j] = (const char *)tile.words[j];
            if (at < v.exact_from) {
                const Place next(v, at);
                tile.ahead[j] = next.tile(v.codes, p.b, p.h, p.v_size.tile);
                prefetch_side(v, p.v_size, p, at, next);
            }
        }
        tile.out = p.score[0] + i;
#if defined(KVP_AVX512)
        if (in_bytes) fast(tile, p.scratch.keys);
        else
#endif
            (pair ? two : one)(tile);
        i += pair ? 2 * TILE : TILE;
    }
}

static void packed_values(Pass &p, float *acc, int64_t t, int64_t n) {
    const kvp_stream &v = p.a.v, &k = p.a.k;
    const int groups = p.v_size.groups;
    float *weights = p.scratch.weights, *shift = p.scratch.shift;
    const uint16_t *scale[BLOCK / TILE], *zeros[BLOCK / TILE];
    VRun a;
    a.table = v.table;
    a.weights = weights;
    a.shift = shift;
    a.acc = acc;
    a.stride = p.job.partial_row();
    a.dim = v.dim;
    a.channels = v.channels;
    const int64_t step = v.group && v.group < BLOCK ? v.group : BLOCK;
    for (int64_t i = 0; i < n;) {
        const int64_t end = upto(i + step - (t + i) % step, n);
        a.tiles = 0;
        memset(shift, 0, sizeof(float) * groups * MAX_ROWS);
        for (int64_t j = i; j < end; j += TILE, a.tiles++) {
            const Place place(v, t + j);
            a.words[a.tiles] = (const uint32_t *)place.tile(v.codes, p.b, p.h, p.v_size.tile);
            a.ahead[a.tiles] = (const char *)a.words[a.tiles];
            if (t + j + BLOCK < k.exact_from) {
                const Place next(k, t + j + BLOCK);
                a.ahead[a.tiles] = next.tile(k.codes, p.b, p.h, p.k_size.tile);
                prefetch_side(k, p.k_size, p, t + j + BLOCK, next);
            }
            scale[a.tiles] = (const uint16_t *)place.tile(v.scale, p.b, p.h, p.v_size.side);
            zeros[a.tiles] = (const uint16_t *)place.tile(v.zero, p.b, p.h, p.v_size.side);
        }
        for (int g = 0; g < groups; g++) {
            vf moved[MAX_ROWS];
            for (int r = 0; r < MAX_ROWS; r++) moved[r] = zero();
            for (int tile = 0; tile < a.tiles; tile++)
                for (int c = 0; c < TILE; c += W) {
                    const int side = g * TILE + c, at = tile * TILE + c;
                    const vf s = scale[tile] ? load_half(scale[tile] + side) : set1(1.0f);
                    for (int r = 0; r < p.passed; r++)
                        store(weights + (g * MAX_ROWS + r) * BLOCK + at, mul(load(&p.weight[r][i + at]), s));
                    if (!zeros[tile]) continue;
                    const vf z = fma(s, set1(v.middle), load_half(zeros[tile] + side));
                    for (int r = 0; r < p.passed; r++) moved[r] = fma(load(&p.weight[r][i + at]), z, moved[r]);
                }
            if (zeros[0])
                for (int r = 0; r < p.passed; r += 4)
                    store_sums(shift + g * MAX_ROWS + r, 1, moved[r], moved[r + 1], moved[r + 2], moved[r + 3]);
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
        by_format(v, [&](auto f) { return f.v(p.passed); })(a);
    }
}
} // namespace KVP_NS
