// The C interface of the native kernels. Read by structs.py, member by member; KVP_ABI counts changes.
#pragma once
#include <stdint.h>

#define KVP_ABI 12

#if defined(KVP_GGML)
#define KVP_EXPORT // that library exports functions of its own
#elif defined(_WIN32)
#define KVP_EXPORT __declspec(dllexport)
#else
#define KVP_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Tokens whose codes lie together, channels of the widest vectors, tokens of the largest group that
// is encoded together.
enum { KVP_TILE = 32, KVP_MOST_DIM = 1024, KVP_MOST_GROUP = 128 };

// Tokens of an index whose keys share a scale per channel.
enum { KVP_INDEX_GROUP = 64 };

// Cells of half a step between the levels of a trellis, from -128 to 128: cell k + 256 is (k - 1) / 2 < z <= k / 2.
enum { KVP_CELLS = 513 };

enum { KVP_F32 = 0, KVP_F16 = 1, KVP_BF16 = 2 };

// What the slots hold: codes that a table turns into numbers, codes that are the numbers
// (less an offset, table[0]), one number per channel and token, or codes of a trellis.
enum { KVP_TABLE = 0, KVP_LINEAR = 1, KVP_RAW = 2, KVP_E4M3 = 3, KVP_E5M2 = 4, KVP_TRELLIS_CODES = 5 };

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

// What keys are stored without (kernels/offset.py): for each pair of channels, b turned by the angle of
// the position. The table has cosines and sines of all positions, `length` numbers each, by row.
typedef struct {
    int64_t pairs;               // 0: nothing
    const int32_t *channels;     // [pairs, 3]: both channels, and the row of the table
    const float *bias;           // [H, pairs, 2]
    const float *table;          // [rows, 2, length]
    int64_t length;
    const int64_t *origin;       // [B]: the token at position 0, or NULL; positions below 0 count as 0
} kvp_offset;

// Channels with a rotation and a trellis of their own (quantizers/trellis.py).
typedef struct {
    int32_t dim, bits;     // channels; bits of a code, 0 for channels that are zero
    int32_t memory;        // of the trellis: 3 (8 states) or 4 (16 states)
    float unit;            // of the levels
    const float *levels;   // 2**(bits + 1) whole numbers
    const float *signs;    // of the rotation
    const uint32_t *cells; // [2][KVP_CELLS]: what is nearest in each subset, a byte each: level, point
} kvp_block;

// Codes of a trellis: formats/bitpack.py has their places in words, `places` of methods/trellis_codec.py the
// order of steps. What a codec has learnt (methods/trellis_keys.py) is of all KV heads; NULL: nothing.
typedef struct {
    int32_t blocks, interleave; // blocks of channels; bits of the wider codes, 4 or 8
    kvp_block block[3];
    const float *weight;     // [heads][dim]: keys are multiplied, queries divided by it
    const int32_t *order;    // [heads][dim]: the channel that stands at each place of the blocks
    const float *deviation;  // [heads][3]: blocks are divided by it
    const float *first;      // [heads][dim]: the first key
    int32_t center, unused;  // tokens that share a mean, or 0
} kvp_trellis;

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
    float unit;            // levels are whole numbers from -128 to 127 times this; 0: they are not
    int32_t treated;       // 1: keys with K's treatment, whose numbers are not rotated
    int32_t unused;
    const float *table;    // 2**bits levels
    const float *signs;    // of the rotation, or NULL
    int64_t segment_tokens;
    kvp_field codes, scale, zero, fold, shift;
    const kvp_trellis *trellis;  // or NULL; its scales are bytes (e5m3)
    kvp_field base;        // 2 bits of a token, [2] words a tile: 0 mean, 1 first key, 2 nothing
    kvp_field mean, step;  // [dim] int8, and one fp16, of a group of `center` tokens
    int64_t exact_from;    // tokens from here on are exact
    kvp_exact tail, fresh, sinks;
    const int64_t *sink_positions;  // [B, n_sinks]
    int64_t n_sinks;
    kvp_offset offset;
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
    int32_t mask_float;
    int32_t by_token;            // 1: out is [B, queries, H_q, D_v]
    float scale, softcap;        // softcap 0: none
    int64_t threads;
} kvp_attend_args;

// How numbers become codes: levels of a codebook after a rotation; GGUF's integers; integers with
// a zero point, per token or per channel; 8-bit floats; KVarN's balanced tiles; a trellis.
enum {
    KVP_CODEBOOK = 0,
    KVP_SYMMETRIC = 1,
    KVP_AFFINE = 2,
    KVP_CHANNEL = 3,
    KVP_FLOAT8 = 4,
    KVP_BALANCED = 5,
    KVP_TRELLIS = 6
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
    int32_t channels;      // channels that share a scale
    const float *signs;    // of the rotation, or NULL
    const float *levels;   // 2**bits
    const float *steps;    // boundaries as a search tree: [1] is the root, [2i], [2i + 1] its ends
    kvp_exact x;           // [B, H, T, D]
    int64_t batch, heads, tokens;
    int64_t start;         // position of the first token
    int64_t segment_tokens;
    // A pointer per segment, the first for the one that `start` is in. No pointers: no field.
    kvp_field codes, scale, zero, mean, balance;
    kvp_field base, step;  // as in kvp_stream
    const kvp_trellis *trellis;  // or NULL
    int64_t sinks;         // in the place of tokens in front of this one stands the mean of their group's others
    int64_t threads;
} kvp_encode_args;

