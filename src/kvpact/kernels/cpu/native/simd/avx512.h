// 16 lanes: AVX-512 F, BW, VL, DQ, VNNI.
#include <immintrin.h>

constexpr int W = 16;
constexpr int REGISTERS = 32;
typedef __m512 vf;
typedef __m512i vi;

INLINE vf zero() { return _mm512_setzero_ps(); }
INLINE vf set1(float x) { return _mm512_set1_ps(x); }
INLINE vf load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void store(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE __mmask16 first(int n) { return (__mmask16)((1u << n) - 1); }
INLINE vf load_first(const float *p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
INLINE void store_first(float *p, vf x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
INLINE vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE float sum(vf x) { return _mm512_reduce_add_ps(x); }
INLINE float highest(vf x) { return _mm512_reduce_max_ps(x); }

INLINE void sum4(float *out, vf a, vf b, vf c, vf d) {
    vf x = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    vf y = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    vf z = add(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xee));
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(z), _mm512_extractf32x8_ps(z, 1));
    _mm_store_ps(out, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
}
// Lane i of the result is lane i ^ STEP of x.
template <int STEP> INLINE vf swap_lanes(vf x) {
    if constexpr (STEP == 1) return _mm512_permute_ps(x, 0xb1);
    else if constexpr (STEP == 2) return _mm512_permute_ps(x, 0x4e);
    else if constexpr (STEP == 4) return _mm512_shuffle_f32x4(x, x, 0xb1);
    else return _mm512_shuffle_f32x4(x, x, 0x4e);
}

INLINE vi load_words(const uint32_t *p) { return _mm512_loadu_si512(p); }
INLINE vi load_words_first(const uint32_t *p, int n) { return _mm512_maskz_loadu_epi32(first(n), p); }
template <int N> INLINE vi shr(vi x) {
    if constexpr (N == 0) return x;
    else return _mm512_srli_epi32(x, N);
}
template <int N> INLINE vi shl(vi x) {
    if constexpr (N == 0) return x;
    else return _mm512_slli_epi32(x, N);
}
INLINE vi shr_by(vi x, int n) { return _mm512_srl_epi32(x, _mm_cvtsi32_si128(n)); }
INLINE vi and_(vi a, uint32_t mask) { return _mm512_and_si512(a, _mm512_set1_epi32((int)mask)); }
// The bits of `mask` from a, the others from b.
template <uint32_t MASK> INLINE vi select(vi a, vi b) {
    return _mm512_ternarylogic_epi32(_mm512_set1_epi32((int)MASK), a, b, 0xca);
}
// a ^ ((b ^ c) & MASK)
template <uint32_t MASK> INLINE vi xor_masked(vi a, vi b, vi c) {
    return _mm512_ternarylogic_epi32(a, _mm512_xor_si512(b, c), _mm512_set1_epi32((int)MASK), 0x78);
}
template <uint32_t BITS> INLINE vi and_or(vi a, uint32_t mask) {
    return _mm512_ternarylogic_epi32(a, _mm512_set1_epi32((int)mask), _mm512_set1_epi32((int)BITS), 0xea);
}
INLINE vf as_float(vi x) { return _mm512_castsi512_ps(x); }
INLINE vf to_float(vi x) { return _mm512_cvtepi32_ps(x); }

INLINE vf load_half(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE vf load_bf16(const uint16_t *p) {
    __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
}
INLINE vf load_e5m2(const uint8_t *p) {
    __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    return _mm512_cvtph_ps(_mm256_slli_epi16(x, 8));
}
// 2**-8 of the number: fp16 has another bias.
INLINE vf load_e4m3(const uint8_t *p) {
    __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
    __m256i magnitude = _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16(0x3f80));
    __m256i sign = _mm256_and_si256(x, _mm256_set1_epi16((short)0x8000));
    return _mm512_cvtph_ps(_mm256_or_si256(magnitude, sign));
}

// Powers of two up to this one are 0. Below the least normal number scalef would take hundreds of cycles, and so
// would each product of a weight and a scale.
constexpr float LEAST_POWER = -100;
// 2**x for x <= 0; NaN where x is. Adding 1.5 * 2**23 rounds to whole numbers, which stand in the lowest bits then.
INLINE vf exp2_(vf x) {
    const __mmask16 some = _mm512_cmp_ps_mask(x, set1(LEAST_POWER), _CMP_NLE_UQ);
    const vf magic = set1(12582912.0f), moved = add(x, magic), f = sub(x, sub(moved, magic));
    vf y = set1(1.535336188e-4f);
    y = fma(y, f, set1(1.339887440e-3f));
    y = fma(y, f, set1(9.618437357e-3f));
    y = fma(y, f, set1(5.550332548e-2f));
    y = fma(y, f, set1(2.402264791e-1f));
    y = fma(y, f, set1(6.931472028e-1f));
    y = fma(y, f, set1(1.0f));
    return as_float(_mm512_maskz_add_epi32(some, (vi)y, _mm512_slli_epi32((vi)moved, 23)));
}

// Levels by code; bits of the index above the code are ignored.
template <int BITS> struct Lookup {
    static constexpr int N = BITS <= 4 ? 1 : 1 << (BITS - 4);
    vf part[N];
    INLINE explicit Lookup(const float *levels) {
        alignas(64) float all[16 * N];
        for (int i = 0; i < 16 * N; i++) all[i] = levels[i & ((1 << BITS) - 1)];
        for (int i = 0; i < N; i++) part[i] = load(all + 16 * i);
    }
    INLINE vf operator()(vi code) const {
        if constexpr (N == 1) return _mm512_permutexvar_ps(code, part[0]);
        else return pick<N>(code, 0);
    }
    template <int COUNT> INLINE vf pick(vi code, int begin) const {
        if constexpr (COUNT == 2) {
            return _mm512_permutex2var_ps(part[begin], code, part[begin + 1]);
        } else {
            vf low = pick<COUNT / 2>(code, begin), high = pick<COUNT / 2>(code, begin + COUNT / 2);
            __mmask16 m = _mm512_test_epi32_mask(code, _mm512_set1_epi32(8 * COUNT));
            return _mm512_mask_blend_ps(m, low, high);
        }
    }
};

// Bytes of a table by the low BITS bits of each byte.
#if defined(__AVX512VBMI__)
template <int BITS> struct ByteLookup {
    vi low, high;
    INLINE explicit ByteLookup(const uint8_t *table)
        : low(_mm512_loadu_si512(table)), high(_mm512_loadu_si512(table + 64)) {}
    INLINE vi operator()(vi index) const {
        if constexpr (BITS <= 6) return _mm512_permutexvar_epi8(index, low);
        else return _mm512_permutex2var_epi8(low, index, high);
    }
};
#else
template <int BITS> struct ByteLookup {
    static constexpr int N = 1 << (BITS - 4);
    vi part[N];
    INLINE explicit ByteLookup(const uint8_t *table) {
        for (int i = 0; i < N; i++) part[i] = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table + i));
    }
    INLINE vi operator()(vi index) const { return pick<N>(index, and_(index, 0x0f0f0f0f), 0); }
    template <int COUNT> INLINE vi pick(vi index, vi low, int begin) const {
        if constexpr (COUNT == 1) {
            return _mm512_shuffle_epi8(part[begin], low);
        } else {
            const __mmask64 upper = _mm512_test_epi8_mask(index, _mm512_set1_epi8(8 * COUNT));
            const vi x = pick<COUNT / 2>(index, low, begin);
            if constexpr (COUNT == 2) return _mm512_mask_shuffle_epi8(x, upper, part[begin + 1], low);
            else return _mm512_mask_blend_epi8(upper, x, pick<COUNT / 2>(index, low, begin + COUNT / 2));
        }
    }
};
#endif
