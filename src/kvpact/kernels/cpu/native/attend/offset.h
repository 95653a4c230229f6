// What keys are stored without (kernels/offset.py), as logits: q . R_t b for packed tokens.
#pragma once
#include "simd/level.h"
#include "sizes.h"

namespace KVP_NS {

// Cosines and sines of a pair at the positions of consecutive tokens.
struct Waves {
    const float *cosines, *sines;
    int64_t first; // position of the first token

    Waves(const kvp_offset &o, int64_t pair, int64_t b, int64_t t)
        : cosines(o.table + 2 * o.channels[3 * pair + 2] * o.length), sines(cosines + o.length),
          first(t - (o.origin ? o.origin[b] : 0)) {}
    INLINE vf at(const float *wave, int64_t i) const {
        if (first + i >= 0) return load(wave + first + i);
        alignas(64) float numbers[W];
        for (int k = 0; k < W; k++) numbers[k] = wave[first + i + k > 0 ? first + i + k : 0];
        return load(numbers);
    }
    INLINE vf cosine(int64_t i) const { return at(cosines, i); }
    INLINE vf sine(int64_t i) const { return at(sines, i); }
};

// The two factors of a pair in the logit of a query row: along b, and across it.
INLINE void offset_factors(const kvp_offset &o, int64_t h, int64_t pair, const float *q, float *along, float *across) {
    const float *b = o.bias + 2 * (h * o.pairs + pair);
    const float x = q[o.channels[3 * pair]], y = q[o.channels[3 * pair + 1]];
    *along = x * b[0] + y * b[1];
    *across = y * b[0] - x * b[1];
}
} // namespace KVP_NS
