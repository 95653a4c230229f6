// PolarQuant (methods/polarquant.py): pairs of channels, then of radii, become angles and radii.
#pragma once
#include "lanes.h"

namespace KVP_NS {

// The code of the angle of (x, y) among 2**BITS boundaries, whose cosines and sines are given.
template <int BITS> struct Angles {
    Lookup<BITS> cosine, sine;
    INLINE Angles(const float *cosines, const float *sines) : cosine(cosines), sine(sines) {}
    INLINE Ints operator()(vf x, vf y) const {
        Ints code = {};
#pragma GCC unroll 8
        for (int step = 1 << BITS >> 1; step; step /= 2) {
            const Ints further = code + step;
            code = (Ints)(y * cosine((vi)further) > x * sine((vi)further)) ? further : code;
        }
        return code;
    }
};
template <> struct Angles<0> {
    INLINE Angles(const float *, const float *) {}
    INLINE Ints operator()(vf, vf) const { return Ints{}; }
};

// Codes [pair][32 tokens] of `pairs` pairs of nodes; the radii take the nodes' place.
template <int BITS, bool FIRST>
void polar_level(const float *cosines, const float *sines, float *nodes, int pairs, uint8_t *codes) {
    const Angles<BITS> angles(cosines, sines);
    for (int p = 0; p < pairs; p++) {
        const vf r = load(nodes + 2 * p * W), s = load(nodes + (2 * p + 1) * W);
        Ints code;
        if constexpr (FIRST) {
            const Ints below = (Ints)(s < zero());
            code = angles(pick_lanes(below, -r, r), magnitude(s)) + (below & (1 << BITS));
        } else {
            code = angles(r, s);
        }
        store_codes(codes + p * 32, code);
        store(nodes + p * W, square_root(r * r + s * s));
    }
}

// Returns the radii, fp16, [count][W]: first what had no partner.
inline void polar(const kvp_encode_args &a, float *nodes, uint8_t *codes, uint16_t *radii) {
    const float *cosines = a.levels, *sines = a.steps;
    int count = a.dim;
    for (int level = 1; level <= a.angle_levels; level++) {
        const int pairs = count / 2;
        // About the square root of what a radius is made of.
        const vf unit = set1((float)(1 << (level - 1) / 2));
        if (count % 2) {
            store_halves(radii, load(nodes + (count - 1) * W) / unit);
            radii += W;
        }
        int boundaries = 4;
        if (level > 1) {
            polar_level<2, false>(cosines, sines, nodes, pairs, codes);
        } else {
            boundaries = 1 << (a.bits - 1);
            switch (a.bits) {
            case 1: polar_level<0, true>(cosines, sines, nodes, pairs, codes); break;
            case 2: polar_level<1, true>(cosines, sines, nodes, pairs, codes); break;
            case 3: polar_level<2, true>(cosines, sines, nodes, pairs, codes); break;
            case 4: polar_level<3, true>(cosines, sines, nodes, pairs, codes); break;
            case 5: polar_level<4, true>(cosines, sines, nodes, pairs, codes); break;
            case 6: polar_level<5, true>(cosines, sines, nodes, pairs, codes); break;
            case 7: polar_level<6, true>(cosines, sines, nodes, pairs, codes); break;
            default: polar_level<7, true>(cosines, sines, nodes, pairs, codes);
            }
        }
        cosines += boundaries;
        sines += boundaries;
        codes += pairs * 32;
        count = pairs;
    }
    const vf unit = set1((float)(1 << a.angle_levels / 2));
    for (int i = 0; i < count; i++, radii += W) store_halves(radii, load(nodes + i * W) / unit);
}
} // namespace KVP_NS
