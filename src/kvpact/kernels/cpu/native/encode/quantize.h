// y[channel][W lanes] -> codes and side information, in the arithmetic of quantizers/*.py.
#pragma once
#include "encode/cells.h"

namespace KVP_NS {

// Side information of W vectors, [count][W] fp16, and room for sums.
struct Side {
    alignas(64) float sums[2][MOST_DIM * W];
    uint16_t scale[MOST_DIM * W], zero[MOST_DIM * W];
#if defined(KVP_AVX512)
    Cells cells; // of a codebook of 4 bits
#endif
};

// The number of boundaries below x, by a search tree of BITS levels.
template <int BITS, int DEPTH = 0> struct Search {
    Lookup<DEPTH> boundary;
    Search<BITS, DEPTH + 1> rest;
    INLINE explicit Search(const float *steps) : boundary(steps + (1 << DEPTH)), rest(steps) {}
    INLINE Ints operator()(vf x, Ints code) const {
        return rest(x, code + code - (Ints)(x > boundary((vi)code)));
    }
};
template <int BITS> struct Search<BITS, 0> {
    vf root;
    Search<BITS, 1> rest;
    INLINE explicit Search(const float *steps) : root(set1(steps[1])), rest(steps) {}
    INLINE Ints operator()(vf x) const { return rest(x, -(Ints)(x > root)); }
};
template <int BITS> struct Search<BITS, BITS> {
    INLINE explicit Search(const float *) {}
    INLINE Ints operator()(vf, Ints code) const { return code; }
};

// y is rotated (and centred).
template <int BITS, class Search>
void codebook(const kvp_encode_args &a, float *y, uint8_t *codes, Side *side, const Search &search) {
    const int dim = a.dim, m = after_leaves(dim);
    auto &sums = side->sums;
    leaves<1>(sums, dim, [&](int c, vf *out) {
        const vf x = load(y + c * W);
        out[0] = x * x;
    });
    const vf energy = tree(sums[0], m), norm = square_root(energy), none = zero();
    const vf safe = pick_lanes((Ints)(norm == none), set1(1), norm);
    const vf factor = (set1(1) / safe) * set1((float)sqrt((double)dim));
    const Lookup<BITS> level(a.levels);
    leaves<2>(sums, dim, [&](int c, vf *out) {
        const vf x = load(y + c * W);
        const Ints code = search(x * factor);
        store_codes(codes + c * 32, code);
        const vf point = level((vi)code);
        out[0] = point * x;
        out[1] = point * point;
    });
    const vf product = tree(sums[0], m);
    vf scale;
    if (a.choice == KVP_NORM) scale = norm / set1((float)sqrt((double)dim));
    else if (a.choice == KVP_LEAST_SQUARES) scale = product / tree(sums[1], m);
    else scale = pick_lanes((Ints)(product == none), none, energy / product);
    store_halves(side->scale, scale);
}

template <int BITS>
void codebook(const kvp_encode_args &a, float *y, uint8_t *codes, Side *side) {
#if defined(KVP_AVX512)
    if constexpr (BITS == 4)
        if (side->cells.found) return codebook<BITS>(a, y, codes, side, CellSearch(side->cells));
#endif
    codebook<BITS>(a, y, codes, side, Search<BITS>(a.steps));
}

// 1 / x; 0 where there is none.
INLINE vf reciprocal(vf x) {
    const vf inverse = set1(1) / x;
    return pick_lanes((Ints)(magnitude(inverse) == set1(__builtin_inff())), zero(), inverse);
}
INLINE float clamped(float x, float low, float high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}
INLINE Ints clamped(Ints x, int high) {
    x = x < 0 ? Ints{} : x;
    const Ints top = Ints{} + high;
    return x > top ? top : x;
}

inline void symmetric(const kvp_encode_args &a, const float *y, uint8_t *codes, Side *side) {
    const int offset = 1 << (a.bits - 1);
    for (int c = 0, g = 0; c < a.dim; c += a.channels, g++) {
        const int end = c + a.channels < a.dim ? c + a.channels : a.dim;
        vf extreme = load(y + c * W), most = magnitude(extreme);
        for (int i = c + 1; i < end; i++) {
            const vf x = load(y + i * W), size = magnitude(x);
            const Ints more = (Ints)(size > most);
            most = pick_lanes(more, size, most);
            extreme = pick_lanes(more, x, extreme);
        }
        const bool bytes = a.bits == 8;
        const vf scale = bytes ? most / set1(127) : extreme / set1((float)-offset);
        const vf inverse = reciprocal(scale), half = set1((float)offset + 0.5f);
        for (int i = c; i < end; i++) {
            const vf x = load(y + i * W) * inverse;
            Ints code;
            if (bytes) { // ties away from zero
                const vf size = magnitude(x);
                const Ints whole = truncated(size);
                const vf rest = size - floats(whole);
                const Ints near = whole + truncated(rest + rest);
                code = offset + ((Ints)x < 0 ? -near : near);
            } else {
                code = truncated(x + half);
            }
            store_codes(codes + i * 32, clamped(code, 2 * offset - 1));
        }
        store_halves(side->scale + g * W, scale);
    }
}

INLINE Ints on_grid(vf x, vf zero_point, vf inverse, int most) {
    x = (x - zero_point) * inverse;
    const vf low = set1(-1), high = set1(256);
    x = pick_lanes((Ints)(x < low), low, x);
    x = pick_lanes((Ints)(x > high), high, x);
    return clamped(truncated(rounded(x)), most);
}

inline void affine(const kvp_encode_args &a, const float *y, uint8_t *codes, Side *side) {
    const int most = (1 << a.bits) - 1;
    for (int c = 0, g = 0; c < a.dim; c += a.channels, g++) {
        const int end = c + a.channels < a.dim ? c + a.channels : a.dim;
        vf low = load(y + c * W), high = low;
        for (int i = c + 1; i < end; i++) {
            const vf x = load(y + i * W);
            low = pick_lanes((Ints)(x < low), x, low);
            high = pick_lanes((Ints)(x > high), x, high);
        }
        const vf scale = store_halves(side->scale + g * W, (high - low) / set1((float)most));
        const vf zero_point = store_halves(side->zero + g * W, low + zero()); // never -0
        const vf inverse = reciprocal(scale);
        for (int i = c; i < end; i++)
            store_codes(codes + i * 32, on_grid(load(y + i * W), zero_point, inverse, most));
    }
}

// fp32 -> fp8, ties to even, for magnitudes that it holds.
template <bool E5M2> INLINE Ints to_float8(vf x) {
    constexpr int mantissa = E5M2 ? 2 : 3, bias = E5M2 ? 15 : 7, drop = 23 - mantissa;
    const Ints bits = (Ints)x, size = bits & 0x7fffffff;
    // What is added to a number below the normal ones has its last place where theirs is.
    constexpr int32_t unit = (127 + (23 - mantissa) + (1 - bias)) << 23;
    const Ints small = (Ints)((vf)size + (vf)(Ints{} + unit)) - unit;
    const Ints odd = size >> drop & 1;
    const Ints normal = (size + ((bias - 127) * (1 << 23)) + ((1 << (drop - 1)) - 1) + odd) >> drop;
    return (size < (Ints{} + ((127 + 1 - bias) << 23)) ? small : normal) | (bits >> 24 & 0x80);
}
template <bool E5M2> INLINE void float8(const kvp_encode_args &a, const float *y, uint8_t *codes, Side *side) {
    const float most = E5M2 ? 57344.0f : 448.0f;
    const vf limit = set1(most);
    vf safe = set1(1);
    if (a.scale.base) {
        vf largest = zero();
        for (int c = 0; c < a.dim; c++) largest = max(magnitude(load(y + c * W)), largest);
        const vf scale = store_halves(side->scale, largest / limit);
        safe = pick_lanes((Ints)(scale == zero()), safe, scale);
    }
    for (int c = 0; c < a.dim; c++) {
        vf x = load(y + c * W) / safe;
        x = pick_lanes((Ints)(x > limit), limit, x);
        x = pick_lanes((Ints)(x < -limit), -limit, x);
        store_codes(codes + c * 32, to_float8<E5M2>(x));
    }
}

inline void quantize(const kvp_encode_args &a, float *y, uint8_t *codes, Side *side) {
    switch (a.kind) {
    case KVP_CODEBOOK:
        switch (a.bits) {
        case 1: return codebook<1>(a, y, codes, side);
        case 2: return codebook<2>(a, y, codes, side);
        case 3: return codebook<3>(a, y, codes, side);
        case 4: return codebook<4>(a, y, codes, side);
        case 5: return codebook<5>(a, y, codes, side);
        case 6: return codebook<6>(a, y, codes, side);
        case 7: return codebook<7>(a, y, codes, side);
        default: return codebook<8>(a, y, codes, side);
        }
    case KVP_SYMMETRIC: return symmetric(a, y, codes, side);
    case KVP_AFFINE: return affine(a, y, codes, side);
    default: return a.choice ? float8<true>(a, y, codes, side) : float8<false>(a, y, codes, side);
    }
}
} // namespace KVP_NS
