// Codes of packed words, and the levels they stand for.
#pragma once
#include "simd/level.h"

namespace KVP_NS {

// Widths of the planes of a code, the low bits first (formats/bitpack.py).
template <int BITS> struct Planes;
#define KVP_PLANES(bits, n, a, b, c)                                \
    template <> struct Planes<bits> {                               \
        static constexpr int count = n;                             \
        static constexpr int width[3] = {a, b, c};                  \
        static constexpr int below[3] = {0, a, a + b};              \
    };
KVP_PLANES(1, 1, 1, 0, 0)
KVP_PLANES(2, 1, 2, 0, 0)
KVP_PLANES(3, 2, 2, 1, 0)
KVP_PLANES(4, 1, 4, 0, 0)
KVP_PLANES(5, 2, 4, 1, 0)
KVP_PLANES(6, 2, 4, 2, 0)
KVP_PLANES(7, 3, 4, 2, 1)
KVP_PLANES(8, 1, 8, 0, 0)

// The codes of the items of one word of the lowest plane, one after the other, for V vectors.
// word(vector, plane, index) gives packed words; index counts within 32 items.
template <int BITS, int V> struct Codes {
    using P = Planes<BITS>;
    static constexpr int items = 32 / P::width[0];
    vi plane[3][V];

    template <class F> INLINE Codes(int i, F &&word) {
        for (int k = 0; k < V; k++) plane[0][k] = word(k, 0, i);
        load_plane<1>(i, word);
        load_plane<2>(i, word);
    }
    // The higher planes are held at the place where their bits belong in the code.
    template <int N, class F> INLINE void load_plane(int i, F &&word) {
        if constexpr (N < P::count) {
            const int bit = i * items * P::width[N]; // of the first item in this plane
            for (int k = 0; k < V; k++) plane[N][k] = shl<P::below[N]>(shr_by(word(k, N, bit / 32), bit % 32));
        }
    }
    // Bits above the code are of other items.
    INLINE vi code(int k) const {
        vi x = plane[0][k];
        if constexpr (P::count > 1) x = select<(1u << P::below[1]) - 1>(x, plane[1][k]);
        if constexpr (P::count > 2) x = select<(1u << P::below[2]) - 1>(x, plane[2][k]);
        return x;
    }
    INLINE void next() {
        for (int k = 0; k < V; k++) {
            plane[0][k] = shr<P::width[0]>(plane[0][k]);
            if constexpr (P::count > 1) plane[1][k] = shr<P::width[1]>(plane[1][k]);
            if constexpr (P::count > 2) plane[2][k] = shr<P::width[2]>(plane[2][k]);
        }
    }
};

// Codes that are numbers: level = code + table[0]. The bits of a small whole number, put into those
// of 2**23 as fp32, make 2**23 more than the number.
template <int BITS> struct Linear {
    vf offset;
    INLINE explicit Linear(const float *table) : offset(set1(table[0] - 8388608.0f)) {}
    INLINE vf operator()(vi code) const {
        return add(as_float(and_or<0x4b000000u>(code, (1u << BITS) - 1)), offset);
    }
};
} // namespace KVP_NS
