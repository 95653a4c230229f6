// What a level does for the encoder, seen by every level.
#pragma once
#include "encode.h"

constexpr int ENCODE_DIM = 1024;   // widest vectors
constexpr int ENCODE_TOKENS = 128; // largest group

struct Span {
    int64_t pair, begin, end; // row * heads + head; tokens of the call
};

#define KVP_ENCODE_LEVEL(name)                                             \
    namespace name {                                                       \
    void encode_span(const kvp_encode_args &args, Span span);              \
    void encode_few(const kvp_encode_args &args, int64_t first, int64_t last); \
    uint32_t largest(const void *p, int64_t count, int32_t dtype);         \
    }
KVP_ENCODE_LEVEL(kvp_base)
KVP_ENCODE_LEVEL(kvp_neon)
KVP_ENCODE_LEVEL(kvp_avx2)
KVP_ENCODE_LEVEL(kvp_avx512)
