// Trellis-coded quantisation (quantizers/trellis.py) of W vectors side by side, in the torch body's order.
#pragma once
#include "encode/places.h"
#include "encode/quantize.h"

namespace KVP_NS {

// Of one number and W vectors: which states are reached from the upper half of the states. One bit a lane
// and state; where there are no masks of lanes, one word a lane, the first state in its highest bit.
struct Choices {
#if defined(KVP_AVX512)
    uint16_t high[16];
#elif defined(KVP_AVX2)
    uint8_t high[16];
#else
    vi high;
#endif
};
// Volatile: compilers would gather a number's masks in a vector first, which takes longer than the sums.
INLINE void choose(Choices &to, [[maybe_unused]] int state, vf high, vf low) {
#if defined(KVP_AVX512)
    *(volatile uint16_t *)(to.high + state) = _mm512_cmp_ps_mask(high, low, _CMP_LT_OQ);
#elif defined(KVP_AVX2)
    *(volatile uint8_t *)(to.high + state) = (uint8_t)_mm256_movemask_ps(_mm256_cmp_ps(high, low, _CMP_LT_OQ));
#else
    to.high = to.high + to.high - (vi)(high < low);
#endif
}
// 1 for lanes whose state was reached from the upper half, else 0.
template <int S> INLINE Ints chosen(const Choices &from, Ints state) {
#if defined(KVP_AVX512)
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i lanes = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from.high));
    return (Ints)_mm512_srlv_epi32(_mm512_permutexvar_epi32((__m512i)state, lanes), lane) & 1;
#elif defined(KVP_AVX2)
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), none = _mm256_set1_epi32((int)0x80808000);
    const __m256i lanes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)from.high));
    const __m256i found = _mm256_shuffle_epi8(lanes, _mm256_or_si256((__m256i)state, none));
    return (Ints)_mm256_srlv_epi32(found, lane) & 1;
#else
    return (Ints)(from.high >> (vi)(S - 1 - state)) & 1;
#endif
}

struct TrellisScratch {
    Places places;
    alignas(64) float y[MOST_DIM * W];            // [channel][W], rotated
    alignas(64) float z[MOST_DIM * W];            // [channel][W]; then the cells
    alignas(64) float distance[4 * MOST_DIM * W]; // [channel][subset][W]
    alignas(64) Choices choices[MOST_DIM];
    uint8_t scale[W];
};

// The steps of the Viterbi algorithm for one number. Window, state and subsets: see `subset` there.
template <int S, bool KEEP> INLINE void advance(vf (&cost)[S], const float *distance, Choices *choices) {
    vf d[4], next[S];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) d[i] = load(distance + i * W);
#pragma GCC unroll 8
    for (int j = 0; j < S / 2; j++) {
        const int c1 = j & 1, c0 = j >> 1 & 1;
        const vf even = d[2 * c1 + c0], odd = d[2 * (c1 ^ 1) + c0], a = cost[j], b = cost[j + S / 2];
#pragma GCC unroll 2
        for (int bit = 0; bit < 2; bit++) {
            const vf low = a + (bit ? odd : even), high = b + (bit ? even : odd);
            next[2 * j + bit] = least(high, low);
            if constexpr (KEEP) choose(*choices, 2 * j + bit, high, low);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < S; i++) cost[i] = next[i];
}
template <int S, bool KEEP> INLINE void run(vf (&cost)[S], TrellisScratch &s, int begin, int end) {
    for (int i = begin; i < end; i++) advance<S, KEEP>(cost, s.distance + 4 * i * W, s.choices + i);
}
template <int S> INLINE void begin_with(vf (&cost)[S], Ints state) {
#pragma GCC unroll 16
    for (int i = 0; i < S; i++) cost[i] = pick_lanes(state == i, zero(), set1(1e30f));
}
template <int S> INLINE Ints cheapest(const vf (&cost)[S]) {
    vf best = cost[0];
    Ints state{};
#pragma GCC unroll 16
    for (int i = 1; i < S; i++) {
        const Ints less = (Ints)(cost[i] < best);
        best = pick_lanes(less, cost[i], best);
        state = less ? Ints{} + i : state;
    }
    return state;
}
constexpr int SHORT = 32; // vectors with fewer numbers: every state is tried as the first one
template <int S> constexpr int MEMORY = S == 16 ? 4 : 3;
template <int S> INLINE Ints before(Ints state, Ints oldest) { return state >> 1 | oldest << (MEMORY<S> - 1); }

