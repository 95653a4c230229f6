// The C interface of decoding. Mirrored by ../decode_structs.py; the ABI is that of kvpact.h.
#pragma once
#include "kvpact.h"

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

#ifdef __cplusplus
extern "C" {
#endif
// Level as in kvp_attend. Returns 0, or why nothing was written.
KVP_EXPORT int kvp_decode(int level, const kvp_decode_args *args);
#ifdef __cplusplus
}
#endif