// What keys of a trellis learn from a cache's first tokens (methods/trellis_learning.py).
typedef struct {
    int32_t dim, dtype;          // of x
    kvp_exact x;                 // [B, H, T, D], T a power of two from 32 to 128, and a multiple of the center
    int64_t batch, heads, tokens;
    const kvp_trellis *trellis;  // its blocks and center; nothing was learnt
    const int64_t *padding;      // [B] or NULL
    int64_t sinks;
    const float *query_energy;   // [H, D] or NULL
    kvp_exact q;                 // or [B, q_heads, q_tokens, D], in x's dtype, of which it is the mean energy; or NULL
    int64_t q_heads, q_tokens;
    int32_t weighted, sorted;    // whether weights other than 1 are learnt, and another order
    uint16_t *first;             // [H, D] fp16, or NULL: it is no base
    uint16_t *weight;            // [H, D] fp16; NULL: the first key alone is learnt
    int16_t *order;              // [H, D]
    uint16_t *deviation;         // [H, blocks] fp16
    kvp_trellis *known;          // its weight, order, deviation and first get the same, as kernels read them
    int64_t threads;
} kvp_learn_args;

// The first tokens of a layer: what K learns from them, then K and V into slots. What layers have in common is a
// plan: of fields of slots the number in the table, from 1 on, stands in the place of the address, and of what is
// learnt any number but 0.
typedef struct {
    kvp_learn_args learn;        // no tokens: nothing is learnt
    kvp_encode_args k, v;
    int64_t k_segments, v_segments;
    int64_t tokens;              // of the prompt
    int64_t k_tail, v_tail;      // the first token of the tail
    int64_t k_sinks, v_sinks;    // how many are copied
} kvp_prompt_plan;

typedef struct {
    const kvp_prompt_plan *plan;
    kvp_exact k, v, q;
    const char *const *k_table;  // [fields][segments]
    const char *const *v_table;
    uint16_t *state;             // what is learnt: first, weight, order, deviation, one behind the other
    float *numbers;              // the same as kernels read it: weight, first, order, deviation
    kvp_trellis *known;          // gets all of the plan's, and where these numbers are
    char *k_tail;                // [B, H, tokens of the tail, D]
    char *v_tail;
    char *k_sinks;               // [B, H, sinks, D]
    char *v_sinks;
    int64_t threads;
} kvp_prompt_args;

// Packed tokens of one stream, and where their numbers go.
typedef struct {
    kvp_stream slots;      // exact tokens don't count; without signs, vectors stay as they are
    int32_t by_channel;    // 1: a word of codes holds consecutive tokens of a channel (V)
    int32_t dtype;         // of out; what is beyond fp16 becomes its largest number
    int64_t batch, heads;
    int64_t first, last;   // tokens
    char *out;             // [B, H, last - first, D], the last axis without gaps; strides in bytes
    int64_t row, head, token;
    int64_t threads;
} kvp_decode_args;

// Queries over the packed keys of an index.
typedef struct {
    const int8_t *codes;   // [B, tokens, dim]
    const float *scale;    // [B, tokens / KVP_INDEX_GROUP, dim]
    const float *q;        // [B, queries, heads, dim]
    const float *weight;   // [B, queries, heads]: of the positive scores of heads, which are summed up; or NULL
    float *out;            // [B, queries, out_row], or without weights [B, queries, heads, out_row]
    int64_t out_row;       // numbers
    int64_t batch, queries, heads, tokens, dim, threads;
} kvp_scan_args;

// Parts of one field's slots that lie apart, and where they are to lie side by side. An item (a token, or a
// whole unit) is `pieces` pieces of `size` bytes, `step` bytes apart.
typedef struct {
    kvp_field from;
    int64_t segment_units; // of a segment
    int64_t unit;          // bytes
    int64_t row, head, heads;
    const int64_t *items;  // [count], counted from the first segment's first
    int64_t count;
    const int64_t *places; // [inside]: where in a unit each item begins, in bytes
    int64_t inside;        // items of a unit
    int64_t pieces, step, size;
    char *out;             // [heads, units, unit], zeros before
    int64_t out_head;      // bytes
} kvp_gather_args;

// A step: new tokens of a layer, and queries that attend over them and the past, in one call. What stays
// from step to step is a plan, made once: shapes, strides, rules, where the slots lie.
enum { KVP_STEP_FEW = 0, KVP_STEP_ROWS = 1, KVP_STEP_LATENT = 2 };

