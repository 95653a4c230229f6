// Codes of a trellis -> numbers, W tokens side by side, in the torch bodies' order of operations
// (methods/trellis_codec.py, methods/trellis_keys.py).
#pragma once
#include "trellis.h"

namespace KVP_NS {

// Where a tile of K and what belongs to it lie.
struct KeySlots {
    const char *codes;
    const uint8_t *scale;
    const uint32_t *flags; // of the bases, or NULL
    const int8_t *mean;    // of the tile, or NULL
    const uint16_t *step;
    int64_t head;
};

// Memory of a thread for numbers of a trellis.
struct TrellisScratch {
    Trellis trellis;
    alignas(64) uint32_t wide[WIDE_TILE];
    alignas(64) float part[MOST_DIM * W], numbers[MOST_DIM * W]; // [channel][W]
    alignas(64) float mean[MOST_DIM];
    alignas(64) uint16_t scale[TILE];
};

template <class F> INLINE void by_index(int bits, F &&run) {
    switch (index_bits(bits)) {
    case 4: return run(std::integral_constant<int, 4>());
    case 5: return run(std::integral_constant<int, 5>());
    case 6: return run(std::integral_constant<int, 6>());
    default: return run(std::integral_constant<int, 7>());
    }
}

// Tokens t to t + W of a tile, whose wider words stand in `wide`: y[step][W] = level * scale.
template <int C, class Level>
INLINE void block_numbers(float *y, const uint32_t *wide, const TrellisBlock &b, int t, const Level &level, vf scale) {
    const int n = b.key.words, count = b.dim * C / 32, wider = count / n;
    const uint32_t *from = wide + t / 16 * count * 16 + t % 16;
    for (int k = 0; k < n; k++)
        for (int inside = 0; inside < wider; inside++, from += 16) {
            vi word = load_words(from);
            for (int item = 0; item < 32 / C; item++) {
                store(y + ((item * wider + inside) * n + k) * W, mul(level(word), scale));
                word = shr<C>(word);
            }
        }
}

// Undoes K's treatment: numbers[channel][W] from part[place][W] of tokens t to t + W.
static inline void plain_keys(TrellisScratch &own, const kvp_trellis &from, const KeySlots &slots, int dim, int t) {
    const int64_t head = slots.head;
    float *part = own.part;
    for (int i = 0, first = 0; i < from.blocks; first += from.block[i++].dim) {
        const kvp_block &b = from.block[i];
        float *y = part + first * W;
        if (from.deviation) {
            const vf size = set1(from.deviation[head * MOST_BLOCKS + i]);
            for (int c = 0; c < b.dim; c++) store(y + c * W, mul(load(y + c * W), size));
        }
        rotate_lanes_back(y, b.signs, b.dim);
        for (int c = 0; c < b.dim; c++) store(y + c * W, mul(load(y + c * W), set1(b.signs[c])));
    }
    const int32_t *order = from.order ? from.order + head * dim : nullptr;
    const float *weight = from.weight ? from.weight + head * dim : nullptr;
    const float *first = from.first ? from.first + head * dim : nullptr;
    Ints flag = {};
    if (slots.flags)
        for (int i = 0; i < W; i++) flag[i] = slots.flags[(t + i) / 16] >> (t + i) % 16 * 2 & 3;
    for (int i = 0; i < dim; i++) {
        const int c = order ? order[i] : i;
        vf y = load(part + i * W);
        if (weight) y = y / set1(weight[c]);
        if (slots.mean) y = pick_lanes(flag == 0, y + set1(own.mean[c]), y);
        if (first) y = pick_lanes(flag == 1, y + set1(first[c]), y);
        store(own.numbers + c * W, y);
    }
}

// The mean of a tile of tokens in fp32; zeros after dim.
INLINE void read_mean(float *to, const int8_t *mean, const uint16_t *step, int dim) {
    const float size = from_half(*step);
    for (int c = 0; c < dim; c++) to[c] = (float)mean[c] * size;
    for (int c = dim; c < whole(dim, TILE); c++) to[c] = 0;
}

// Calls body(t, numbers) for tokens t to t + W of a tile of K, numbers[channel][W]; rotated, unless K
// is treated. wanted(t) says whether they are wanted.
template <class Wanted, class F>
static void key_numbers(TrellisScratch &own, const kvp_stream &s, const KeySlots &slots, Wanted &&wanted, F &&body) {
    const kvp_trellis &from = *s.trellis;
    const Trellis &x = own.trellis;
    if (s.treated && slots.mean) read_mean(own.mean, slots.mean, slots.step, s.dim);
    widen_keys(own.wide, slots.codes, x);
    for (int t = 0; t < TILE; t += W) {
        if (!wanted(t)) continue;
        float *to = s.treated ? own.part : own.numbers;
        if (s.treated) memset(own.part, 0, sizeof(float) * (size_t)s.dim * W); // blocks without bits
        const Ints byte = load_codes(slots.scale + t);
        const vf scale = (vf)(byte ? (byte + 888) << 20 : byte);
        for (int i = 0; i < x.blocks; i++) {
            const TrellisBlock &b = x.block[i];
            const uint32_t *wide = x.place(own.wide, i);
            float *at = to + b.first * W;
            by_index(b.bits, [&](auto bits) {
                const Lookup<bits()> level(b.table);
                if (x.wide == 4) block_numbers<4>(at, wide, b, t, level, scale);
                else block_numbers<8>(at, wide, b, t, level, scale);
            });
        }
        if (s.treated) plain_keys(own, from, slots, s.dim, t);
        body(t, own.numbers);
    }
}
} // namespace KVP_NS
