// What one call consists of, seen by the pool and by every level.
#pragma once
#include "kvpact.h"

constexpr int TILE = 32;
constexpr int BLOCK = 256; // tokens whose scores are held at a time
constexpr int MAX_ROWS = 8; // query rows that share one pass over the slots

struct Job {
    const kvp_attend_args *args;
    int64_t rows;             // query rows of a KV head: groups * queries
    int64_t k_width, v_width; // widths padded to 32
    int64_t begin, end;       // tokens that any query sees
    int64_t splits, chunk;    // parts of the tokens, and tokens of a part
    float *q, *rotated;       // [B * H][rows + MAX_ROWS][k_width]
    float *partial;           // [B * H * splits][rows + MAX_ROWS][2 + 2 * v_width]
    int64_t q_size() const { return (rows + MAX_ROWS) * k_width; }
    int64_t partial_row() const { return 2 + 2 * v_width; }
    // A pass may compute more rows than there are: those behind them are of this task alone.
    int64_t partial_size() const { return (rows + MAX_ROWS) * partial_row(); }
    int64_t pairs() const { return args->batch * args->heads; }
    // Memory that a call needs beside its arguments.
    int64_t floats() const { return pairs() * ((args->k.signs ? 2 : 1) * q_size() + splits * partial_size()); }
};

#define KVP_LEVEL(name)                             \
    namespace name {                                \
    void prepare(const Job &job);                   \
    void task(const Job &job, int64_t index);       \
    void finish(const Job &job);                    \
    uint64_t read(const char *data, int64_t bytes); \
    }
KVP_LEVEL(kvp_base)
KVP_LEVEL(kvp_neon)
KVP_LEVEL(kvp_avx2)
KVP_LEVEL(kvp_avx512)
