// K before its trellis (methods/trellis_keys.py): a base for each token, weights, sorted blocks.
#pragma once
#include "encode/trellis.h"

namespace KVP_NS {

constexpr int BASE_MEAN = 0, BASE_FIRST = 1, BASE_NOTHING = 2;

// Of one KV head.
struct Keys {
    const kvp_trellis &t;
    const float *weight, *first, *deviation;
    const int32_t *order;
    Side &side;
    int dim;

    Keys(const kvp_trellis &trellis, int width, Side &room, int64_t head) : t(trellis), side(room), dim(width) {
        weight = t.weight ? t.weight + head * dim : nullptr;
        first = t.first ? t.first + head * dim : nullptr;
        order = t.order ? t.order + head * dim : nullptr;
        deviation = t.deviation ? t.deviation + head * 3 : nullptr;
    }

    // Of x from a base, or from nothing.
    vf distance(const float *x, const float *base) const {
        leaves<1>(side.sums, dim, [&](int c, vf *out) {
            vf rest = load(x + c * W);
            if (base) rest = rest - set1(base[c]);
            if (weight) rest = rest * set1(weight[c]);
            out[0] = rest * rest;
        });
        return tree(side.sums[0], after_leaves(dim));
    }
    Ints base_of(vf far, vf to_first, vf to_mean) const {
        const Ints flag = (Ints)(to_first < to_mean) ? Ints{} + BASE_FIRST : Ints{} + BASE_MEAN;
        const vf nearest = to_mean < to_first ? to_mean : to_first;
        return (Ints)(far <= nearest) ? Ints{} + BASE_NOTHING : flag;
    }
    // The bases of W tokens that have no mean.
    Ints bases(const float *x) const {
        if (!first) return Ints{} + BASE_NOTHING;
        const vf far = distance(x, nullptr);
        return base_of(far, distance(x, first), far);
    }
    // A channel less the bases.
    vf less_base(const float *x, int c, Ints flag, const float *mean) const {
        const vf rest = load(x + c * W);
        if (!first && !mean) return rest;
        const vf other = pick_lanes(flag == BASE_FIRST, set1(first ? first[c] : 0), zero());
        return rest - pick_lanes(flag == BASE_MEAN, set1(mean ? mean[c] : 0), other);
    }
    // Less the bases and rotated: [channel][W], from x to y.
    void rotated(float *y, const float *x, Ints flag, const float *mean) const {
        for (int b = 0, begin = 0; b < t.blocks; begin += t.block[b].dim, b++) {
            const kvp_block &block = t.block[b];
            float *part = y + begin * W;
            for (int i = 0; i < block.dim; i++) {
                const int c = order ? order[begin + i] : begin + i;
                vf rest = less_base(x, c, flag, mean);
                if (weight) rest = rest * set1(weight[c]);
                store(part + i * W, rest * set1(block.signs[i]));
            }
            rotate_lanes(part, block.signs, block.dim);
            if (!deviation) continue;
            const vf inverse = set1(1 / deviation[b]);
            for (int i = 0; i < block.dim; i++) store(part + i * W, load(part + i * W) * inverse);
        }
    }
};

// The mean of the tokens of a group that are nearest to it: 8 bits a channel.
struct TileMean {
    const Keys &keys;
    int blocks; // of W tokens
    vf far[MOST_GROUP / W], to_first[MOST_GROUP / W];
    alignas(64) float mean[MOST_DIM];
    int8_t whole[MOST_DIM];
    uint16_t step;

    TileMean(const Keys &of, const float *x, int count) : keys(of), blocks(count / W) {
        Ints inside[MOST_GROUP / W];
        const int stride = keys.dim * W;
        for (int b = 0; b < blocks; b++) {
            far[b] = keys.distance(x + b * stride, nullptr);
            to_first[b] = keys.first ? keys.distance(x + b * stride, keys.first) : far[b];
            inside[b] = Ints{} - 1;
        }
        round(x, inside);
        for (int b = 0; b < blocks; b++) {
            const vf to_mean = keys.distance(x + b * stride, mean);
            inside[b] = (Ints)(to_mean < far[b]) & (keys.first ? (Ints)(to_mean < to_first[b]) : Ints{} - 1);
        }
        round(x, inside);
    }
    // The bases of the W tokens of block b.
    Ints bases(const float *x, int b) const {
        return keys.base_of(far[b], to_first[b], keys.distance(x, mean));
    }

  private:
    // Of the tokens inside: whole, step, and their product.
    void round(const float *x, const Ints *inside) {
        const int dim = keys.dim;
        Ints counted{};
        for (int b = 0; b < blocks; b++) counted -= inside[b];
        int count = 0;
        for (int i = 0; i < W; i++) count += counted[i];
        const vf divisor = set1((float)(count ? count : 1));
        vf most = zero();
        for (int c = 0; c < dim; c += W) {
            const vf sum = over_tokens(c, dim, blocks, [&](int b, int channel, int) {
                return (vf)((Ints)load(x + (b * dim + channel) * W) & inside[b]);
            });
            const vf found = sum / divisor;
            most = max(most, magnitude(found));
            store_first(mean + c, found, dim - c < W ? dim - c : W);
        }
        step = to_half(highest(most) / 127.0f);
        const float size = from_half(step);
        for (int c = 0; c < dim; c++) {
            const float near = size == 0 ? 0 : clamped(rintf(mean[c] / size), -127, 127);
            whole[c] = (int8_t)near;
            mean[c] = (float)whole[c] * size;
        }
    }
};

// Lanes from the first one on.
INLINE Ints lanes_from(int lane) {
    Ints lanes;
    for (int i = 0; i < W; i++) lanes[i] = i;
    return lanes >= lane;
}
// In the place of the first tokens of a group the mean of its others, as a number of `dtype`; room for `dim` means.
inline void leave_out(float *y, int dim, int group, int first, int dtype, float *mean) {
    const int left_out = first < group ? first : group, count = group - left_out;
    const vf divisor = set1((float)(count ? count : 1));
    for (int c = 0; c < dim; c += W) {
        const vf sum = over_tokens(c, dim, group / W, [&](int b, int channel, int) {
            return (vf)((Ints)load(y + (b * dim + channel) * W) & lanes_from(left_out - b * W));
        });
        store_first(mean + c, sum / divisor, dim - c < W ? dim - c : W);
    }
    for (int c = 0; c < dim; c++) {
        if (dtype == KVP_F16) mean[c] = from_half(to_half(mean[c]));
        if (dtype == KVP_BF16) {
            uint32_t bits;
            memcpy(&bits, mean + c, 4);
            bits = (bits + 0x7fff + (bits >> 16 & 1)) & ~0xffffu;
            memcpy(mean + c, &bits, 4);
        }
        for (int b = 0; b * W < left_out; b++) {
            float *at = y + (b * dim + c) * W;
            store(at, pick_lanes(lanes_from(left_out - b * W), load(at), set1(mean[c])));
        }
    }
}
} // namespace KVP_NS