template <int S> Ints likely_end(TrellisScratch &s, int size) {
    const int half = size / 2;
    vf cost[S];
#pragma GCC unroll 16
    for (int i = 0; i < S; i++) cost[i] = zero();
    run<S, false>(cost, s, half, size);
    run<S, true>(cost, s, 0, half);
    Ints state = cheapest<S>(cost);
    for (int i = half - 1; i >= 0; i--) state = before<S>(state, chosen<S>(s.choices[i], state));
    return state;
}
template <int S> Ints best_end(TrellisScratch &s, int size) {
    vf ends[S];
    for (int state = 0; state < S; state++) {
        vf cost[S];
        begin_with<S>(cost, Ints{} + state);
        run<S, false>(cost, s, 0, size);
        ends[state] = cost[state];
    }
    return cheapest<S>(ends);
}

// The cell of each number between whole and half steps: its end, in half steps, and KVP_CELLS / 2.
INLINE Ints cell_of(vf z) {
    const vf most = set1(KVP_CELLS / 2);
    vf twice = z + z;
    twice = pick_lanes((Ints)(twice < most), twice, most);
    twice = pick_lanes((Ints)(twice > -most), twice, -most);
    return ceiling(twice) + KVP_CELLS / 2;
}

// z: numbers in steps of the levels. codes: [channel][32], 0 for lanes that are empty.
template <int S> void trellis_codes(const kvp_block &b, TrellisScratch &s, Ints empty, uint8_t *codes) {
    const int size = b.dim;
    for (int i = 0; i < size; i++) {
        const vf z = load(s.z + i * W);
        const Ints cell = cell_of(z), levels = gather(b.cells, cell);
        memcpy(s.z + i * W, &cell, sizeof cell);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            const vf rest = z - floats(levels << (24 - 8 * k) >> 24);
            store(s.distance + (4 * i + k) * W, rest * rest);
        }
    }
    Ints state = size < SHORT ? best_end<S>(s, size) : likely_end<S>(s, size);
    vf cost[S];
    begin_with<S>(cost, state);
    run<S, true>(cost, s, 0, size);
    for (int i = size - 1; i >= 0; i--) {
        Ints cell;
        memcpy(&cell, s.z + i * W, sizeof cell);
        const Ints oldest = chosen<S>(s.choices[i], state);
        const Ints c1 = ((state ^ state >> 1) & 1) ^ oldest, c0 = state >> 2 & 1;
        const Ints point = gather(b.cells + KVP_CELLS, cell) >> (c1 << 4 | c0 << 3) & 0xff;
        const Ints code = point << 1 | (state & 1);
        store_codes(codes + i * TILE, empty ? Ints{} : code);
        state = before<S>(state, oldest);
    }
}

// y is rotated, [channel][W]; scales as bytes into s.scale.
inline void trellis_vectors(const kvp_encode_args &a, const float *y, uint8_t *codes, Side &side, TrellisScratch &s) {
    const kvp_trellis &t = *a.trellis;
    leaves<1>(side.sums, a.dim, [&](int c, vf *out) {
        const vf x = load(y + c * W);
        out[0] = x * x;
    });
    const vf size = square_root(tree(side.sums[0], after_leaves(a.dim)) / set1((float)a.dim));
    // e5m3 (quantizers/numbers.py): 16 is the least exponent.
    constexpr int32_t least_byte = (127 - 16) * 8;
    const Ints bits = (Ints)size;
    const Ints byte = clamped(((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - least_byte, 255), empty = byte == 0;
    store_codes(s.scale, byte);
    const vf safe = empty ? set1(1) : (vf)((byte + least_byte) << 20);
    for (int b = 0; b < t.blocks; b++) {
        const kvp_block &block = t.block[b];
        if (block.bits) {
            const vf factor = set1(1) / (safe * set1(block.unit));
            for (int i = 0; i < block.dim; i++) store(s.z + i * W, load(y + i * W) * factor);
            if (block.memory == 4) trellis_codes<16>(block, s, empty, codes);
            else trellis_codes<8>(block, s, empty, codes);
        }
        y += block.dim * W;
        codes += block.dim * TILE;
    }
}
} // namespace KVP_NS
