// The loops over tiles of K and V whose levels are whole numbers of 8 bits, see whole.h.
#pragma once
#include "attend/keys.h"
#include "attend/values.h"
#include "attend/whole.h"

namespace KVP_NS {

// What levels are served: in words of 2, 3, 4 or 8 bits, or through a trellis.
INLINE bool whole_format(const kvp_stream &x) {
#if defined(KVP_WHOLE)
    if (x.kind == KVP_TRELLIS_CODES) return true;
    if (x.unit == 0) return false;
    return x.kind == KVP_TABLE ? x.bits <= 4 && x.bits > 1 : x.kind == KVP_LINEAR && x.bits == 8;
#else
    (void)x;
    return false;
#endif
}
} // namespace KVP_NS

#if defined(KVP_WHOLE)
namespace KVP_NS {

// Codes of 3 bits stand as those of 2, with a plane of third bits next to them.
constexpr int order_of(int bits) { return bits == 3 ? 2 : bits; }

// Runs with the order of items as a constant.
template <class F> INLINE auto by_order(int bits, F &&run) {
    if (order_of(bits) == 2) return run(std::integral_constant<int, 2>());
    if (bits == 4) return run(std::integral_constant<int, 4>());
    return run(std::integral_constant<int, 8>());
}

// The third bits of the items of word `part` of two, made those of bytes that are shifted as the word is, but by one
// bit: bit 2 of byte j is that of item 4 * j.
INLINE vi third_bits(vi word, int part) {
    alignas(16) static constexpr uint8_t places[2][16] = {{0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13},
                                                          {2, 2, 3, 3, 6, 6, 7, 7, 10, 10, 11, 11, 14, 14, 15, 15}};
    const vi x = shuffle_bytes(word, places[part]);
    return select<0x00ff00ff>(shl<2>(x), shr<2>(x));
}

// Levels in units, and LEVEL_ZERO more, by code, as often as they fit. The division leaves the whole number
// that the level was made of.
struct LevelTable {
    alignas(64) uint8_t bytes[MOST_INDEX];
    float unit;
    INLINE void read(const kvp_stream &x) {
        unit = x.unit;
        if (x.kind != KVP_TABLE) return;
        for (int i = 0; i < 16; i++) bytes[i] = (uint8_t)(LEVEL_ZERO + lrintf(x.table[i] / x.unit));
        for (int i = 16; i < MOST_INDEX; i += 16) memcpy(bytes + i, bytes, 16);
    }
};

// Levels by the codes of items: of bytes, of words that are shifted from item to item, or of two planes.
template <int BITS> struct LevelsOf {
    const ByteLookup<4> level;
    explicit LevelsOf(const LevelTable &table) : level(table.bytes) {}
    INLINE Operand operator()(vi &word, vi &third, bool first) const {
        if constexpr (BITS == 8) return bytes_of(word);
        if (!first) word = shr<order_of(BITS)>(word);
        if constexpr (BITS != 3) return bytes_of(level(word));
        if (!first) third = shr<1>(third);
        return bytes_of(level(select<0x03030303>(word, third)));
    }
};

// The query rows of a KV head as factors.
struct WholeQuery {
    int64_t width; // bytes of a row
    char *factors;
    struct Row {
        int32_t sum[MOST_DIM / TILE]; // of a group of channels
        float step;                   // what a row's sums are to be multiplied with
    } *row;
    // Numbers of memory that some rows need.
    static constexpr int64_t floats(int64_t rows, int64_t width) { return rows * (width / 2 + (int64_t)sizeof(Row) / 4); }

