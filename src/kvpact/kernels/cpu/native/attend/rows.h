// One call of the kernel for many query rows of a KV head, seen by the pool and by every level.
#pragma once
#include "attend/job.h"

constexpr int TOKENS = 128;     // decoded at a time
constexpr int MOST_AT_ONCE = 512; // rows of a task

struct RowsJob {
    const kvp_attend_args *args;
    bool latent;             // K holds latents, which are values too; V holds rotated keys
    int64_t rows;            // query rows of a KV head: groups * queries
    int64_t at_once, parts;  // rows of a task (a multiple of 16), and tasks that share a head's rows
    int64_t q_width, width;  // of a query and of an output, padded to 32
    int64_t begin, end;      // tokens that any query sees
    int64_t splits, chunk;   // parts of the tokens, and tokens of a part
    float *partial;          // a Part per task, where splits > 1
    float *(*memory)(int64_t floats); // scratch memory of the calling thread; NULL: there is none
    bool *failed;

    const kvp_stream &values() const { return latent ? args->k : args->v; }
    int64_t part_size() const { return at_once * (2 * width + 2); }
};

// What the rows of a task have gathered: sums of exact and of packed values, by row, the highest
// score and the sum of the weights.
struct Part {
    float *exact, *packed, *peak, *total;
    Part(const RowsJob &job, float *at)
        : exact(at), packed(at + job.at_once * job.width), peak(at + 2 * job.at_once * job.width),
          total(peak + job.at_once) {}
};