// How K or V is stored.
typedef struct {
    kvp_encode_args form;  // the fields point to all segments of the stream
    float limit;           // the largest magnitude of a new token
    int32_t kept;          // of the new tokens the last ones, that are copied
} kvp_store;

typedef struct {
    kvp_attend_args attend; // what a step does not say
    kvp_store k, v;
    int64_t kernel;
} kvp_step_plan;

// K or V of one step. `tail` are the exact tokens from `exact_from` on.
typedef struct {
    int64_t exact_from;
    kvp_exact tail;
    const char *fresh;     // the new tokens
    char *spare;           // behind the tail: where the first of the new tokens is copied to, or would be; or NULL
    int64_t start, tokens; // that are encoded, if any
    const char *x;         // where they lie, with the tail's strides; NULL: they are the new ones
} kvp_append;

typedef struct {
    const kvp_step_plan *plan;
    kvp_append k, v;
    const char *q;
    float *out;            // or, of one row in a call of its own:
    char *rounded;         // [H_q, q_len, D_v] in q's dtype; what is beyond fp16 is its largest number
    int64_t rounded_head, rounded_token;
    int64_t held, threads;
} kvp_step_args;

// Numbers that are only looked at: [B, H, T, D].
typedef struct {
    kvp_exact x;
    int64_t dtype, batch, heads, tokens, dim;
} kvp_tensor;

KVP_EXPORT int kvp_abi(void);
// Bytes of scratch memory that the calling thread holds for its next call; `all` (or NULL) gets those of
// all threads. A thread gives back nothing before it ends.
KVP_EXPORT int64_t kvp_scratch(int64_t *all);
// While there are holders, glibc's malloc asks the system for every block from 128 KiB on, and gives it back
// at once; without, from 32 MiB on. Returns how many there are.
KVP_EXPORT int64_t kvp_heap_hold(int change);
// Gives the system back what is free in glibc's heap, and at the end of the caller's. Returns whether anything was.
KVP_EXPORT int kvp_heap_trim(void);
// Lets calls run on OpenMP's threads, by GOMP_parallel, or by __kmpc_fork_call, __kmpc_global_thread_num and
// __kmpc_push_num_threads; with NULL for both on threads of its own. Returns whether OpenMP is used.
KVP_EXPORT int kvp_openmp(void *gomp, void *fork, void *caller, void *threads);
// The levels compiled in and supported by this processor, as bits: 1 base, 2 AVX2, 4 AVX-512,
// 8 NEON, 16 AVX-512 with VBMI.
KVP_EXPORT int kvp_levels(void);
// Carries out `count` calls at once, on the threads of the first. Level: one bit of kvp_levels.
// Returns 0, or why nothing was computed: 1 no such level, 2 a call that is not covered, 3 no memory.
KVP_EXPORT int kvp_attend(int level, const kvp_attend_args *args, int64_t count);
// One call with many query rows per KV head, which share what is decoded. With `latent`, K holds
// latents and V rotated keys: the queries are as wide as both, and the latents are the values too.
KVP_EXPORT int kvp_attend_rows(int level, const kvp_attend_args *args, int latent);
// Reads memory and does next to nothing with it: how fast the slots could come at best.
KVP_EXPORT uint64_t kvp_read(int level, int64_t threads, int64_t count, const char *const *data, int64_t bytes);
// Encodes `count` streams. Level as in kvp_attend. Returns 0, or why nothing was written (or, 3, not all).
KVP_EXPORT int kvp_encode(int level, const kvp_encode_args *args, int64_t count);
// Learns and encodes. Level as in kvp_attend. Returns 0, what kvp_encode returns, or 4 where what was learnt is no
// number in fp16, or a weight is zero; then nothing is encoded.
KVP_EXPORT int kvp_prompt(int level, const kvp_prompt_args *args);
// Writes the largest magnitude in each of `count` tensors; NaN or infinity where one number is. Returns 0, or 1:
// no such level.
KVP_EXPORT int kvp_magnitudes(int level, const kvp_tensor *x, int64_t count, int64_t threads, float *out);
// Level as in kvp_attend. Returns 0, or why nothing was written (or, 3, not all).
KVP_EXPORT int kvp_decode(int level, const kvp_decode_args *args);
// Level as in kvp_attend. Returns 0, or why nothing was written (or, 3, not all).
KVP_EXPORT int kvp_scan(int level, const kvp_scan_args *args);
// Always returns 0.
KVP_EXPORT int kvp_gather(const kvp_gather_args *args);
// Steps of several sequences, all of one kernel: checks q, K and V, attends, encodes what is to be encoded
// and copies the new tokens behind the tails. Returns 0; 4 where a number is NaN, infinite or beyond its
// limit, and nothing was written; else as kvp_attend, and what lies behind the tokens held may be written.
KVP_EXPORT int kvp_step(int level, const kvp_step_args *steps, int64_t count);

#ifdef __cplusplus
}
#endif
