// Decodes slots to numbers, tile by tile of one head, in the torch bodies' order of operations.
#include "decode/unpack.h"
#include "scratch.h"
#include "table.h"
#include "trellis_numbers.h"

namespace KVP_NS {
namespace {

struct DecodeScratch {
    alignas(64) float y[MOST_DIM * W];            // [channel][W]
    alignas(64) uint8_t codes[MOST_DIM * TILE]; // [channel][32]
    alignas(64) float fold[MOST_DIM], shift[MOST_DIM], levels[256];
};

// A field's unit of `tokens` tokens and `bytes` bytes that `position` is in; NULL without the field.
const char *unit(const kvp_decode_args &a, const kvp_field &field, int64_t pair, int64_t position, int64_t tokens,
                 int64_t bytes) {
    if (!field.base) return nullptr;
    const int64_t segment = position / a.slots.segment_tokens;
    const int64_t index = (position - segment * a.slots.segment_tokens) / tokens;
    return field.base[segment] + pair / a.heads * field.row + pair % a.heads * field.head + index * bytes;
}

// Numbers that stand for codes or in the place of codes: W tokens of a channel.
template <int BITS> struct Levels {
    Lookup<BITS> level;
    INLINE explicit Levels(const float *levels) : level(levels) {}
    INLINE vf operator()(const char *codes, int i) const { return level((vi)load_codes((const uint8_t *)codes + i)); }
};
struct Whole {
    vf offset;
    INLINE vf operator()(const char *codes, int i) const {
        return floats(load_codes((const uint8_t *)codes + i)) + offset;
    }
};
template <int NUMBER> struct Raw {
    INLINE vf operator()(const char *numbers, int i) const {
        return load_numbers(numbers + i * (NUMBER == KVP_F32 ? 4 : 2), NUMBER);
    }
};
template <bool E5M2> struct Float8 {
    INLINE vf operator()(const char *numbers, int i) const {
        const uint8_t *p = (const uint8_t *)numbers + i;
        return E5M2 ? load_e5m2(p) : load_e4m3(p) * set1(256); // see load_e4m3
    }
};

// What stands with the codes of a tile: per token, from the block's first one on, and per channel.
struct Beside {
    const uint16_t *scale, *zero;
    const float *fold, *shift;
};

// kernels/packed.py has the formulas. Nothing is added where there is nothing: -0 would become 0.
template <class Number>
INLINE void numbers(const kvp_stream &s, float *y, const char *from, int t, const Number &number, const Beside &beside) {
    const vf one = set1(1), none = zero();
    for (int c = 0, g = 0; c < s.dim; c += s.channels, g++) {
        const int end = c + s.channels < s.dim ? c + s.channels : s.dim;
        const vf scale = beside.scale ? load_half(beside.scale + g * TILE + t) : one;
        const vf z = beside.zero ? load_half(beside.zero + g * TILE + t) : none;
        const auto each = [&](auto &&formula) {
            for (int i = c; i < end; i++) store(y + i * W, formula(number(from, i * TILE + t), i));
        };
        const auto fold = [&](int i) { return set1(beside.fold[i]); };
        const auto shift = [&](int i) { return set1(beside.shift[i]); };
        if (beside.shift && s.shift_scaled) each([&](vf x, int i) { return (x * fold(i) + shift(i)) * scale; });
        else if (beside.shift) each([&](vf x, int i) { return x * fold(i) * scale + shift(i); });
        else if (beside.zero && beside.fold) each([&](vf x, int i) { return (x * scale + z) * fold(i); });
        else if (beside.zero) each([&](vf x, int) { return x * scale + z; });
        else if (beside.fold) each([&](vf x, int i) { return x * scale * fold(i); });
        else each([&](vf x, int) { return x * scale; });
    }
}

// Calls body(number) with what decodes the stream's codes.
template <class F> INLINE void by_kind(const kvp_stream &s, const float *levels, F &&body) {
    switch (s.kind) {
    case KVP_E4M3: return body(Float8<false>());
    case KVP_E5M2: return body(Float8<true>());
    case KVP_LINEAR: return body(Whole{set1(levels[0])});
    case KVP_RAW:
        if (s.number == KVP_F32) return body(Raw<KVP_F32>());
        return s.number == KVP_F16 ? body(Raw<KVP_F16>()) : body(Raw<KVP_BF16>());
    }
    switch (s.bits) {
    case 1: return body(Levels<1>(levels));
    case 2: return body(Levels<2>(levels));
    case 3: return body(Levels<3>(levels));
    case 4: return body(Levels<4>(levels));
    case 5: return body(Levels<5>(levels));
    case 6: return body(Levels<6>(levels));
    case 7: return body(Levels<7>(levels));
    default: return body(Levels<8>(levels));
    }
}

void channel_numbers(float *to, const char *halves, int dim, float otherwise) {
    for (int c = 0; c < dim; c++) to[c] = halves ? from_half(((const uint16_t *)halves)[c]) : otherwise;
}

} // namespace

// Where those of the W tokens from `at` on go that are wanted; false if none is.
static bool find_rows(char **rows, const kvp_decode_args &a, char *out, Span span, int64_t at) {
    bool any = false;
    for (int i = 0; i < W; i++) {
        const bool wanted = at + i >= span.begin && at + i < span.end;
        rows[i] = wanted ? out + (at + i - a.first) * a.token : nullptr;
        any = any || wanted;
    }
    return any;
}

// Keys of a trellis.
static void trellis_keys(const kvp_decode_args &a, Span span, TrellisScratch &scratch) {
    const kvp_stream &s = a.slots;
    const kvp_trellis &from = *s.trellis;
    const int64_t bytes = trellis_bytes(from, true), center = from.center ? from.center : TILE;
    scratch.trellis.read(from);
    char *out = a.out + span.pair / a.heads * a.row + span.pair % a.heads * a.head;
    for (int64_t at = span.begin / TILE * TILE; at < span.end; at += TILE) {
        const KeySlots slots = {unit(a, s.codes, span.pair, at, TILE, bytes),
                                (const uint8_t *)unit(a, s.scale, span.pair, at, TILE, TILE),
                                (const uint32_t *)unit(a, s.base, span.pair, at, TILE, 8),
                                (const int8_t *)unit(a, s.mean, span.pair, at, center, s.dim),
                                (const uint16_t *)unit(a, s.step, span.pair, at, center, 2), span.pair % a.heads};
        char *rows[W];
        key_numbers(scratch, s, slots, [&](int t) { return find_rows(rows, a, out, span, at + t); }, [&](int, float *y) {
            if (s.signs) rotate_lanes_back(y, s.signs, s.dim);
            store_lanes(rows, y, s.dim, a.dtype, s.signs);
        });
    }
}

static bool decode_span(const kvp_decode_args &a, Span span) {
    DecodeScratch *own = own_scratch<DecodeScratch>();
    if (!own) return false;
    DecodeScratch &scratch = *own;
    kvp_stream s = a.slots;
    TrellisScratch *trellis = nullptr;
    if (s.kind == KVP_TRELLIS_CODES) {
        trellis = own_scratch<TrellisScratch>();
        if (!trellis) return false;
        if (!a.by_channel) {
            trellis_keys(a, span, *trellis);
            return true;
        }
        // Its wider codes are those of a table.
        trellis->trellis.read(*s.trellis);
        s.kind = KVP_TABLE;
        s.table = trellis->trellis.block[0].table;
        s.bits = index_bits(s.bits);
    }
    const bool packed = s.kind <= KVP_LINEAR, by_group = s.fold.base || s.shift.base;
    const int64_t bytes = tile_bytes(a.slots.bits, s.dim, packed && !a.by_channel);
    const int64_t side = trellis ? TILE : (int64_t)channel_groups(s.dim, s.channels) * TILE * 2;
    if (packed) {
        const float middle = s.zero.base || s.shift.base ? s.middle : 0;
        for (int i = 0; i < 1 << (s.kind == KVP_LINEAR ? 0 : s.bits); i++) scratch.levels[i] = s.table[i] + middle;
    }
    char *out = a.out + span.pair / a.heads * a.row + span.pair % a.heads * a.head;
    for (int64_t at = span.begin / TILE * TILE; at < span.end; at += TILE) {
        const char *from = unit(a, s.codes, span.pair, at, TILE, bytes);
        if (trellis) {
            widen_values<Indices>(trellis->wide, from, trellis->trellis.block[0], trellis->trellis.wide);
            unpack_by_channel(scratch.codes, trellis->wide, trellis->trellis.wide, s.dim);
            from = (const char *)scratch.codes;
        } else if (packed) {
            if (a.by_channel) unpack_by_channel(scratch.codes, (const uint32_t *)from, s.bits, s.dim);
            else unpack_by_token(scratch.codes, (const uint32_t *)from, s.bits, s.dim);
            from = (const char *)scratch.codes;
        }
        if (by_group && (at % s.group == 0 || at <= span.begin)) {
            channel_numbers(scratch.fold, unit(a, s.fold, span.pair, at, s.group, s.dim * 2), s.dim, 1);
            channel_numbers(scratch.shift, unit(a, s.shift, span.pair, at, s.group, s.dim * 2), s.dim, 0);
        }
        Beside beside;
        beside.scale = (const uint16_t *)unit(a, s.scale, span.pair, at, TILE, side);
        if (trellis) {
            scales_to_halves(trellis->scale, (const uint8_t *)beside.scale);
            beside.scale = trellis->scale;
        }
        beside.zero = (const uint16_t *)unit(a, s.zero, span.pair, at, TILE, side);
        beside.fold = by_group ? scratch.fold : nullptr;
        beside.shift = s.shift.base ? scratch.shift : nullptr;
        by_kind(s, scratch.levels, [&](const auto &number) {
            for (int t = 0; t < TILE; t += W) {
                char *rows[W];
                if (!find_rows(rows, a, out, span, at + t)) continue;
                numbers(s, scratch.y, from, t, number, beside);
                if (s.signs) rotate_lanes_back(scratch.y, s.signs, s.dim);
                store_lanes(rows, scratch.y, s.dim, a.dtype, s.signs);
            }
        });
    }
    return true;
}

void fill_decode(Table &table) { table.decode_span = decode_span; }
} // namespace KVP_NS
