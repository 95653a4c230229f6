// 8 lanes: AVX2, FMA, F16C.
#include <immintrin.h>

constexpr int W = 8;
constexpr int REGISTERS = 16;
typedef __m256 vf;
typedef __m256i vi;

INLINE vf zero() { return _mm256_setzero_ps(); }
INLINE vf set1(float x) { return _mm256_set1_ps(x); }
INLINE vf load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void store(float *p, vf x) { _mm256_storeu_ps(p, x); }
INLINE __m256i first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE vf load_first(const float *p, int n) { return _mm256_maskload_ps(p, first(n)); }
INLINE void store_first(float *p, vf x, int n) { _mm256_maskstore_ps(p, first(n), x); }
INLINE vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE float sum(vf x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_shuffle_ps(y, y, 1)));
}
INLINE float highest(vf x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_shuffle_ps(y, y, 1)));
}

INLINE void sum4(float *out, vf a, vf b, vf c, vf d) {
    vf x = add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    vf y = add(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    vf z = add(_mm256_shuffle_ps(x, y, 0x44), _mm256_shuffle_ps(x, y, 0xee));
    _mm_store_ps(out, _mm_add_ps(_mm256_castps256_ps128(z), _mm256_extractf128_ps(z, 1)));
}
template <int STEP> INLINE vf swap_lanes(vf x) {
    if constexpr (STEP == 1) return _mm256_permute_ps(x, 0xb1);
    else if constexpr (STEP == 2) return _mm256_permute_ps(x, 0x4e);
    else return _mm256_permute2f128_ps(x, x, 1);
}

INLINE vi load_words(const uint32_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE vi load_words_first(const uint32_t *p, int n) {
    return _mm256_maskload_epi32((const int *)p, first(n));
}
template <int N> INLINE vi shr(vi x) {
    if constexpr (N == 0) return x;
    else return _mm256_srli_epi32(x, N);
}
template <int N> INLINE vi shl(vi x) {
    if constexpr (N == 0) return x;
    else return _mm256_slli_epi32(x, N);
}
INLINE vi shr_by(vi x, int n) { return _mm256_srl_epi32(x, _mm_cvtsi32_si128(n)); }
INLINE vi and_(vi a, uint32_t mask) { return _mm256_and_si256(a, _mm256_set1_epi32((int)mask)); }
template <uint32_t MASK> INLINE vi select(vi a, vi b) {
    return _mm256_or_si256(and_(a, MASK), _mm256_andnot_si256(_mm256_set1_epi32((int)MASK), b));
}
template <uint32_t MASK> INLINE vi xor_masked(vi a, vi b, vi c) { return a ^ and_(b ^ c, MASK); }
template <uint32_t BITS> INLINE vi and_or(vi a, uint32_t mask) {
    return _mm256_or_si256(and_(a, mask), _mm256_set1_epi32((int)BITS));
}
INLINE vf as_float(vi x) { return _mm256_castsi256_ps(x); }

INLINE vf load_half(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
INLINE vf load_bf16(const uint16_t *p) {
    __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}
INLINE vf load_e5m2(const uint8_t *p) {
    __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p));
    return _mm256_cvtph_ps(_mm_slli_epi16(x, 8));
}
INLINE vf load_e4m3(const uint8_t *p) {
    __m128i x = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p));
    __m128i magnitude = _mm_and_si128(_mm_slli_epi16(x, 7), _mm_set1_epi16(0x3f80));
    __m128i sign = _mm_and_si128(x, _mm_set1_epi16((short)0x8000));
    return _mm256_cvtph_ps(_mm_or_si128(magnitude, sign));
}

INLINE vf exp2_(vf x) {
    x = max(x, set1(-126.0f));
    vf whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vf f = sub(x, whole);
    vf y = set1(1.535336188e-4f);
    y = fma(y, f, set1(1.339887440e-3f));
    y = fma(y, f, set1(9.618437357e-3f));
    y = fma(y, f, set1(5.550332548e-2f));
    y = fma(y, f, set1(2.402264791e-1f));
    y = fma(y, f, set1(6.931472028e-1f));
    y = fma(y, f, set1(1.0f));
    __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
    vf result = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), power));
    // What is far below the least normal number counts as nothing (-inf too).
    return _mm256_and_ps(result, _mm256_cmp_ps(x, set1(-125.5f), _CMP_GT_OQ));
}

template <int BITS> struct Lookup {
    const float *levels;
    vf low, high;
    INLINE explicit Lookup(const float *table) : levels(table) {
        alignas(32) float all[16];
        for (int i = 0; i < 16; i++) all[i] = table[i & ((1 << BITS) - 1)];
        low = load(all);
        high = load(all + 8);
    }
    INLINE vf operator()(vi code) const {
        if constexpr (BITS <= 3) {
            return _mm256_permutevar8x32_ps(low, code);
        } else if constexpr (BITS == 4) {
            vf a = _mm256_permutevar8x32_ps(low, code), b = _mm256_permutevar8x32_ps(high, code);
            return _mm256_blendv_ps(a, b, _mm256_castsi256_ps(shl<28>(code)));
        } else {
            return _mm256_i32gather_ps(levels, and_(code, (1u << BITS) - 1), 4);
        }
    }
};

// Bytes of a table by the low BITS bits of each byte.
template <int BITS> struct ByteLookup {
    static constexpr int N = 1 << (BITS - 4);
    vi part[N];
    INLINE explicit ByteLookup(const uint8_t *table) {
        for (int i = 0; i < N; i++) part[i] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table + i));
    }
    INLINE vi operator()(vi index) const { return pick<BITS>(index, and_(index, 0x0f0f0f0f), 0); }
    template <int LEFT> INLINE vi pick(vi index, vi low, int begin) const {
        if constexpr (LEFT == 4) {
            return _mm256_shuffle_epi8(part[begin], low);
        } else {
            const vi x = pick<LEFT - 1>(index, low, begin), y = pick<LEFT - 1>(index, low, begin + (1 << (LEFT - 5)));
            return _mm256_blendv_epi8(x, y, shl<8 - LEFT>(index));
        }
    }
};
