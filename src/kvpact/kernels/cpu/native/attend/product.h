// Matrix products with one factor in the first-level cache: C[m][n] (+)= A[m][k] B[k][n].
#pragma once
#include "simd/level.h"

namespace KVP_NS {

// B stands in panels of PANEL columns, [n / PANEL][rows][PANEL]: what the inner loop reads, and what
// decoding wrote, lies without gaps. Vectors go along n; numbers of A are broadcast.
constexpr int VECTORS = 2;
constexpr int PANEL = VECTORS * W;

// Rows of C that are held in registers along with N vectors of a row of B.
template <int N> constexpr int STRIP = (REGISTERS >= 32 ? 24 : 12) / N;

struct Product {
    int64_t m, k;
    const float *a;
    int64_t a_row;
    const float *b; // a panel
    float *c;
    int64_t c_row;
    bool add;       // to what C holds
};

// Sums of so many products are added up: one long sum would lose more to rounding.
constexpr int64_t RUN = 128;

template <int ROWS, int N> INLINE void strip(const Product &p, int64_t first) {
    const float *a = p.a + first * p.a_row, *b = p.b;
    float *c = p.c + first * p.c_row;
    for (int64_t k = 0; k < p.k;) {
        const bool add_up = p.add || k;
        const int64_t end = k + RUN < p.k ? k + RUN : p.k;
        vf acc[ROWS][N];
#pragma GCC unroll 24
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < N; j++) acc[i][j] = zero();
        for (; k < end; k++, a++, b += PANEL) {
            vf y[N];
            for (int j = 0; j < N; j++) y[j] = load(b + j * W);
#pragma GCC unroll 24
            for (int i = 0; i < ROWS; i++) {
                const vf x = set1(a[i * p.a_row]);
                for (int j = 0; j < N; j++) acc[i][j] = fma(x, y[j], acc[i][j]);
            }
        }
#pragma GCC unroll 24
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < N; j++) {
                float *at = c + i * p.c_row + j * W;
                store(at, add_up ? add(load(at), acc[i][j]) : acc[i][j]);
            }
    }
}

template <int ROWS, int N> INLINE void last_strip(const Product &p, int64_t first) {
    if constexpr (ROWS > 0) {
        if (p.m - first == ROWS) strip<ROWS, N>(p, first);
        else last_strip<ROWS - 1, N>(p, first);
    }
}

template <int N> static void panel_product(const Product &p) {
    int64_t i = 0;
    for (; i + STRIP<N> <= p.m; i += STRIP<N>) strip<STRIP<N>, N>(p, i);
    last_strip<STRIP<N> - 1, N>(p, i);
}

// The product with `vectors` * W columns; panels of B are `panel` numbers apart.
static void product(Product p, int64_t vectors, int64_t panel) {
    for (; vectors > 0; vectors -= VECTORS, p.b += panel, p.c += PANEL) {
        if (vectors >= VECTORS) panel_product<VECTORS>(p);
        else panel_product<1>(p);
    }
}
} // namespace KVP_NS
