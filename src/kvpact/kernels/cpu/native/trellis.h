// Trellises as kernels see them: their blocks, tables of levels, and wider words of whole tiles.
#pragma once
#include "planes.h"
#include "trellis_words.h"

namespace KVP_NS {

constexpr int MOST_BLOCKS = 3;
constexpr int WIDE_TILE = 8 * MOST_DIM; // words of the widest tile
constexpr int LEVEL_ZERO = 128; // the byte of level 0
constexpr float LEVEL_OFFSET[] = {-LEVEL_ZERO}; // the table of such bytes

// Calls run with a format's bits and the bits of its wider codes, as constants.
template <class F> INLINE void by_code(int bits, int wide, F &&run) {
    const auto pick = [&](auto b, auto c) __attribute__((always_inline)) { run(b, c); };
    constexpr std::integral_constant<int, 4> four{};
    constexpr std::integral_constant<int, 8> eight{};
    if (wide == 4) {
        if (bits == 1) pick(std::integral_constant<int, 1>(), four);
        else if (bits == 2) pick(std::integral_constant<int, 2>(), four);
        else pick(std::integral_constant<int, 3>(), four);
        return;
    }
    switch (bits) {
    case 2: return pick(std::integral_constant<int, 2>(), eight);
    case 3: return pick(std::integral_constant<int, 3>(), eight);
    case 4: return pick(std::integral_constant<int, 4>(), eight);
    case 5: return pick(std::integral_constant<int, 5>(), eight);
    default: return pick(std::integral_constant<int, 6>(), eight);
    }
}

// A block as kernels see it: how to widen its words, and the levels of what comes out.
struct TrellisBlock {
    int first, begin, dim, bits, memory; // `begin`: channels before that have bits
    KeyBlock key;
    const kvp_block *from;
    alignas(64) float table[MOST_INDEX];
    alignas(64) uint8_t bytes[MOST_INDEX]; // the same in units, and LEVEL_ZERO more
    alignas(64) float whole[16];           // the same in units, of indices of 4 bits
    float unit;
};

struct Trellis {
    int blocks = 0, wide, half; // bits of wider codes; words of a token in K's slots
    int dim;                    // channels that have bits
    TrellisBlock block[MOST_BLOCKS];

    // Where a block's wider words stand among those of a tile.
    INLINE uint32_t *place(uint32_t *words, int i) const { return words + block[i].first * wide; }
    // What loops of fp32 turn V's wider words into levels with.
    INLINE const float *level_table() const { return wide == 4 ? block[0].whole : LEVEL_OFFSET; }