    WholeQuery(float *memory, int64_t rows, int64_t first, int64_t channels) : width(2 * channels) {
        factors = (char *)memory + first * width;
        row = (Row *)(memory + rows * channels / 2) + first;
    }
};

static void make_whole_query(const WholeQuery &to, const kvp_stream &k, const float *q, int64_t rows) {
    const int64_t width = to.width / 2, channels = k.channels < k.dim ? k.channels : width;
    const bool trellis = k.kind == KVP_TRELLIS_CODES;
    const float greatest = most_whole(width);
    by_order(trellis ? 8 : k.bits, [&](auto order) {
        for (int64_t r = 0; r < rows; r++, q += width) {
            vf most = zero();
            for (int64_t c = 0; c < width; c += W) most = max(most, magnitude(load(q + c)));
            const float high = highest(most);
            const vf inverse = set1(high > 1e-30f ? greatest / high : 0);
            for (int64_t c = 0; c < width;) {
                vi sum = no_sum();
                const int64_t group = c / channels;
                for (const int64_t end = c + channels < width ? c + channels : width; c < end; c += TILE) {
                    vf x[TILE / W];
                    for (int k = 0; k < TILE / W; k++) x[k] = mul(load(q + c + k * W), inverse);
                    sum = add_sums(sum, put_factors<order()>(to.factors + r * to.width + 2 * c, x));
                }
                to.row[r].sum[group] = total(sum);
            }
            to.row[r].step = high / greatest * (trellis ? 1 : k.unit);
        }
    });
}

// Scores of one or two tiles of K. SCRATCH: words are bytes of levels in scratch memory, see trellis.h.
template <int BITS, int RB, int TILES, bool ONE, bool SCRATCH>
void whole_k_tile(const KTile &a, const LevelTable &table, const WholeQuery &q) {
    constexpr int ORDER = order_of(BITS), N = 8 / ORDER, TV = RB > 4 ? 1 : W == 16 ? 2 * TILES : RB > 2 ? 2 : 4;
    const int words = (a.dim * ORDER + 31) / 32, groups = ONE ? 1 : channel_groups(a.dim, a.channels);
    const int all = words + (BITS == 3 ? (a.dim + 31) / 32 : 0);
    const int64_t half = SCRATCH ? a.half : all * 64, piece = SCRATCH ? a.half / words : 64;
    const LevelsOf<BITS> levels(table);
    for (int t = 0; t < TILES * TILE; t += TV * W) {
        const uint32_t *at[TV];
        const char *ahead[TV];
        for (int k = 0; k < TV; k++) {
            const int tile = (t + k * W) / TILE, inside = (t + k * W) % TILE;
            at[k] = a.words[tile] + inside / 16 * all * 16 + inside % 16;
            ahead[k] = a.ahead[tile] + inside / 16 * half;
        }
        vf total[TV][RB];
        for (int r = 0; r < RB; r++)
            for (int k = 0; k < TV; k++) total[k][r] = set1(a.outer[r]);
        int i = 0;
        for (int g = 0; g < groups; g++) {
            WholeSum sum[TV][RB];
            for (int r = 0; r < RB; r++)
                for (int k = 0; k < TV; k++) sum[k][r].start(q.row[r].sum[g]);
            const char *factors = q.factors + i * N * FACTORS;
            for (const int end = ONE || g == groups - 1 ? words : (g + 1) * (a.channels / 32) * ORDER; i < end; i++) {
                vi w[TV], third[TV];
                for (int k = 0; k < TV; k++) {
                    w[k] = load_words(at[k] + i * 16);
                    if ((t + k * W) % 16 == 0) prefetch(ahead[k] + i * piece);
                    if constexpr (BITS == 3) {
                        third[k] = third_bits(load_words(at[k] + (words + i / 2) * 16), i % 2);
                        if ((t + k * W) % 16 == 0 && i % 2) prefetch(ahead[k] + (words + i / 2) * piece);
                    }
                }
#pragma GCC unroll 4
                for (int n = 0; n < N; n++, factors += FACTORS) {
                    Operand x[TV];
                    for (int k = 0; k < TV; k++) x[k] = levels(w[k], third[k], n == 0);
                    for (int r = 0; r < RB; r++) add_products<TV>(&sum[0][r], RB, x, factors + r * q.width);
                }
            }
#pragma GCC unroll 4 // or the sums of a single row lie in memory
            for (int k = 0; k < TV; k++) {
                const int tile = (t + k * W) / TILE, side = g * TILE + (t + k * W) % TILE;
                const vf scale = a.scale[0] ? load_half(a.scale[tile] + side) : set1(1.0f);
                for (int r = 0; r < RB; r++) {
                    const vf x = fma(sum[k][r].value(), set1(q.row[r].step), set1(a.inner[r]));
                    total[k][r] = fma(x, scale, total[k][r]);
                }
                if (a.zero[0]) {
                    const vf z = fma(scale, set1(a.middle), load_half(a.zero[tile] + side));
                    for (int r = 0; r < RB; r++) total[k][r] = fma(z, set1(a.sums[r * groups + g]), total[k][r]);
                }
            }
        }
        for (int r = 0; r < RB; r++)
            for (int k = 0; k < TV; k++) {
                float *to = a.out + r * BLOCK + t + k * W;
                store(to, SCRATCH && a.more ? add(total[k][r], load(to)) : total[k][r]);
            }
    }
}

// The weights of a block's tokens, times their scales, as factors.
struct WholeWeights {
    alignas(64) char factors[MOST_DIM / TILE][MAX_ROWS][2 * BLOCK];
    int32_t sum[MOST_DIM / TILE][MAX_ROWS];
    float step[MOST_DIM / TILE][MAX_ROWS];
};

template <int BITS, int RB, int CV, bool SCRATCH>
INLINE void whole_v_channels(const VRun &a, const LevelTable &table, const WholeWeights &w, int c, int n) {
    constexpr int ORDER = order_of(BITS), N = 8 / ORDER;
    const int g = c / a.channels;
    const LevelsOf<BITS> levels(table);
    WholeSum sum[CV][RB];
    for (int r = 0; r < RB; r++)
        for (int k = 0; k < CV; k++) sum[k][r].start(w.sum[g][r]);
    const char *factors = w.factors[g][0];
    for (int tile = 0; tile < a.tiles; tile++) {
        const uint32_t *words = a.words[tile] + c;
        int64_t row = a.dim;
        // As many bytes of the tiles ahead as are read here, in their order in memory.
        constexpr int PIECE = CV * W;
        const int share = c / PIECE * a.tiles + tile, shares = a.dim < PIECE ? 1 : a.dim / PIECE;
        const char *ahead = a.ahead[share / shares % (BLOCK / TILE)] + share % shares * (a.bits * PIECE * 4);
        if constexpr (SCRATCH) {
            row = PIECE;
            words = a.widening->channels(a.words, a.tiles, tile, c, c + n, PIECE);
        }
        for (int i = 0; i < ORDER; i++) {
            vi v[CV], third[CV];
            for (int k = 0; k < CV; k++) {
                const bool whole = SCRATCH || k < CV - 1 || n == PIECE;
                const auto read = [&](int word) __attribute__((always_inline)) {
                    const uint32_t *at = words + word * row + k * W;
                    if (k % (16 / W) == 0 && (!SCRATCH || word < a.bits)) prefetch(ahead + (word * CV + k) * W * 4);
                    return whole ? load_words(at) : load_words_first(at, n - k * W);
                };
                v[k] = read(i);
                if constexpr (BITS == 3) third[k] = third_bits(read(2), i);
            }
#pragma GCC unroll 4
            for (int m = 0; m < N; m++, factors += FACTORS) {
                Operand x[CV];
                for (int k = 0; k < CV; k++) x[k] = levels(v[k], third[k], m == 0);
                for (int r = 0; r < RB; r++) add_products<CV>(&sum[0][r], RB, x, factors + r * 2 * BLOCK);
            }
        }
    }
    for (int k = 0; k < CV; k++) {
        const vf fold = a.fold ? halves(a.fold, c + k * W, a.dim) : set1(1.0f);
        for (int r = 0; r < RB; r++) {
            float *to = a.acc + r * a.stride + c + k * W;
            const vf x = fma(sum[k][r].value(), set1(w.step[g][r]), set1(a.shift[g * MAX_ROWS + r]));
            store(to, fma(x, fold, load(to)));
        }
    }
}

template <int BITS, int RB, bool SCRATCH> void whole_v_run(const VRun &a, const LevelTable &table, const WholeWeights &w) {
    constexpr int CV = RB > 4 ? 1 : RB > 2 ? 2 : 4;
    int c = 0;
    if (a.channels % (CV * W) == 0 || a.channels >= a.dim)
        for (; c + CV * W <= a.dim; c += CV * W) whole_v_channels<BITS, RB, CV, SCRATCH>(a, table, w, c, CV * W);
    for (; c < a.dim; c += W) whole_v_channels<BITS, RB, 1, SCRATCH>(a, table, w, c, a.dim - c < W ? a.dim - c : W);
}

template <int BITS, bool SCRATCH = false> struct WholeFunctions {
    typedef void (*K)(const KTile &, const LevelTable &, const WholeQuery &);
    typedef void (*V)(const VRun &, const LevelTable &, const WholeWeights &);
    template <bool ONE> static K keys(int rows) {
        return rows == 1 ? whole_k_tile<BITS, 1, 1, ONE, SCRATCH> : rows == 2 ? whole_k_tile<BITS, 2, 1, ONE, SCRATCH>
             : rows == 3 ? whole_k_tile<BITS, 3, 1, ONE, SCRATCH> : rows == 4 ? whole_k_tile<BITS, 4, 1, ONE, SCRATCH>
                                                                              : whole_k_tile<BITS, 8, 1, ONE, SCRATCH>;
    }
    static K k(int rows, int groups) { return SCRATCH || groups == 1 ? keys<true>(rows) : keys<SCRATCH>(rows); }
    // Two tiles at once where sums leave registers for that; else NULL.
    static K pair(int rows, int groups) {
        if constexpr (W == 16)
            if (SCRATCH || groups == 1)
                return rows == 1 ? whole_k_tile<BITS, 1, 2, true, SCRATCH> : rows == 2 ? whole_k_tile<BITS, 2, 2, true, SCRATCH> : nullptr;
        return nullptr;
    }
    static V v(int rows) {
        return rows == 1 ? whole_v_run<BITS, 1, SCRATCH> : rows == 2 ? whole_v_run<BITS, 2, SCRATCH> : rows == 3 ? whole_v_run<BITS, 3, SCRATCH>
             : rows == 4 ? whole_v_run<BITS, 4, SCRATCH> : whole_v_run<BITS, 8, SCRATCH>;
    }
};
// Those of a format.
template <class F> INLINE auto by_whole_format(const kvp_stream &x, F &&run) {
    if (x.kind == KVP_TRELLIS_CODES) return run(WholeFunctions<8, true>());
    if (x.bits == 3) return run(WholeFunctions<3>());
    return by_order(x.bits, [&](auto bits) { return run(WholeFunctions<bits()>()); });
}
} // namespace KVP_NS
#endif
