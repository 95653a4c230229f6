// Slots and exact tokens -> fp32 panels for matrix products: K as [channel][token], V as
// [token][channel], both still in the codec's space.
#pragma once
#include <type_traits>

#include "attend/exact.h"
#include "attend/formats.h"
#include "simd/lanes.h"
#include "attend/product.h"
#include "simd/rotate.h"
#include "attend/rows.h"
#include "trellis_numbers.h"

namespace KVP_NS {

// W rows of W numbers, columns for rows.
INLINE void transpose_block(const float *from, int64_t from_row, float *to, int64_t to_row) {
    vf r[W];
    for (int i = 0; i < W; i++) r[i] = load(from + i * from_row);
    transpose(r);
    for (int i = 0; i < W; i++) store(to + i * to_row, r[i]);
}

// Up to TOKENS tokens of one stream and head.
struct Tokens {
    const kvp_attend_args &a;
    const kvp_stream &x;
    int64_t b, h;
    int64_t base, begin, end; // the token of column (K) or row (V) 0, a multiple of TILE; those to decode
    float *to;
    int64_t panel; // numbers from a panel to the next
    TrellisScratch *trellis; // of the slots that hold one

    INLINE float *key(int64_t token) const { return to + token / PANEL * panel + token % PANEL; }
    INLINE float *value(int64_t token, int64_t c) const { return to + c / PANEL * panel + token * PANEL + c % PANEL; }
};

// Where the codes of a tile lie. Those of the next block's tile are on their way from here on: by the
// time they are wanted, two matrix products have been computed.
INLINE const char *codes_at(const Tokens &s, const Place &place, int64_t t, int64_t bytes) {
    if (t + TOKENS < s.x.exact_from) {
        const Place next(s.x, t + TOKENS);
        const char *ahead = next.tile(s.x.codes, s.b, s.h, bytes);
        for (int64_t i = 0; i < bytes; i += 64) prefetch(ahead + i);
        for (const kvp_field *f : {&s.x.scale, &s.x.zero})
            if (f->base) prefetch(next.tile(*f, s.b, s.h, side_bytes(s.x)));
    }
    return place.tile(s.x.codes, s.b, s.h, bytes);
}
// The same for V, or where their wider words stand.
INLINE const uint32_t *values_at(const Tokens &s, const Place &place, int64_t t) {
    const char *codes = codes_at(s, place, t, tile_bytes(s.x, false));
    if (s.x.kind != KVP_TRELLIS_CODES) return (const uint32_t *)codes;
    const Trellis &x = s.trellis->trellis;
    widen_values<LevelWords>(s.trellis->wide, codes, x.block[0], x.wide);
    return s.trellis->wide;
}

// The numbers with the codes of a tile: per token [channel groups][TILE], and per channel.
struct Beside {
    alignas(64) float scale[MOST_GROUPS * TILE], zero[MOST_GROUPS * TILE];
    alignas(64) float fold[MOST_DIM + TILE], shift[MOST_DIM + TILE];
    bool folds, shifts;
    int groups;