    // Levels are whole numbers from -128 to 127, in units.
    INLINE void read(const kvp_trellis &t) {
        blocks = dim = 0;
        wide = t.interleave;
        half = 0;
        int first = 0, single = 0, count = 0;
        TrellisBlock *alone[MOST_BLOCKS]; // those with a plane of one bit
        for (int i = 0; i < t.blocks; first += t.block[i++].dim) {
            const kvp_block &from = t.block[i];
            if (!from.bits) continue;
            TrellisBlock &b = block[blocks++];
            b.from = &from;
            b.first = first;
            b.begin = dim;
            b.dim = from.dim;
            dim += b.dim;
            b.bits = from.bits;
            b.memory = from.memory;
            Plane planes[3];
            const int n = planes_of(b.bits, planes);
            b.key = {0, half, 0, 0};
            b.key.words = b.dim * (b.bits == 1 ? wide : planes[0].width) / 32;
            for (int p = 0; p < n; p++) {
                if (planes[p].width == 1) {
                    b.key.inside = single * wide / 32;
                    single += b.dim;
                    alone[count++] = &b;
                    continue;
                }
                if (p) b.key.high = half;
                half += (b.dim * planes[p].width + 31) / 32;
            }
            const int low = planes[0].width, below = (1 << (low - 1)) - 1;
            for (int index = 0; index < MOST_INDEX; index++) {
                const int x = index & ((2 << b.bits) - 1);
                const int point = (x >> 1 & below) | x >> (low + 1) << (low - 1);
                const float level = from.levels[4 * point + 2 * (x & 1) + (x >> low & 1)];
                b.table[index] = level * from.unit;
                b.bytes[index] = (uint8_t)((int)level + LEVEL_ZERO);
                if (index < 16) b.whole[index] = level;
            }
            b.unit = from.unit;
        }
        for (int i = 0; i < count; i++) (alone[i]->bits == 1 ? alone[i]->key.low : alone[i]->key.high) = half;
        half += (single + 31) / 32;
    }
};

// Bytes of a tile's codes.
static inline int64_t trellis_bytes(const kvp_trellis &t, bool key) {
    if (!key) return 4 * (int64_t)t.block[0].bits * t.block[0].dim;
    int64_t words = 0, single = 0;
    for (int i = 0; i < t.blocks; i++) {
        Plane planes[3];
        const int n = t.block[i].bits ? planes_of(t.block[i].bits, planes) : 0;
        for (int p = 0; p < n; p++) {
            if (planes[p].width == 1) single += t.block[i].dim;
            else words += (t.block[i].dim * planes[p].width + 31) / 32;
        }
    }
    return 4 * TILE * (words + (single + 31) / 32);
}

// Calls body(code, step) for every code of a token in K's order: the step of the trellis that it
// stands for.
template <class F> INLINE void each_place(const TrellisBlock &b, int wide, F &&body) {
    const int wider = b.dim * wide / 32 / b.key.words, items = 32 / wide;
    int c = 0;
    for (int word = 0; word < b.key.words; word++)
        for (int inside = 0; inside < wider; inside++)
            for (int item = 0; item < items; item++) body(c++, (item * wider + inside) * b.key.words + word);
}

// Scales of 8 bits (quantizers/numbers.py) of a tile as the fp16 numbers that they are.
INLINE void scales_to_halves(uint16_t *to, const uint8_t *from) {
    for (int t = 0; t < TILE; t += W) {
        const Ints byte = load_codes(from + t);
        store_numbers((char *)(to + t), (vf)(byte ? (byte + 888) << 20 : byte), KVP_F16);
    }
}

// Loops of fp32 read levels as bytes, or look up indices of 4 bits.
template <int BITS, int C> using LevelWords = std::conditional_t<C == 8, LevelBytes<BITS, C>, Indices<BITS, C>>;

// A tile of V -> [wide][dim].
template <template <int, int> class Map> INLINE void widen_values(uint32_t *to, const char *tile, const TrellisBlock &b, int wide) {
    const uint32_t *words = (const uint32_t *)tile;
    Edges edges;
    by_code(b.bits, wide, [&](auto bits, auto c) {
        edges.copy(words, b.dim, Planes<bits()>::width[0]);
        widen_channels<bits(), c(), Map<bits(), c()>>(to, b.dim, words, edges, b.dim, b.memory, 0, b.dim, b.bytes);
    });
}
template <template <int, int> class Map>
INLINE void widen_block(uint32_t *to, int64_t stride, const uint32_t *tile, const Trellis &x, const TrellisBlock &b) {
    by_code(b.bits, x.wide, [&](auto bits, auto c) {
        using M = Map<bits(), c()>;
        if (b.memory == 3) widen_tokens<bits(), c(), 3, M>(to, stride, tile, x.half, b.key, b.bytes);
        else widen_tokens<bits(), c(), 4, M>(to, stride, tile, x.half, b.key, b.bytes);
    });
}
// A tile of K -> indices, block by block, [2][dim * wide / 32][16] each.
INLINE void widen_keys(uint32_t *to, const char *tile, const Trellis &x) {
    for (int i = 0; i < x.blocks; i++)
        widen_block<Indices>(x.place(to, i), x.block[i].dim * x.wide / 2, (const uint32_t *)tile, x, x.block[i]);
}
// A tile of K -> bytes of levels, [2][dim / 4][16], in the order of `byte_place`.
INLINE void key_levels(uint32_t *to, const char *tile, const Trellis &x) {
    for (int i = 0; i < x.blocks; i++)
        widen_block<LevelBytes>(to + x.block[i].begin * 4, x.dim * 4, (const uint32_t *)tile, x, x.block[i]);
}
INLINE int byte_place(int code, int wide) { return wide == 8 ? code : (code & ~7) + code % 2 * 4 + code % 8 / 2; }
} // namespace KVP_NS
