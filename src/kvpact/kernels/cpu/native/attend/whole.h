// Products in whole numbers. Levels are bytes, LEVEL_ZERO too large; the other factor, a query or the weights of V,
// is made whole numbers of 16 bits, of the greatest of a row. Sums of whole numbers are exact, so what is lost is
// the rounding to 16 bits.
//
// Factors take 8 bytes for four levels, those of one dword: with AVX-512 VNNI two digits of 8 bits each, four high
// ones and four low ones, with a sum of their own; with AVX2 two pairs of 16 bits, for the even and the odd bytes.
#pragma once
#include "trellis.h"

#if defined(KVP_AVX512) || defined(KVP_AVX2)
#define KVP_WHOLE
namespace KVP_NS {

constexpr int FACTORS = 8; // bytes

// The item that byte j of a word meets when it was shifted by n * ORDER bits.
template <int ORDER> constexpr int item_of(int j, int n) { return j * (8 / ORDER) + n; }
INLINE int32_t four_bytes(const char *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return x;
}

#if defined(KVP_AVX512)
// Greatest numbers: two digits from -128 to 127.
constexpr float most_whole(int64_t) { return 32639; }

typedef vi Operand; // of levels
INLINE Operand bytes_of(vi x) { return x; }
INLINE vi shuffle_bytes(vi x, const uint8_t *places) { // within 16 bytes
    return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)places)));
}

struct WholeSum {
    vi high, low;
    // What a sum begins at: LEVEL_ZERO times the sum of the factors is taken off.
    INLINE void start(int32_t sum) {
        high = _mm512_set1_epi32(-(sum >> 1));
        low = _mm512_set1_epi32(-(sum & 1) * LEVEL_ZERO);
    }
    // In assembly, or GCC moves the sums to and fro.
    static INLINE void add(vi &acc, vi bytes, vi factors) {
        asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(bytes), "v"(factors));
    }
    INLINE vf value() const { return fma(to_float(high), set1(256.0f), to_float(low)); }
};
// Adds products with one row's factors to the sums of N vectors of levels.
template <int N> INLINE void add_products(WholeSum *sums, int64_t step, const Operand *x, const char *factors) {
    const vi high = _mm512_set1_epi32(four_bytes(factors)), low = _mm512_set1_epi32(four_bytes(factors + 4));
    for (int k = 0; k < N; k++) {
        WholeSum::add(sums[k * step].high, x[k], high);
        WholeSum::add(sums[k * step].low, x[k], low);
    }
}

// Which bytes of 32 whole numbers stand at each place, those of the second 16 from 64 on; which of 16 items do.
template <int ORDER> struct FactorPlaces {
    alignas(64) uint8_t at[64], item[16];
    constexpr FactorPlaces() : at(), item() {
        constexpr int N = 8 / ORDER;
        for (int p = 0; p < 64; p++) {
            const int word = p / (8 * N), number = word * 4 * N + item_of<ORDER>(p % 4, p / 8 % N);
            at[p] = (uint8_t)(number * 4 + (p % 8 < 4));
        }
        for (int p = 0; p < 16; p++) item[p] = (uint8_t)(p / (4 * N) * 4 * N + item_of<ORDER>(p % 4, p / 4 % N));
    }
};
template <int ORDER> inline constexpr FactorPlaces<ORDER> FACTOR_PLACES{};