    INLINE explicit Beside(const kvp_stream &x) : groups(groups_of(x)) {
        folds = x.fold.base != nullptr;
        shifts = x.shift.base != nullptr;
        for (int i = 0; i < groups * TILE; i++) {
            scale[i] = 1;
            zero[i] = 0;
        }
        for (int c = 0; c < x.dim + TILE; c++) {
            fold[c] = 1;
            shift[c] = 0;
        }
    }
    INLINE void read(const Tokens &s, int64_t t, const Place &place) {
        const kvp_stream &x = s.x;
        const int64_t side = side_bytes(x), unit = 2 * (int64_t)x.dim;
        if (x.kind == KVP_TRELLIS_CODES) {
            scales_to_halves(s.trellis->scale, (const uint8_t *)place.tile(x.scale, s.b, s.h, side));
            to_floats(scale, (const char *)s.trellis->scale, KVP_F16, TILE);
            scale_by(scale, s.trellis->trellis.block[0].unit, TILE);
        } else if (x.scale.base) to_floats(scale, place.tile(x.scale, s.b, s.h, side), KVP_F16, TILE * groups);
        if (x.zero.base) to_floats(zero, place.tile(x.zero, s.b, s.h, side), KVP_F16, TILE * groups);
        if (!x.group || (t > s.base && t % x.group)) return;
        if (folds) to_floats(fold, place.group(x.fold, s.b, s.h, x.group, unit), KVP_F16, x.dim);
        if (shifts) to_floats(shift, place.group(x.shift, s.b, s.h, x.group, unit), KVP_F16, x.dim);
    }
};

enum Form { SCALED, MOVED, BY_CHANNEL }; // scale; and zero; and numbers per channel

// What a level has to be multiplied with and added to; see kvpact.h.
template <Form FORM> struct KeyNumbers {
    vf scale[VECTORS], zero[VECTORS], middle;
    const float *fold, *shift;
    bool scaled; // the shift is
    INLINE vf operator()(vf level, int k, int64_t c) const {
        if constexpr (FORM == SCALED) return mul(level, scale[k]);
        vf x = add(level, middle);
        if constexpr (FORM == MOVED) return fma(x, scale[k], zero[k]);
        x = mul(x, set1(fold[c]));
        const vf s = set1(shift[c]);
        return scaled ? mul(add(x, s), scale[k]) : fma(x, scale[k], s);
    }
};

template <class Functions> struct Decoder;

template <class Level, int BITS, bool SCRATCH> struct Decoder<Functions<Level, BITS, SCRATCH>> {
    using P = Planes<BITS>;

    // Up to 32 channels of PANEL tokens; word(vector, plane, index) gives the packed words.
    template <bool ALL, class Numbers, class F>
    static INLINE void channels(const Level &level, const Numbers &numbers, float *to, int64_t c, int count, F &&word) {
        for (int i = 0; i < P::width[0]; i++) {
            Codes<BITS, VECTORS> codes(i, word);
            const int items = ALL || codes.items < count ? codes.items : count;
#pragma GCC unroll 8
            for (int j = 0; j < items; j++, c++) {
                for (int k = 0; k < VECTORS; k++) store(to + c * PANEL + k * W, numbers(level(codes.code(k)), k, c));
                codes.next();
            }
            count -= items;
            if (!ALL && count <= 0) return;
        }
    }

    template <Form FORM> static void keys(const Tokens &s) {
        const kvp_stream &x = s.x;
        const Level level(x.table);
        Beside beside(x);
        int64_t begin[4] = {0, 0, 0, 0};
        for (int p = 0; p < P::count; p++) begin[p + 1] = begin[p] + (x.dim * P::width[p] + 31) / 32;
        const int64_t half = begin[P::count] * 16;
        const bool moved = x.zero.base || x.shift.base;
        KeyNumbers<FORM> numbers;
        numbers.middle = set1(moved ? x.middle : 0);
        numbers.fold = beside.fold;
        numbers.shift = beside.shift;
        numbers.scaled = x.shift_scaled;
        for (int64_t t = s.base; t < s.end; t += TILE) {
            const Place place(x, t);
            const uint32_t *words = (const uint32_t *)codes_at(s, place, t, tile_bytes(x, true));
            beside.read(s, t, place);
            for (int i = 0; i < TILE; i += PANEL) {
                const uint32_t *at[VECTORS];
                for (int k = 0; k < VECTORS; k++) at[k] = words + (i + k * W) / 16 * half + (i + k * W) % 16;
                float *to = s.key(t - s.base + i);
                for (int64_t c = 0; c < x.dim; c += 32) {
                    const int64_t side = c / x.channels * TILE + i, part = c / 32;
                    for (int k = 0; k < VECTORS; k++) {
                        numbers.scale[k] = load(beside.scale + side + k * W);
                        numbers.zero[k] = load(beside.zero + side + k * W);
                    }
                    auto word = [&](int k, int p, int index) __attribute__((always_inline)) {
                        return load_words(at[k] + (begin[p] + part * P::width[p] + index) * 16);
                    };
                    // The last words of a plane may be fewer: other memory may not be read.
                    auto last = [&](int k, int p, int index) __attribute__((always_inline)) {
                        return part * P::width[p] + index < begin[p + 1] - begin[p] ? word(k, p, index) : vi{};
                    };
                    if (c + 32 <= x.dim) channels<true>(level, numbers, to, c, 32, word);
                    else channels<false>(level, numbers, to, c, (int)(x.dim - c), last);
                }
            }
        }
    }
    static void keys(const Tokens &s) {
        if constexpr (SCRATCH) return;
        else if (s.x.fold.base || s.x.shift.base) keys<BY_CHANNEL>(s);
        else if (s.x.zero.base) keys<MOVED>(s);
        else keys<SCALED>(s);
    }

    // N vectors of channels of a tile, the last one with n lanes.
    template <Form FORM, int N>
    static INLINE void vectors(const Tokens &s, const Level &level, const Beside &beside, const uint32_t *words,
                               int64_t t, int64_t c, int n) {
        const kvp_stream &x = s.x;
        const int64_t side = c / x.channels * TILE;
        const float *scale = beside.scale + side, *zero = beside.zero + side;
        const vf middle = set1(x.zero.base ? x.middle : 0);
        float *to = s.value(t - s.base, c);
        for (int i = 0; i < P::width[0]; i++) {
            Codes<BITS, N> codes(i, [&](int k, int p, int index) __attribute__((always_inline)) {
                const uint32_t *at = words + (P::below[p] + index) * x.dim + c + k * W;
                return n < W ? load_words_first(at, n) : load_words(at);
            });
#pragma GCC unroll 8
            for (int j = 0; j < codes.items; j++, to += PANEL, scale++, zero++) {
                const vf factor = set1(*scale);
                for (int k = 0; k < N; k++) {
                    vf y = level(codes.code(k));
                    y = FORM == SCALED ? mul(y, factor) : fma(add(y, middle), factor, set1(*zero));
                    store(to + k * W, FORM == BY_CHANNEL ? mul(y, load(beside.fold + c + k * W)) : y);
                }
                codes.next();
            }
        }
    }

    // Lanes after dim hold whatever the levels of no codes are: nobody looks at them.
    template <Form FORM> static void values(const Tokens &s) {
        const kvp_stream &x = s.x;
        const Level level(SCRATCH ? s.trellis->trellis.level_table() : x.table);
        Beside beside(x);
        const bool panels = x.channels >= x.dim || x.channels % PANEL == 0; // no group ends inside
        for (int64_t t = s.base; t < s.end; t += TILE) {
            const Place place(x, t);
            const uint32_t *words = values_at(s, place, t);
            beside.read(s, t, place);
            int64_t c = 0;
            if (panels)
                for (; c + PANEL <= x.dim; c += PANEL) vectors<FORM, VECTORS>(s, level, beside, words, t, c, W);
            for (; c < x.dim; c += W) vectors<FORM, 1>(s, level, beside, words, t, c, (int)upto(x.dim - c, W));
        }
    }
    static void values(const Tokens &s) {
        if constexpr (SCRATCH) values<SCALED>(s);
        else if (s.x.fold.base) values<BY_CHANNEL>(s);
        else if (s.x.zero.base) values<MOVED>(s);
        else values<SCALED>(s);
    }
};

template <class Number> struct Decoder<RawFunctions<Number>> {
    typedef typename Number::type T;

    static void keys(const Tokens &s) {
        const kvp_stream &x = s.x;
        Beside beside(x);
        for (int64_t t = s.base; t < s.end; t += TILE) {
            const Place place(x, t);
            const T *numbers = (const T *)codes_at(s, place, t, tile_bytes(x, true));
            beside.read(s, t, place);
            for (int i = 0; i < TILE; i += W) {
                float *to = s.key(t - s.base + i);
                const vf scale = mul(load(beside.scale + i), set1(Number::factor));
                for (int64_t c = 0; c < x.dim; c++) store(to + c * PANEL, mul(Number::read(numbers + c * TILE + i), scale));
            }
        }
    }
    static void values(const Tokens &s) {
        const kvp_stream &x = s.x;
        Beside beside(x);
        for (int64_t t = s.base; t < s.end; t += TILE) {
            const Place place(x, t);
            const T *numbers = (const T *)codes_at(s, place, t, tile_bytes(x, false));
            beside.read(s, t, place);
            for (int64_t c = 0; c < x.dim; c += W)
                for (int i = 0; i < TILE; i += W) {
                    float *to = s.value(t - s.base + i, c);
                    vf r[W];
                    for (int k = 0; k < W; k++) r[k] = c + k < x.dim ? Number::read(numbers + (c + k) * TILE + i) : zero();
                    transpose(r);
                    for (int k = 0; k < W; k++)
                        store(to + k * PANEL, mul(r[k], set1(beside.scale[i + k] * Number::factor)));
                }
        }
    }
};

static void trellis_keys(const Tokens &s) {
    const kvp_stream &x = s.x;
    const kvp_trellis &from = *x.trellis;
    const int64_t bytes = tile_bytes(x, true), center = from.center ? from.center : TILE;
    s.trellis->trellis.read(from);
    for (int64_t t = s.base; t < s.end; t += TILE) {
        const Place place(x, t);
        const KeySlots slots = {codes_at(s, place, t, bytes), (const uint8_t *)place.tile(x.scale, s.b, s.h, TILE),
                                (const uint32_t *)place.tile(x.base, s.b, s.h, 8),
                                (const int8_t *)place.group(x.mean, s.b, s.h, center, x.dim),
                                (const uint16_t *)place.group(x.step, s.b, s.h, center, 2), s.h};
        key_numbers(*s.trellis, x, slots, [](int) { return true; }, [&](int i, const float *numbers) {
            float *to = s.key(t - s.base + i);
            for (int64_t c = 0; c < x.dim; c++) store(to + c * PANEL, load(numbers + c * W));
        });
    }
}

// The channels from `first` on of `count` tokens, fp32 rows, become the columns from `token` on.
INLINE void put_keys(const Tokens &s, int64_t token, const float *rows, int count, int64_t first = 0) {
    for (int i = 0; i < count; i++)
        for (int64_t c = first; c < s.x.dim; c++) s.key(token + i)[c * PANEL] = rows[i * MOST_DIM + c];
}
INLINE void put_values(const Tokens &s, int64_t token, const float *row) {
    for (int64_t c = 0; c < s.x.dim; c += W) store(s.value(token, c), load(row + c));
}

// Sink tokens of the packed ones take their places, in the codec's space.
static void place_sinks(const Tokens &s, bool key) {
    const kvp_stream &x = s.x;
    alignas(64) float row[MOST_DIM];
    for (int64_t i = 0; i < x.n_sinks; i++) {
        const int64_t t = x.sink_positions[s.b * x.n_sinks + i];
        if (t < s.begin || t >= s.end) continue;
        to_floats(row, x.sinks.data + s.b * x.sinks.row + s.h * x.sinks.head + i * x.sinks.token, x.dtype, x.dim);
        if (x.signs) rotate(row, x.signs, x.dim);
        for (int64_t c = x.dim; c < (x.dim + W - 1) / W * W; c++) row[c] = 0;
        if (key) put_keys(s, t - s.base, row, 1);
        else put_values(s, t - s.base, row);
    }
}

// W tokens that stand in columns side by side go straight through the registers; others by a copy.
template <int DTYPE> static void exact_keys(const Tokens &s) {
    constexpr int SIZE = DTYPE == KVP_F32 ? 4 : 2;
    const int64_t dim = s.x.dim;
    for (int64_t t = s.begin; t < s.end;) {
        const int64_t column = t - s.base;
        const int count = (int)upto(W - column % W, s.end - t);
        alignas(64) float rows[W * MOST_DIM];
        int64_t c = 0;
        const char *at[W];
        for (int i = 0; i < count; i++) at[i] = exact_token(s.x, s.a, s.b, s.h, t + i);
        if (count == W)
            for (; c + W <= dim; c += W) {
                vf r[W];
                for (int i = 0; i < W; i++) r[i] = load_numbers(at[i] + c * SIZE, DTYPE);
                transpose(r);
                for (int i = 0; i < W; i++) store(s.key(column) + (c + i) * PANEL, r[i]);
            }
        if (c < dim) {
            for (int i = 0; i < count; i++) to_floats(rows + i * MOST_DIM + c, at[i] + c * SIZE, DTYPE, (int)(dim - c));
            put_keys(s, column, rows, count, c);
        }
        t += count;
    }
}
template <int DTYPE> static void exact_values(const Tokens &s) {
    constexpr int SIZE = DTYPE == KVP_F32 ? 4 : 2;
    const int64_t dim = s.x.dim;
    for (int64_t t = s.begin; t < s.end; t++) {
        const char *at = exact_token(s.x, s.a, s.b, s.h, t);
        int64_t c = 0;
        for (; c + W <= dim; c += W) store(s.value(t - s.base, c), load_numbers(at + c * SIZE, DTYPE));
        if (c == dim) continue;
        alignas(64) float last[W] = {};
        to_floats(last, at + c * SIZE, DTYPE, (int)(dim - c));
        store(s.value(t - s.base, c), load(last));
    }
}
template <class F> INLINE void by_dtype(int dtype, F &&run) {
    if (dtype == KVP_F32) run(std::integral_constant<int, KVP_F32>());
    else if (dtype == KVP_F16) run(std::integral_constant<int, KVP_F16>());
    else run(std::integral_constant<int, KVP_BF16>());
}

// Both return whether the tokens are packed ones; a call has only such, or none.
static bool keys(const Tokens &s) {
    if (s.begin >= s.x.exact_from) {
        by_dtype(s.x.dtype, [&](auto dtype) { exact_keys<dtype()>(s); });
        return false;
    }
    if (s.x.kind == KVP_TRELLIS_CODES) trellis_keys(s);
    else by_format(s.x, [&](auto f) { Decoder<decltype(f)>::keys(s); });
    place_sinks(s, true);
    return true;
}
static bool values(const Tokens &s) {
    if (s.begin >= s.x.exact_from) {
        by_dtype(s.x.dtype, [&](auto dtype) { exact_values<dtype()>(s); });
        return false;
    }
    const auto decode = [&](auto f) { Decoder<decltype(f)>::values(s); };
    if (s.trellis) {
        s.trellis->trellis.read(*s.x.trellis);
        by_wide(s.trellis->trellis.wide, decode);
    } else by_format(s.x, decode);
    place_sinks(s, false);
    return true;
}
} // namespace KVP_NS
