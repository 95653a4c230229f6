// What one call consists of, seen by the pool and by every level.
#pragma once
#include "sizes.h"

constexpr int BLOCK = 256; // at most so many tokens' scores are held at a time
constexpr int MAX_ROWS = 8; // query rows that share one pass over the slots

// Where a query's output stands, in rows of numbers.
inline int64_t output_row(const kvp_attend_args &a, int64_t b, int64_t head, int64_t query) {
    const int64_t heads = a.heads * a.groups;
    return a.by_token ? (b * a.queries + query) * heads + head : (b * heads + head) * a.queries + query;
}

struct Job {
    const kvp_attend_args *args;
    int64_t rows;             // query rows of a KV head: groups * queries
    int64_t k_width, v_width; // widths padded to 32
    int64_t begin, end;       // tokens that any query sees
    int64_t block;            // tokens whose scores are held at a time, BLOCK or half of it
    int64_t splits, chunk;    // parts of the tokens, and tokens of a part
    int64_t heads;            // KV heads of a task, one after the other in each block of tokens
    float *q, *rotated;       // [B * H][rows + MAX_ROWS][k_width]
    float *partial;           // [B * H * splits][rows + MAX_ROWS][2 + 2 * v_width]
    int64_t q_size() const { return (rows + MAX_ROWS) * k_width; }
    int64_t partial_row() const { return 2 + 2 * v_width; }
    // A pass may compute more rows than there are: those after them are of this task alone.
    int64_t partial_size() const { return (rows + MAX_ROWS) * partial_row(); }
    float *whole;             // queries as whole numbers, see WholeQuery: [B * H][whole_size]
    int64_t whole_size;
    // Whether packed keys are products of other queries than exact ones.
    bool rotates() const { return args->k.signs || args->k.kind == KVP_TRELLIS_CODES; }
    int64_t pairs() const { return args->batch * args->heads; }
    int64_t parts() const { return (args->heads + heads - 1) / heads; } // of the heads of a row
    int64_t tasks() const { return args->batch * parts() * splits; }
    // Memory that a call needs besides its arguments.
    int64_t floats() const {
        return pairs() * ((rotates() ? 2 : 1) * q_size() + splits * partial_size() + whole_size);
    }
};
