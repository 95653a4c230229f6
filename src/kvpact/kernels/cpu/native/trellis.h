// Codes of a trellis -> wider words: what tables index, in the order of other codes of 4 or 8 bits.
// quantizers/trellis.py defines the indices, formats/bitpack.py the places of codes in words.
#pragma once
#include "attend/codes.h"
#include "simd/lanes.h"

namespace KVP_NS {

constexpr int MOST_BLOCKS = 3;
constexpr int EDGE = 16; // words before those of a row
constexpr int MOST_INDEX = 128; // levels of a table
constexpr int WIDE_TILE = 8 * MOST_DIM; // words of the widest tile

// `x` at every place of C bits of a word.
template <int C> constexpr uint32_t everywhere(uint32_t x) {
    uint32_t all = 0;
    for (int i = 0; i < 32; i += C) all |= x << i;
    return all;
}
template <int N> INLINE vi moved(vi x) { // to the left
    if constexpr (N >= 0) return shl<N>(x);
    else return shr<-N>(x);
}
template <int N> INLINE vi turned(vi x) { return select<(1u << N) - 1>(shr<32 - N>(x), shl<N>(x)); }
INLINE void store_words(uint32_t *p, vi x) { store((float *)p, as_float(x)); }

// R wider words of one word of the lowest plane, at `n - 1`, `n - 2` and `n - memory` the words of
// earlier steps. From bit 0 on, an item has c1, the point's bits in the lowest plane, c0, the
// point's other bits (`high` holds those of the first of these words in its lowest bits), and what
// no table looks at.
template <int BITS, int C, int R, class Put>
INLINE void widen(vi n, vi before, vi second, vi far, vi high, Put &&put) {
    using P = Planes<BITS>;
    constexpr int LOW = P::width[0];
    const vi own = xor_masked<everywhere<LOW>(1)>(n, before, far);
    const auto one = [&](auto index) __attribute__((always_inline)) {
        constexpr int e = decltype(index)::value;
        vi x = select<everywhere<C>((1u << LOW) - 1)>(shr<e * LOW>(own), moved<LOW - e * LOW>(second));
        if constexpr (P::count > 1)
            x = select<everywhere<C>((2u << LOW) - 1)>(x, moved<LOW + 1 - e * P::width[1]>(high));
        put(e, x);
    };
    one(std::integral_constant<int, 0>());
    if constexpr (R > 1) one(std::integral_constant<int, 1>());
    if constexpr (R > 2) {
        one(std::integral_constant<int, 2>());
        one(std::integral_constant<int, 3>());
    }
    static_assert(R == 1 || R == 2 || R == 4, "wider words of a word");
}

// V: [bits][dim] words, a word holds 32 / width tokens of a channel, steps are channels
// -> [C][dim].
template <int BITS, int C>
static void widen_channels(uint32_t *to, const uint32_t *words, int64_t dim, int64_t memory) {
    using P = Planes<BITS>;
    constexpr int LOW = P::width[0], R = C / LOW, HIGH = P::width[1], SPREAD = HIGH ? C / HIGH : 1;
    // Steps before the first are the last ones. Copies of them are read last, when they have reached the cache.
    alignas(64) uint32_t edges[LOW][EDGE + 16];
    for (int row = 0; row < LOW; row++) {
        memcpy(edges[row] + EDGE - 4, words + (row + 1) * dim - 4, 16);
        if (dim >= W) store_words(edges[row] + EDGE, load_words(words + row * dim));
        else memcpy(edges[row] + EDGE, words + row * dim, 4 * (size_t)dim);
    }
    const auto some = [&](int row, int64_t c, const uint32_t *at, auto &&get, auto &&keep) __attribute__((always_inline)) {
        vi rest = {};
        if constexpr (HIGH)
            rest = shr_by(get(words + (P::below[1] + row * R / SPREAD) * dim + c), row * R % SPREAD * HIGH);
        uint32_t *out = to + row * R * dim + c;
        widen<BITS, C, R>(get(at), get(at - 1), get(at - 2), get(at - memory), rest,
                          [&](int e, vi x) __attribute__((always_inline)) { keep(out + e * dim, x); });
    };
    const auto get = [](const uint32_t *p) __attribute__((always_inline)) { return load_words(p); };
    const auto keep = [](uint32_t *p, vi x) __attribute__((always_inline)) { store_words(p, x); };
    const auto part = [&](int row, int64_t c, const uint32_t *at) __attribute__((always_inline)) {
        const int n = (int)(dim - c);
        some(row, c, at, [&](const uint32_t *p) { return load_words_first(p, n); },
             [&](uint32_t *p, vi x) { store_first((float *)p, as_float(x), n); });
    };
    for (int row = 0; row < LOW; row++) {
        const uint32_t *low = words + row * dim;
        int64_t c = W;
        for (; c + W <= dim; c += W) some(row, c, low + c, get, keep);
        if (c < dim) part(row, c, low + c);
    }
    for (int row = 0; row < LOW; row++) {
        if (dim >= W) some(row, 0, edges[row] + EDGE, get, keep);
        else part(row, 0, edges[row] + EDGE);
    }
}

// Where one block of K lies in the words of a token.
struct KeyBlock {
    int words, low;         // of the lowest plane: how many, and which is the first
    int high, inside;       // the first word of the other plane, wider words of another block before
};

// K: [2][half][16 tokens] words, a word holds codes of a token, step i in word i % words, item
// i / words -> [2][dim * C / 32][16].
template <int BITS, int C, int MEMORY>
static void widen_tokens(uint32_t *to, const uint32_t *tile, int half, const KeyBlock &block) {
    using P = Planes<BITS>;
    constexpr bool ONE = BITS == 1; // of single bits, wider words take the words' place
    constexpr int LOW = P::width[0], R = ONE ? 1 : C / LOW, HIGH = P::width[1], SPREAD = HIGH ? C / HIGH : 1;
    constexpr int ITEM = ONE ? C : LOW;
    const int64_t n = block.words;
    for (int t = 0; t < TILE; t += W) {
        const uint32_t *from = tile + t / 16 * half * 16 + t % 16, *low = from + block.low * 16;
        const uint32_t *high = from + block.high * 16;
        uint32_t *out = to + t / 16 * n * R * 16 + t % 16;
        const uint32_t *end = out + n * R * 16;
        const auto word = [&](int64_t k) __attribute__((always_inline)) {
            if constexpr (!ONE) return load_words(low + k * 16);
            const int64_t at = block.inside + k;
            return shr_by(load_words(low + at / C * 16), at % C);
        };
        int64_t at = block.inside;
        vi rest = {};
        if constexpr (HIGH) rest = shr_by(load_words(high + at / SPREAD * 16), at % SPREAD * HIGH);
        const auto put = [&](vi x, vi before, vi second, vi far) __attribute__((always_inline)) {
            widen<BITS, C, R>(x, before, second, far, rest,
                              [&](int e, vi y) __attribute__((always_inline)) { store_words(out + e * 16, y); });
            out += R * 16;
            if constexpr (HIGH) {
                at += R;
                if (at % SPREAD) rest = shr<R * HIGH>(rest);
                else if (out < end) rest = load_words(high + at / SPREAD * 16);
            }
        };
        // The steps before the first word are those of the last ones, an item later.
        const auto start = [&](auto first) __attribute__((always_inline)) {
            constexpr int N = decltype(first)::value;
            vi x[4 + N];
#pragma GCC unroll 4
            for (int k = 0; k < N; k++) x[4 + k] = word(k);
#pragma GCC unroll 4
            for (int i = 1; i <= 4; i++) x[4 - i] = turned<ITEM>(N < 4 ? x[4 - i + N] : word(n - i));
#pragma GCC unroll 4
            for (int k = 0; k < N; k++) put(x[4 + k], x[3 + k], x[2 + k], x[4 + k - MEMORY]);
        };
        if (n >= 4) start(std::integral_constant<int, 4>());
        else if (n == 1) start(std::integral_constant<int, 1>());
        else if (n == 2) start(std::integral_constant<int, 2>());
        else start(std::integral_constant<int, 3>());
        for (int64_t k = 4; k < n; k++) put(word(k), word(k - 1), word(k - 2), word(k - MEMORY));
    }
}

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

// Bits that tables look at: at least as many as fill a vector register.
INLINE int index_bits(int bits) { return bits < 3 ? 4 : bits + 1; }

// A block as kernels see it: how to widen its words, and the levels of what comes out.
struct TrellisBlock {
    int first, dim, bits, memory;
    KeyBlock key;
    const kvp_block *from;
    alignas(64) float table[MOST_INDEX];
};

struct Trellis {
    int blocks = 0, wide, half; // bits of wider codes; words of a token in K's slots
    int64_t wide_words;         // of a tile
    TrellisBlock block[MOST_BLOCKS];

