// The C interface of the native kernels. Mirrored by ../structs.py; ABI counts changes.
#pragma once
#include <stdint.h>

#define KVP_ABI 2

#if defined(_WIN32)
#define KVP_EXPORT __declspec(dllexport)
#else
#define KVP_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { KVP_F32 = 0, KVP_F16 = 1, KVP_BF16 = 2 };

// What the slots hold: codes that a table turns into numbers, codes that are the numbers
// (less an offset, table[0]), or one number per channel and token.
enum { KVP_TABLE = 0, KVP_LINEAR = 1, KVP_RAW = 2, KVP_E4M3 = 3, KVP_E5M2 = 4 };

// Storage of a field: a pointer per segment (or page), strides in bytes. No pointers: no field.
typedef struct {
    const char *const *base;
    int64_t row, head;
} kvp_field;

// Exact tokens [B, H, T, D], the last axis without gaps; strides in bytes.
typedef struct {
    const char *data;
    int64_t row, head, token;
} kvp_exact;

// K or V of one layer:
//   x = scale[token, channel group] * level + zero[token, channel group]      or, per channel,
//   x = scale[token] * (fold[channel] * level + shift[channel])               (shift_scaled)
//   x = scale[token] * (fold[channel] * level) + shift[channel]               (otherwise)
//   V: x = fold[channel] * (scale[token] * level + zero[token])
typedef struct {
    int32_t kind, bits, dim;
    int32_t number;        // dtype of raw numbers
    int32_t group;         // tokens that share fold and shift
    int32_t channels;      // channels that share a scale and a zero
    int32_t shift_scaled;
    int32_t dtype;         // of the exact tokens
    float middle;          // taken off the levels: zero and shift are at it, not at code 0
    int32_t unused;
    const float *table;    // 2**bits levels
    const float *signs;    // of the rotation, or NULL
    int64_t segment_tokens;
    kvp_field codes, scale, zero, fold, shift;
    int64_t exact_from;    // tokens from here on are exact
    kvp_exact tail, fresh, sinks;
    const int64_t *sink_positions;  // [B, n_sinks]
    int64_t n_sinks;
} kvp_stream;

typedef struct {
    kvp_stream k, v;
    int64_t batch, heads, groups, queries;
    int64_t held, fresh;   // tokens of the cache, and new ones behind them
    int64_t first;         // position of the first query
    const char *q;         // [B, H_q, q_len, D]
    int64_t q_row, q_head, q_token;
    float *out;            // [B, H_q, q_len, D_v], no gaps
    int32_t q_dtype, causal;
    int64_t window;        // 0: none
    const int64_t *padding;      // [B] or NULL
    const float *sink_logits;    // [H_q] or NULL
    const char *mask;            // bytes (1: may be seen) or floats, or NULL
    int64_t mask_row, mask_head, mask_query;  // strides in bytes; tokens have no gaps
    int32_t mask_float, fast;
    float scale, softcap;        // softcap 0: none
    int64_t threads;
} kvp_attend_args;

KVP_EXPORT int kvp_abi(void);
// The levels compiled in and supported by this processor, as bits: 1 base, 2 AVX2, 4 AVX-512, 8 NEON.
KVP_EXPORT int kvp_levels(void);
// Carries out `count` calls at once, on the threads of the first. Level: one bit of kvp_levels.
// Returns 0, or why nothing was computed: 1 no such level, 2 a call that is not covered, 3 no memory.
KVP_EXPORT int kvp_attend(int level, const kvp_attend_args *args, int64_t count);
// One call with many query rows per KV head, which share what is decoded. With `latent`, K holds
// latents and V rotated keys: the queries are as wide as both, and the latents are the values too.
KVP_EXPORT int kvp_attend_rows(int level, const kvp_attend_args *args, int latent);
// Reads memory and does next to nothing with it: how fast the slots could come at best.
KVP_EXPORT uint64_t kvp_read(int level, int64_t threads, int64_t count, const char *const *data, int64_t bytes);

#ifdef __cplusplus
}
#endif
