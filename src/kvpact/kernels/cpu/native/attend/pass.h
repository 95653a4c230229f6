// What the query rows of one pass over the slots share.
#pragma once
#include "attend/exact.h"
#include "attend/formats.h"
#include "attend/whole_loops.h"
#include "trellis_numbers.h"

namespace KVP_NS {

// Passes whose scores are computed one after the other before any of their values is read: the
// longer the pieces of memory that are read in their order, the faster.
constexpr int TURN = 8;

// Codes of a trellis: wider words, fp16 scales, the mean of a tile.
struct Widened {
    Trellis key, value;
    alignas(64) uint32_t words[2 * WIDE_TILE];
    Edges edges[2];
    alignas(64) uint16_t scale[BLOCK];
    alignas(64) float mean[MOST_DIM];
};

// Memory of one thread for its task.
struct TaskScratch {
    alignas(64) float folded[MAX_ROWS * MOST_DIM];
    alignas(64) float score[TURN][MAX_ROWS][BLOCK], weight[MAX_ROWS][BLOCK];
    alignas(64) float weights[MOST_GROUPS * MAX_ROWS * BLOCK]; // weight times scale, by channel group
    alignas(64) float shift[MOST_GROUPS * MAX_ROWS];
    Widened *widened; // where K or V are codes of a trellis
#if defined(KVP_WHOLE)
    LevelTable key_levels, value_levels;
    WholeWeights whole;
    alignas(64) float query[WholeQuery::floats(MAX_ROWS, MOST_DIM)]; // `folded` as factors
#endif
};

// Sizes of a stream's slots, reckoned once per task.
struct Sizes {
    int64_t tile, side; // bytes of a tile's codes, and of one number per token
    int groups;
    Sizes(const kvp_stream &s, bool key) : tile(tile_bytes(s, key)), groups(groups_of(s)) {
        side = side_bytes(s);
    }
};

// Everything that the query rows of one pass need.
struct Pass {
    const Job &job;
    const kvp_attend_args &a;
    const Sizes &k_size, &v_size;
    int64_t b, h, first_head, last_head, end; // of the task: its heads, and the end of its tokens
    int64_t r0;
    int rows, passed;
    TaskScratch &scratch;
    float (*score)[BLOCK];
    float (*weight)[BLOCK];
};

// The slots that are read next: those of the next head, or those a block later. Memory is read in
// its order, but prefetching by the hardware alone falls behind.
struct Ahead {
    const kvp_stream &x;
    const Sizes &size;
    int64_t b, h, left; // tokens that are left
    Place place;

    Ahead(const kvp_stream &stream, const Sizes &sizes, const Pass &p, int64_t t)
        : x(stream), size(sizes), b(p.b), h(p.h + 1), left(upto(x.exact_from, p.end) - t), place(x, t) {
        if (h < p.last_head) return;
        h = p.first_head;
        left -= p.job.block;
        place = Place(x, left > 0 ? t + p.job.block : t);
    }
    // Prefetches what stands with the codes of a tile; returns where the codes are, and goes on.
    INLINE const char *next(const void *otherwise) {
        if (left <= 0) return (const char *)otherwise;
        piece(place.tile(x.scale, b, h, size.side), size.side);
        lines(place.tile(x.zero, b, h, size.side), size.side);
        if (x.group && (uint32_t)place.inside % (uint32_t)x.group == 0) {
            lines(place.group(x.fold, b, h, x.group, 2 * (int64_t)x.dim), 2 * (int64_t)x.dim);
            lines(place.group(x.shift, b, h, x.group, 2 * (int64_t)x.dim), 2 * (int64_t)x.dim);
        }
        if (x.base.base) piece(place.tile(x.base, b, h, 8), 8);
        if (x.mean.base && (uint32_t)place.inside % (uint32_t)x.trellis->center == 0) {
            lines(place.group(x.mean, b, h, x.trellis->center, x.dim), x.dim);
            piece(place.group(x.step, b, h, x.trellis->center, 2), 2);
        }
        const char *codes = place.tile(x.codes, b, h, size.tile);
        place.step(x);
        left -= TILE;
        return codes;
    }
    // Of small pieces side by side, the first one in a line stands for all.
    static INLINE void piece(const char *at, int64_t bytes) {
        if ((uintptr_t)at % 64 < (uintptr_t)bytes) lines(at, bytes);
    }
    static INLINE void lines(const char *at, int64_t bytes) {
        if (at)
            for (int64_t i = 0; i < bytes; i += 64) prefetch(at + i);
    }
};
} // namespace KVP_NS