    // Where a block's wider words stand among those of a tile.
    INLINE uint32_t *place(uint32_t *words, int i) const { return words + block[i].first * wide; }

    INLINE void read(const kvp_trellis &t) {
        blocks = 0;
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
            b.dim = from.dim;
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
                b.table[index] = from.levels[4 * point + 2 * (x & 1) + (x >> low & 1)] * from.unit;
            }
        }
        for (int i = 0; i < count; i++) (alone[i]->bits == 1 ? alone[i]->key.low : alone[i]->key.high) = half;
        half += (single + 31) / 32;
        wide_words = (int64_t)first * wide;
    }
};

// Bytes of a tile's codes.
static int64_t trellis_bytes(const kvp_trellis &t, bool key) {
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

INLINE void widen_values(uint32_t *to, const char *words, const TrellisBlock &b, int wide) {
    by_code(b.bits, wide, [&](auto bits, auto c) {
        widen_channels<bits(), c()>(to, (const uint32_t *)words, b.dim, b.memory);
    });
}
INLINE void widen_keys(uint32_t *to, const char *tile, const Trellis &x, int i) {
    const TrellisBlock &b = x.block[i];
    by_code(b.bits, x.wide, [&](auto bits, auto c) {
        if (b.memory == 3) widen_tokens<bits(), c(), 3>(to, (const uint32_t *)tile, x.half, b.key);
        else widen_tokens<bits(), c(), 4>(to, (const uint32_t *)tile, x.half, b.key);
    });
}
} // namespace KVP_NS
