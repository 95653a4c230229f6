// Exact tokens, and other small things around the packed slots.
#pragma once
#include "attend/job.h"
#include "simd/level.h"

namespace KVP_NS {

constexpr float LOG2E = 1.44269504088896340736f;

// `dim` numbers of a dtype as fp32; `to` has room up to the next multiple of 16, left as it is.
INLINE void to_floats(float *to, const char *from, int dtype, int dim) {
    if (dtype == KVP_F32) {
        memcpy(to, from, 4 * (size_t)dim);
        return;
    }
    const uint16_t *x = (const uint16_t *)from;
    int c = 0;
    for (; c + W <= dim; c += W) store(to + c, dtype == KVP_F16 ? load_half(x + c) : load_bf16(x + c));
    if (c < dim) {
        uint16_t part[W] = {0};
        memcpy(part, x + c, 2 * (size_t)(dim - c));
        store_first(to + c, dtype == KVP_F16 ? load_half(part) : load_bf16(part), dim - c);
    }
}

// W numbers in fp16 from c on, zeros from dim on.
INLINE vf halves(const uint16_t *x, int64_t c, int64_t dim) {
    if (c + W <= dim) return load_half(x + c);
    uint16_t part[W] = {0};
    if (c < dim) memcpy(part, x + c, 2 * (size_t)(dim - c));
    return load_half(part);
}

// out[i * stride] = the sum of x[i], for four vectors.
INLINE void store_sums(float *out, int64_t stride, vf a, vf b, vf c, vf d) {
    alignas(16) float sums[4];
    sum4(sums, a, b, c, d);
    for (int i = 0; i < 4; i++) out[i * stride] = sums[i];
}

// to += factor * from
INLINE void add_scaled(float *to, const float *from, float factor, int64_t width) {
    const vf f = set1(factor);
    for (int64_t c = 0; c < width; c += W) store(to + c, fma(load(from + c), f, load(to + c)));
}

INLINE void scale_by(float *x, float factor, int64_t width) {
    const vf f = set1(factor);
    for (int64_t c = 0; c < width; c += W) store(x + c, mul(load(x + c), f));
}

INLINE const char *exact_token(const kvp_stream &s, const kvp_attend_args &a, int64_t b, int64_t h, int64_t t) {
    if (t >= a.held) return s.fresh.data + b * s.fresh.row + h * s.fresh.head + (t - a.held) * s.fresh.token;
    return s.tail.data + b * s.tail.row + h * s.tail.head + (t - s.exact_from) * s.tail.token;
}

// x = cap * tanh(x / cap), rounded once: three roundings of large logits would show in the output.
INLINE void soft_cap(float *x, int64_t n, float cap) {
    const double shifter = 6755399441055744.0; // 1.5 * 2**52: adding it rounds to whole numbers
    for (int64_t i = 0; i < n; i++) {
        // tanh(y) = (e - 1) / (e + 1), e = exp(2 |y|)
        double y = 2 * fabs((double)x[i]) / cap;
        y = y < 40 ? y : 40;
        const double shifted = y * 1.4426950408889634 + shifter;
        const double f = y - (shifted - shifter) * 0.6931471805599453;
        const double terms[] = {1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1, 1};
        double e = 1.0 / 3628800;
        for (int k = 0; k < 10; k++) e = e * f + terms[k];
        uint64_t bits, power;
        memcpy(&power, &shifted, 8);
        memcpy(&bits, &e, 8);
        bits += power << 52;
        memcpy(&e, &bits, 8);
        x[i] = copysignf((float)(cap * ((e - 1) / (e + 1))), x[i]);
    }
}

// Where the storage of a token lies: its segment (or page), and the tokens before it in there.
struct Place {
    int64_t segment, inside;
    // To the next tile.
    INLINE void step(const kvp_stream &s) {
        inside += TILE;
        if (inside < s.segment_tokens) return;
        inside = 0;
        segment++;
    }
    INLINE Place(const kvp_stream &s, int64_t t)
        : segment((uint32_t)t / (uint32_t)s.segment_tokens), inside(t - segment * s.segment_tokens) {}
    // A field's storage; it has `unit` bytes per tile.
    INLINE const char *tile(const kvp_field &f, int64_t b, int64_t h, int64_t unit) const {
        return f.base ? f.base[segment] + b * f.row + h * f.head + inside / TILE * unit : nullptr;
    }
    // The same for a field with `unit` bytes per group of tokens.
    INLINE const char *group(const kvp_field &f, int64_t b, int64_t h, int64_t tokens, int64_t unit) const {
        return f.base ? f.base[segment] + b * f.row + h * f.head + (uint32_t)inside / (uint32_t)tokens * unit : nullptr;
    }
};
} // namespace KVP_NS
