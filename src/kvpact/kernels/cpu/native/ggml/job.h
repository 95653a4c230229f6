// An operation of attention, read once, and the kernels of an instruction set.
#pragma once
#include <math.h>

#include "ggml/ggml_abi.h"
#include "simd/level.h"

constexpr int64_t TOKENS = 64; // of a tile
constexpr int64_t BLOCK = 32;  // numbers of a quantised block
constexpr int64_t MOST_WIDTH = 576;
constexpr int64_t MOST_ROWS = 96; // of a task

static constexpr bool is_number(int type) { return type == ggml_abi::F32 || type == ggml_abi::F16 || type == ggml_abi::BF16; }
static constexpr bool has_least(int type) { return type == ggml_abi::Q4_1 || type == ggml_abi::Q5_1; }
// Bytes of 32 numbers; 0: not covered.
static constexpr size_t block_size(int type) {
    switch (type) {
    case ggml_abi::F32: return 128;
    case ggml_abi::F16:
    case ggml_abi::BF16: return 64;
    case ggml_abi::Q8_0: return 34;
    case ggml_abi::Q4_0:
    case ggml_abi::IQ4_NL: return 18;
    case ggml_abi::Q4_1: return 20;
    case ggml_abi::Q5_0: return 22;
    case ggml_abi::Q5_1: return 24;
    default: return 0;
    }
}

// Rows of a KV head: row i is query i / groups and head i % groups of the group.
struct Job {
    const ggml_abi::Tensor *q, *k, *v, *mask, *sinks, *out;
    int64_t k_dim, v_dim, queries, heads, groups, tokens, streams, shared; // heads of K and V; streams that share them
    float scale, softcap, bias, slopes, more_slopes;                       // all for powers of 2
    int64_t sloped;

    INLINE const float *query(int64_t s, int64_t h, int64_t i) const {
        return (const float *)((const char *)q->data + i * q->nb[1] + h * q->nb[2] + s * q->nb[3]);
    }
    INLINE const char *key(int64_t s, int64_t h, int64_t t) const {
        return (const char *)k->data + t * k->nb[1] + h * k->nb[2] + s / shared * k->nb[3];
    }
    INLINE const char *value(int64_t s, int64_t h, int64_t t) const {
        return (const char *)v->data + t * v->nb[1] + h * v->nb[2] + s / shared * v->nb[3];
    }
    INLINE const uint16_t *seen(int64_t s, int64_t h, int64_t i) const {
        return (const uint16_t *)((const char *)mask->data + i * mask->nb[1] + h % mask->ne[2] * mask->nb[2] +
                                  s % mask->ne[3] * mask->nb[3]);
    }
    INLINE float *result(int64_t s, int64_t h, int64_t i) const {
        return (float *)((char *)out->data + h * out->nb[1] + i * out->nb[2] + s * out->nb[3]);
    }
    INLINE float slope(int64_t h) const {
        if (bias <= 0) return 1;
        return h < sloped ? powf(slopes, (float)(h + 1)) : powf(more_slopes, (float)(2 * (h - sloped) + 1));
    }
};

struct Rows {
    int64_t stream, head, first, count;
};

// What rows have gathered: the greatest logit (times log2 e), the sum of weights, the weighted sums of values, each
// row's `padded(v_dim)` apart.
struct Sums {
    float *peak, *total, *acc;
};
static constexpr int64_t padded(int64_t dim) { return (dim + BLOCK - 1) / BLOCK * BLOCK; }

struct GgmlKernels {
    // All heads of tokens [from, to); sums of head h begin at row h * queries * groups. False: no memory.
    bool (*part)(const Job &, int64_t stream, int64_t from, int64_t to, Sums);
    // All tokens for some rows, to the end.
    bool (*rows)(const Job &, Rows);
    // A row's parts, `row` numbers apart, merged into the first, to the end.
    void (*merge)(const Job &, int64_t stream, int64_t head, int64_t row, int64_t parts, int64_t apart, Sums);
};
