// How codes of 1 to 8 bits are laid out in words (formats/bitpack.py): planes of 8, 4, 2 and 1 bits.
#pragma once
#include "simd/level.h"
#include "sizes.h"

namespace KVP_NS {

struct Plane {
    int width, shift;
};
INLINE int planes_of(int bits, Plane *planes) {
    if (bits == 8) {
        planes[0] = {8, 0};
        return 1;
    }
    int count = 0, shift = 0;
    for (int width = 4; width; width /= 2)
        if (bits & width) {
            planes[count++] = {width, shift};
            shift += width;
        }
    return count;
}
INLINE int words_per_token(int bits, int dim) {
    Plane planes[3];
    int words = 0;
    for (int p = 0, n = planes_of(bits, planes); p < n; p++) words += (dim * planes[p].width + 31) / 32;
    return words;
}
// Bytes of a tile's codes: of K, where a word holds channels of one token, the last word of a plane may
// be partly empty; of V, and of raw numbers, words are full.
INLINE int64_t tile_bytes(int bits, int dim, bool by_token) {
    return 4 * (by_token ? (int64_t)words_per_token(bits, dim) * TILE : (int64_t)bits * dim);
}
} // namespace KVP_NS
