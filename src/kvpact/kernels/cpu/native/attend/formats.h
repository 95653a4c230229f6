// Which compiled loop serves which format, and the sizes of its tiles.
#pragma once
#include "attend/keys.h"
#include "attend/raw.h"
#include "attend/values.h"
#include "planes.h"
#include "trellis.h"

namespace KVP_NS {

INLINE int64_t from(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t upto(int64_t a, int64_t b) { return a < b ? a : b; }

constexpr int MOST_GROUPS = MOST_DIM / TILE; // of channels

typedef void (*KFunction)(const KTile &);
typedef void (*VFunction)(const VRun &);

// Query rows are taken 1, 2, 3, 4 or 8 at a time in the formats of wide use, else 1 or 4.
constexpr bool MANY_ROWS = W > 4 || REGISTERS == 32;
template <class Level, int BITS> constexpr bool WIDE = MANY_ROWS && (BITS == 2 || BITS == 3 || BITS == 4);
template <> inline constexpr bool WIDE<Linear<8>, 8> = MANY_ROWS;

// SCRATCH: words stand in scratch memory, see trellis.h.
template <class Level, int BITS, bool SCRATCH = false> struct Functions {
    static constexpr bool wide = WIDE<Level, BITS>;
    // Two tiles at once, where there are registers for that.
    static KFunction pair(int rows) {
        if constexpr (wide && W == 16) {
            if (rows == 4) return k_tile<Level, BITS, 4, 2, SCRATCH>;
            if (rows == 3) return k_tile<Level, BITS, 3, 2, SCRATCH>;
            if (rows == 2) return k_tile<Level, BITS, 2, 2, SCRATCH>;
            if (rows == 1) return k_tile<Level, BITS, 1, 2, SCRATCH>;
        }
        (void)rows;
        return nullptr;
    }
    static KFunction k(int rows) {
        if constexpr (wide) {
            if (rows == 2) return k_tile<Level, BITS, 2, 1, SCRATCH>;
            if (rows == 3) return k_tile<Level, BITS, 3, 1, SCRATCH>;
            if (rows == 8) return k_tile<Level, BITS, 8, 1, SCRATCH>;
        }
        return rows == 1 ? k_tile<Level, BITS, 1, 1, SCRATCH> : k_tile<Level, BITS, 4, 1, SCRATCH>;
    }
    static VFunction v(int rows) {
        if constexpr (wide) {
            if (rows == 2) return v_run<Level, BITS, 2, SCRATCH>;
            if (rows == 3) return v_run<Level, BITS, 3, SCRATCH>;
            if (rows == 8) return v_run<Level, BITS, 8, SCRATCH>;
        }
        return rows == 1 ? v_run<Level, BITS, 1, SCRATCH> : v_run<Level, BITS, 4, SCRATCH>;
    }
};

// The same for the wider words of a trellis: indices of 4 bits, or levels.
template <class F> static auto by_wide(int wide, F &&pick) {
    if (wide == 4) return pick(Functions<Lookup<4>, 4, true>());
    return pick(Functions<Linear<8>, 8, true>());
}

// But for those of trellises.
template <class F> static auto by_format(const kvp_stream &x, F &&pick) {
    switch (x.kind) {
    case KVP_E4M3: return pick(RawFunctions<E4m3>());
    case KVP_E5M2: return pick(RawFunctions<E5m2>());
    case KVP_RAW:
        if (x.number == KVP_F32) return pick(RawFunctions<Float32>());
        if (x.number == KVP_F16) return pick(RawFunctions<Float16>());
        return pick(RawFunctions<Bfloat16>());
    case KVP_LINEAR:
        switch (x.bits) {
        case 5: return pick(Functions<Linear<5>, 5>());
        case 6: return pick(Functions<Linear<6>, 6>());
        case 7: return pick(Functions<Linear<7>, 7>());
        default: return pick(Functions<Linear<8>, 8>());
        }
    }
    switch (x.bits) {
    case 1: return pick(Functions<Lookup<1>, 1>());
    case 2: return pick(Functions<Lookup<2>, 2>());
    case 3: return pick(Functions<Lookup<3>, 3>());
    case 4: return pick(Functions<Lookup<4>, 4>());
    case 5: return pick(Functions<Lookup<5>, 5>());
    case 6: return pick(Functions<Lookup<6>, 6>());
    case 7: return pick(Functions<Lookup<7>, 7>());
    default: return pick(Functions<Lookup<8>, 8>());
    }
}

// How many of `left` query rows the next pass takes, and (passed) how many it computes.
[[maybe_unused]] static int next_rows(const kvp_attend_args &a, int64_t left, int *passed) {
    const auto many = [](const kvp_stream &x) {
        return x.kind == KVP_TRELLIS_CODES ? MANY_ROWS : by_format(x, [](auto f) { return f.wide; });
    };
    const bool wide = many(a.k) && many(a.v);
    if (!wide || left == 4 || left == 1) {
        *passed = left == 1 ? 1 : 4;
        return left < 4 ? (int)left : 4;
    }
    *passed = left <= 3 ? (int)left : left == 6 ? 3 : left == 9 ? 3 : 8;
    if (left == 5) *passed = 3;
    return left < *passed ? (int)left : *passed;
}

// Bytes of the codes of a tile of K (`key`) or V.
INLINE int64_t tile_bytes(const kvp_stream &s, bool key) {
    if (s.kind == KVP_TRELLIS_CODES) return trellis_bytes(*s.trellis, key);
    return tile_bytes(s.bits, s.dim, key && s.kind < KVP_RAW);
}
INLINE int groups_of(const kvp_stream &s) { return channel_groups(s.dim, s.channels); }
// Bytes of a tile's scales, or zeros.
INLINE int64_t side_bytes(const kvp_stream &s) { return TILE * (s.kind == KVP_TRELLIS_CODES ? 1 : 2 * (int64_t)groups_of(s)); }
} // namespace KVP_NS
