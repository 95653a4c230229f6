// Weighted sums of V in whole numbers: the softmax's weights of a block become factors.
#pragma once
#include "attend/packed.h"

#if defined(KVP_WHOLE)
namespace KVP_NS {

constexpr float MOST_WEIGHT = most_whole(BLOCK);

// V's scales of some tokens as fp32, [channel groups][BLOCK].
static void read_scales(float *to, const ValueTiles &tiles, int groups) {
    for (int g = 0; g < groups; g++)
        for (int t = 0; t < tiles.run.tiles * TILE; t += W) {
            const uint16_t *halves = tiles.scale[t / TILE];
            store(to + g * BLOCK + t, halves ? load_half(halves + g * TILE + t % TILE) : set1(1.0f));
        }
}

// The weights of a pass's rows: exp2(score * LOG2E - minus), which count `share` times in the sums; or numbers
// in p.weight.
struct RowWeights {
    bool stored;
    float minus[MAX_ROWS], share[MAX_ROWS];
};

// A row's weights times scales as factors.
template <int ORDER, class F>
INLINE void put_row(WholeWeights &to, int g, int r, const float *scale, int tokens, F &&weight) {
    vi sum = no_sum();
    for (int t = 0; t < tokens; t += TILE) {
        vf x[TILE / W];
        for (int k = 0; k < TILE / W; k++) x[k] = mul(weight(t + k * W), load(scale + t + k * W));
        sum = add_sums(sum, put_factors<ORDER>(to.factors[g][r] + 2 * t, x));
    }
    to.sum[g][r] = total(sum);
}

// The sum of weights times zeros.
static float moved(const Pass &p, const ValueTiles &tiles, int g, const float *weight) {
    vf sum = zero();
    for (int tile = 0; tile < tiles.run.tiles; tile++)
        for (int c = 0; c < TILE; c += W) {
            const int side = g * TILE + c;
            const vf s = tiles.scale[tile] ? load_half(tiles.scale[tile] + side) : set1(1.0f);
            const vf z = fma(s, set1(p.a.v.middle), load_half(tiles.zero[tile] + side));
            sum = fma(load(weight + tile * TILE + c), z, sum);
        }
    return KVP_NS::sum(sum);
}

// Adds the weighted sums of n packed tokens from t on; the weights' sum stands before a row's, where they are not stored.
static void whole_values(Pass &p, const RowWeights &rows, float *acc, int64_t t, int64_t n) {
    const kvp_stream &v = p.a.v;
    const bool trellis = v.kind == KVP_TRELLIS_CODES;
    const int groups = p.v_size.groups;
    const int64_t stride = p.job.partial_row();
    WholeWeights &whole = p.scratch.whole;
    ValueTiles tiles(p, acc, t);
    const LevelTable &levels = p.scratch.value_levels;
    const float unit = trellis ? p.scratch.widened->value.block[0].unit : levels.unit;
    const int order = trellis ? p.scratch.widened->value.wide : v.bits;
    const auto run = by_whole_format(v, [&](auto f) { return f.v(p.passed); });
    each_piece(p, tiles, t, n, [&](int64_t i) {
        const int tokens = tiles.run.tiles * TILE;
        const float *scales = p.scratch.weights;
        read_scales(p.scratch.weights, tiles, groups);
        by_order(order, [&](auto bits) {
            constexpr int ORDER = decltype(bits)::value;
            for (int r = 0; r < p.passed; r++) {
                const float *score = p.score[r] + i;
                float *weight = p.weight[r] + i;
                vf total = zero();
                for (int k = 0; k < tokens && !rows.stored; k += W) {
                    const vf w = exp2_(fma(load(score + k), set1(LOG2E), set1(-rows.minus[r])));
                    total = add(total, w);
                    store(weight + k, w);
                }
                for (int g = 0; g < groups; g++) {
                    const float *scale = scales + g * BLOCK;
                    vf most = zero();
                    for (int k = 0; k < tokens; k += W) most = max(most, magnitude(mul(load(weight + k), load(scale + k))));
                    const float high = highest(most);
                    const vf inverse = set1(high > 1e-30f ? MOST_WEIGHT / high : 0);
                    put_row<ORDER>(whole, g, r, scale, tokens, [&](int k) __attribute__((always_inline)) { return mul(load(weight + k), inverse); });
                    whole.step[g][r] = high / MOST_WEIGHT * unit * rows.share[r];
                    if (v.zero.base) p.scratch.shift[g * MAX_ROWS + r] = moved(p, tiles, g, weight) * rows.share[r];
                }
                if (!rows.stored) acc[r * stride - 1] += sum(total) * rows.share[r];
            }
        });
        if (trellis) {
            Widened &own = *p.scratch.widened;
            const Widening widening(own.value, own.words, own.edges);
            tiles.run.widening = &widening;
            run(tiles.run, levels, whole);
        } else run(tiles.run, levels, whole);
    });
}
} // namespace KVP_NS
#endif