// Writes 32 numbers; returns their sum, by lane.
template <int ORDER> INLINE vi put_factors(char *to, const vf *numbers) {
    const vi half = _mm512_set1_epi32(0x8080);
    const vi a = _mm512_cvtps_epi32(numbers[0]), b = _mm512_cvtps_epi32(numbers[1]);
    const vi x = _mm512_xor_si512(_mm512_add_epi32(a, half), half), y = _mm512_xor_si512(_mm512_add_epi32(b, half), half);
#if defined(__AVX512VBMI__)
    const vi bytes = _mm512_permutex2var_epi8(x, _mm512_load_si512(FACTOR_PLACES<ORDER>.at), y);
#else
    // The high digits of each four numbers, then the low ones; then 16 of a kind side by side, in order.
    const vi pick = _mm512_broadcast_i32x4(_mm_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, 1, 5, 9, 13, 0, 4, 8, 12));
    const vi both = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(x, pick), 0xff00ff00ff00ff00, y, pick);
    const vi apart = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), both);
    const vi ordered = _mm512_shuffle_epi8(apart, _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)FACTOR_PLACES<ORDER>.item)));
    const vi bytes = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15), ordered);
#endif
    _mm512_storeu_si512(to, bytes);
    return _mm512_add_epi32(a, b);
}
INLINE vi no_sum() { return _mm512_setzero_si512(); }
INLINE vi add_sums(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE int32_t total(vi x) { return _mm512_reduce_add_epi32(x); }

#else
// Sums of as many products with levels stay below 2**31.
constexpr float most_whole(int64_t products) { return products < 512 ? 32767 : (float)((1 << 24) / products - 1); }

struct Operand {
    vi even, odd;
};
INLINE Operand bytes_of(vi x) { return {and_(x, 0x00ff00ff), _mm256_srli_epi16(x, 8)}; }
INLINE vi shuffle_bytes(vi x, const uint8_t *places) {
    return _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)places)));
}

struct WholeSum {
    vi sum;
    INLINE void start(int32_t total) { sum = _mm256_set1_epi32(-LEVEL_ZERO * total); }
    // In assembly, or GCC moves the sums to and fro.
    static INLINE void add(vi &acc, vi levels, vi factors) {
        vi products;
        asm("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(acc), "=&x"(products) : "x"(levels), "x"(factors));
    }
    INLINE vf value() const { return _mm256_cvtepi32_ps(sum); }
};
template <int N> INLINE void add_products(WholeSum *sums, int64_t step, const Operand *x, const char *factors) {
    const vi even = _mm256_set1_epi32(four_bytes(factors)), odd = _mm256_set1_epi32(four_bytes(factors + 4));
    for (int k = 0; k < N; k++) {
        WholeSum::add(sums[k * step].sum, x[k].even, even);
        WholeSum::add(sums[k * step].sum, x[k].odd, odd);
    }
}

template <int ORDER> INLINE vi put_factors(char *to, const vf *numbers) {
    vi sum = _mm256_setzero_si256();
    for (int i = 0; i < 2; i++) { // 16 numbers
        const vi a = _mm256_cvtps_epi32(numbers[2 * i]), b = _mm256_cvtps_epi32(numbers[2 * i + 1]);
        sum = _mm256_add_epi32(sum, _mm256_add_epi32(a, b));
        vi x = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
        if constexpr (ORDER == 2) { // items n and 8 + n, 4 + n and 12 + n
            const __m128i low = _mm256_castsi256_si128(x), high = _mm256_extracti128_si256(x, 1);
            const __m128i first = _mm_unpacklo_epi16(low, high), second = _mm_unpackhi_epi16(low, high);
            x = _mm256_set_m128i(_mm_unpackhi_epi32(first, second), _mm_unpacklo_epi32(first, second));
        } else if constexpr (ORDER == 4) {
            x = _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, 2, 3, 10, 11, 6, 7, 14, 15)));
        } else {
            x = _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15)));
        }
        _mm256_storeu_si256((__m256i *)(to + 32 * i), x);
    }
    return sum;
}
INLINE vi no_sum() { return _mm256_setzero_si256(); }
INLINE vi add_sums(vi a, vi b) { return _mm256_add_epi32(a, b); }
INLINE int32_t total(vi x) {
    const __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    const __m128i z = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(z, _mm_shuffle_epi32(z, 0xb1)));
}
#endif
} // namespace KVP_NS
#endif
