// Words of V of a trellis, made wider a few channels at a time, just before they are read.
#pragma once
#include "attend/job.h"
#include "attend/whole.h"

namespace KVP_NS {

typedef void (*WidenChannels)(uint32_t *, int64_t, const uint32_t *, const Edges &, int64_t, int64_t, int64_t, int64_t, const uint8_t *);

#if defined(KVP_WHOLE)
template <int BITS, int C> using Wider = LevelBytes<BITS, C>;
#else
template <int BITS, int C> using Wider = LevelWords<BITS, C>;
#endif

// Scratch memory of a thread, and how to fill it.
struct Widening {
    const TrellisBlock &block;
    WidenChannels widen;
    int rows;         // of the lowest plane
    uint32_t *words;
    Edges *edges;     // two

    Widening(const Trellis &x, uint32_t *scratch, Edges *two) : block(x.block[0]), words(scratch), edges(two) {
        by_code(block.bits, x.wide, [&](auto bits, auto c) {
            rows = Planes<bits()>::width[0];
            widen = widen_channels<bits(), c(), Wider<bits(), c()>>;
        });
    }
    // Channels c to end of one of several tiles, [words][stride].
    INLINE const uint32_t *channels(const uint32_t *const *tiles, int count, int tile, int c, int end, int stride) const {
        if (c == 0) {
            if (tile == 0) edges[0].copy(tiles[0], block.dim, rows);
            if (tile + 1 < count) edges[(tile + 1) % 2].copy(tiles[tile + 1], block.dim, rows);
        }
        widen(words, stride, tiles[tile], edges[tile % 2], block.dim, block.memory, c, end, block.bytes);
        return words;
    }
};
} // namespace KVP_NS
