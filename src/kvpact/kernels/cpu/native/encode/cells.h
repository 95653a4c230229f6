// The search of a codebook of 4 bits in AVX-512: two tables instead of a tree of four comparisons.
#pragma once
#include "simd/lanes.h"

#if defined(KVP_AVX512)
namespace KVP_NS {

// The number of 15 boundaries below x. Numbers are cut into 32 cells of one width, so that none has two
// boundaries; which one a number is in rises with it, so those of the cells before it are all below it.
struct Cells {
    static constexpr int N = 32;
    alignas(64) float boundary[N]; // of a cell; infinite: it has none
    alignas(64) int32_t below[N];  // boundaries of the cells before
    float steps[16];               // what they were made of
    float scale, offset;
    bool found; // boundaries that no two of which share a cell

    void fill(const float *tree) {
        if (memcmp(steps, tree, sizeof steps) == 0) return;
        memcpy(steps, tree, sizeof steps);
        float ascending[15];
        for (int depth = 0; depth < 4; depth++)
            for (int i = 0; i < 1 << depth; i++) ascending[(2 * i + 1) * (8 >> depth) - 1] = tree[(1 << depth) + i];
        scale = (float)(N - 3) / (ascending[14] - ascending[0]);
        offset = FIRST + N / 2 - (ascending[14] + ascending[0]) / 2 * scale;
        int cell = 0, last = -1;
        found = true;
        for (int i = 0; i < 15; i++, last = cell) {
            cell = (int)(clamped_place(set1(ascending[i]))[0] - FIRST);
            found = found && cell > last;
            for (int k = last + 1; k <= cell; k++) {
                below[k] = i;
                boundary[k] = k == cell ? ascending[i] : __builtin_inff();
            }
        }
        for (int k = last + 1; k < N; k++) {
            below[k] = 15;
            boundary[k] = __builtin_inff();
        }
    }

  private:
    friend struct CellSearch;
    static constexpr float FIRST = 12582912.0f; // and more: whole numbers are their last bits
    vf clamped_place(vf x) const {
        return _mm512_min_ps(_mm512_max_ps(fma(x, set1(scale), set1(offset)), set1(FIRST)), set1(FIRST + N - 1));
    }
};
struct CellSearch {
    const Cells &cells;
    vf boundary[2];
    vi below[2];
    INLINE explicit CellSearch(const Cells &of) : cells(of) {
        for (int i = 0; i < 2; i++) {
            boundary[i] = load(of.boundary + i * W);
            below[i] = load_words((const uint32_t *)of.below + i * W);
        }
    }
    INLINE Ints operator()(vf x) const {
        const vi cell = (vi)cells.clamped_place(x);
        const vi code = _mm512_permutex2var_epi32(below[0], cell, below[1]);
        const __mmask16 above = _mm512_cmp_ps_mask(x, _mm512_permutex2var_ps(boundary[0], cell, boundary[1]), _CMP_GT_OQ);
        return (Ints)_mm512_mask_add_epi32(code, above, code, _mm512_set1_epi32(1));
    }
};
} // namespace KVP_NS
#endif
