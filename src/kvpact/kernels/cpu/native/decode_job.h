// What a level does for the decoder, seen by every level.
#pragma once
#include "decode.h"
#include "encode_job.h"

// Tokens of one head: begin <= position < end.
#define KVP_DECODE_LEVEL(name)                                 \
    namespace name {                                           \
    void decode_span(const kvp_decode_args &args, Span span); \
    }
KVP_DECODE_LEVEL(kvp_base)
KVP_DECODE_LEVEL(kvp_neon)
KVP_DECODE_LEVEL(kvp_avx2)
KVP_DECODE_LEVEL(kvp_avx512)
