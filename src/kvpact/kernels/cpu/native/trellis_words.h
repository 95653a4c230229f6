// Words of trellis codes -> wider words: what tables index, or levels as bytes. quantizers/trellis.py
// defines the indices, formats/bitpack.py the places of codes in words.
#pragma once
#include <type_traits>

#include "attend/codes.h"
#include "simd/lanes.h"

namespace KVP_NS {

constexpr int EDGE = 16; // words before those of a row
constexpr int MOST_INDEX = 128; // levels of a table

// Bits that tables look at: at least as many as fill a vector register.
constexpr int index_bits(int bits) { return bits < 3 ? 4 : bits + 1; }

// What becomes of wider words. They stay as they are:
template <int BITS, int C> struct Indices {
    static constexpr int words = 1; // in the place of one
    INLINE explicit Indices(const uint8_t *) {}
    INLINE vi operator()(vi x, int) const { return x; }
};
// Or bytes of a table take the place of indices. Of indices of 4 bits, word 2 * i + n has those at the
// places 2 * j + n of word i.
template <int BITS, int C> struct LevelBytes {
    static constexpr int words = 8 / C;
    ByteLookup<index_bits(BITS)> byte;
    INLINE explicit LevelBytes(const uint8_t *table) : byte(table) {}
    INLINE vi operator()(vi x, int n) const { return byte(n ? shr<4>(x) : x); }
};

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

// The first words of V's rows and, before them, the rows' last ones, which are the steps before the first.
struct Edges {
    alignas(64) uint32_t row[4][EDGE + 16];

    // Of `rows` rows, long before they are wanted: stores of one size and loads of another.
    INLINE void copy(const uint32_t *words, int64_t dim, int rows) {
        for (int i = 0; i < rows; i++, words += dim) {
            memcpy(row[i] + EDGE - 4, words + dim - 4, 16);
            if (dim >= W) store_words(row[i] + EDGE, load_words(words));
            else memcpy(row[i] + EDGE, words, 4 * (size_t)dim);
        }
    }
};

// V: [bits][dim] words, a word holds 32 / width tokens of a channel, steps are channels
// -> channels c to end of [C * Map::words][stride], c a multiple of W.
template <int BITS, int C, class Map>
static void widen_channels(uint32_t *to, int64_t stride, const uint32_t *words, const Edges &edges, int64_t dim,
                           int64_t memory, int64_t c, int64_t end, const uint8_t *table) {
    using P = Planes<BITS>;
    constexpr int LOW = P::width[0], R = C / LOW, HIGH = P::width[1], SPREAD = HIGH ? C / HIGH : 1;
    const Map map(table);
    const auto vectors = [&](const auto &get, const auto &keep) __attribute__((always_inline)) {
        uint32_t *out = to;
#pragma GCC unroll 4
        for (int row = 0; row < LOW; row++) {
            const uint32_t *at = c ? words + row * dim + c : edges.row[row] + EDGE;
            vi rest = {};
            if constexpr (HIGH)
                rest = shr_by(get(words + (P::below[1] + row * R / SPREAD) * dim + c), row * R % SPREAD * HIGH);
            widen<BITS, C, R>(get(at), get(at - 1), get(at - 2), get(at - memory), rest, [&](int, vi x) __attribute__((always_inline)) {
                for (int n = 0; n < Map::words; n++, out += stride) keep(out, map(x, n));
            });
        }
    };
    for (; c + W <= end; c += W, to += W)
        vectors([](const uint32_t *p) __attribute__((always_inline)) { return load_words(p); },
                [](uint32_t *p, vi x) __attribute__((always_inline)) { store_words(p, x); });
    const int n = (int)(end - c);
    if (n > 0)
        vectors([&](const uint32_t *p) __attribute__((always_inline)) { return load_words_first(p, n); },
                [&](uint32_t *p, vi x) __attribute__((always_inline)) { store_first((float *)p, as_float(x), n); });
}

// Where one block of K lies in the words of a token.
struct KeyBlock {
    int words, low;         // of the lowest plane: how many, and which is the first
    int high, inside;       // the first word of the other plane, wider words of another block before
};

// K: [2][half][16 tokens] words, a word holds codes of a token, step i in word i % words, item
// i / words -> [2 halves][dim * C / 32 * Map::words][16], the halves `stride` words apart.
template <int BITS, int C, int MEMORY, class Map>
static void widen_tokens(uint32_t *to, int64_t stride, const uint32_t *tile, int half, const KeyBlock &block, const uint8_t *table) {
    using P = Planes<BITS>;
    constexpr bool ONE = BITS == 1; // of single bits, wider words take the words' place
    constexpr int LOW = P::width[0], R = ONE ? 1 : C / LOW, HIGH = P::width[1], SPREAD = HIGH ? C / HIGH : 1;
    constexpr int ITEM = ONE ? C : LOW;
    const int64_t n = block.words;
    const Map map(table);
    for (int t = 0; t < TILE; t += W) {
        const uint32_t *from = tile + t / 16 * half * 16 + t % 16, *low = from + block.low * 16;
        const uint32_t *high = from + block.high * 16;
        uint32_t *out = to + t / 16 * stride + t % 16;
        const uint32_t *end = out + n * R * Map::words * 16;
        const auto word = [&](int64_t k) __attribute__((always_inline)) {
            if constexpr (!ONE) return load_words(low + k * 16);
            const int64_t at = block.inside + k;
            return shr_by(load_words(low + at / C * 16), at % C);
        };
        int64_t at = block.inside;
        vi rest = {};
        if constexpr (HIGH) rest = shr_by(load_words(high + at / SPREAD * 16), at % SPREAD * HIGH);
        const auto put = [&](vi x, vi before, vi second, vi far) __attribute__((always_inline)) {
            widen<BITS, C, R>(x, before, second, far, rest, [&](int, vi y) __attribute__((always_inline)) {
                for (int i = 0; i < Map::words; i++, out += 16) store_words(out, map(y, i));
            });
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
} // namespace KVP_NS
