// Sizes that all kernels share, and small sums with them.
#pragma once
#include "abi.h"

constexpr int TILE = KVP_TILE;           // tokens whose codes lie together
constexpr int MOST_DIM = KVP_MOST_DIM;   // channels of the widest vectors
constexpr int MOST_GROUP = KVP_MOST_GROUP; // tokens of the largest group that is encoded together

// Tokens begin <= i < end of the head `pair`, which counts batch rows times heads.
struct Span {
    int64_t pair, begin, end;
};

// Groups of channels that have a scale of their own.
static constexpr int channel_groups(int dim, int channels) { return (dim + channels - 1) / channels; }
// The next multiple of `unit`.
static constexpr int64_t whole(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
// Tokens of one task where each token is worked on by itself.
constexpr int64_t PART = 128;
