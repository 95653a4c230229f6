// The C interface of encoding. Mirrored by ../encoder.py; the ABI is that of kvpact.h.
#pragma once
#include "kvpact.h"

// How numbers become codes: levels of a codebook after a rotation; GGUF's integers; integers with
// a zero point, per token or per channel; 8-bit floats; KVarN's balanced tiles; signs alone (QJL);
// angles and radii (PolarQuant).
enum {
    KVP_CODEBOOK = 0,
    KVP_SYMMETRIC = 1,
    KVP_AFFINE = 2,
    KVP_CHANNEL = 3,
    KVP_FLOAT8 = 4,
    KVP_BALANCED = 5,
    KVP_SIGNS = 6,
    KVP_POLAR = 7
};
enum { KVP_LEAST_SQUARES = 0, KVP_NORM = 1, KVP_UNBIASED = 2 };

// Where the tokens of one stream (K or V of a layer) go. Storage of tokens that are not there is
// zero, and codes are ORed into it.
typedef struct {
    int32_t kind, bits, dim;
    int32_t by_channel;    // 1: a word of codes holds consecutive tokens of a channel (V)
    int32_t choice;        // codebook: of the scale; float8: 0 e4m3, 1 e5m2
    int32_t dtype;         // of x
    int32_t group;         // tokens that are encoded together; 0 or 1: one by one
    int32_t channels;      // channels that share a scale; polar: radii
    const float *signs;    // of the rotation, or NULL
    const float *levels;   // 2**bits
    const float *steps;    // boundaries as a search tree: [1] is the root, [2i], [2i + 1] its ends
    // Polar: cosines (levels) and sines (steps) of boundaries, level after level.
    int32_t angle_levels;
    int32_t angles_by_channel; // a bit for each level
    // Of further rotations, one after the other: of what a codebook leaves, or (signs) of the
    // rotated vector by the first one and then of the result. Their signs are stored.
    const float *sketch;
    int64_t sketches;
    kvp_exact x;           // [B, H, T, D]
    int64_t batch, heads, tokens;
    int64_t start;         // position of the first token
    int64_t segment_tokens;
    // A pointer per segment, the first for the one that `start` is in. No pointers: no field.
    kvp_field codes, scale, zero, mean, balance, sketched, residual, angles[6];
    int64_t threads;
} kvp_encode_args;

#ifdef __cplusplus
extern "C" {
#endif
// Encodes `count` streams. Level as in kvp_attend. Returns 0, or why nothing was written.
KVP_EXPORT int kvp_encode(int level, const kvp_encode_args *args, int64_t count);
// The largest magnitude in x ([B, H, T, D]); NaN or infinity where one number is.
KVP_EXPORT float kvp_magnitude(int level, const kvp_exact *x, int32_t dtype, int64_t batch, int64_t heads,
                               int64_t tokens, int64_t dim);
#ifdef __cplusplus
}
#endif
