// 4 lanes by the compiler's own vectors: SSE2 on x86-64, NEON on AArch64, anything elsewhere.
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#include <math.h>
#include <string.h>

constexpr int W = 4;
constexpr int REGISTERS = 16;
typedef float vf __attribute__((vector_size(16)));
typedef uint32_t vi __attribute__((vector_size(16)));

INLINE vf zero() { return vf{0, 0, 0, 0}; }
INLINE vf set1(float x) { return vf{x, x, x, x}; }
INLINE vf load(const float *p) { vf x; memcpy(&x, p, 16); return x; }
INLINE void store(float *p, vf x) { memcpy(p, &x, 16); }
INLINE vf load_first(const float *p, int n) { vf x = zero(); memcpy(&x, p, 4 * n); return x; }
INLINE void store_first(float *p, vf x, int n) { memcpy(p, &x, 4 * n); }
INLINE vf add(vf a, vf b) { return a + b; }
INLINE vf sub(vf a, vf b) { return a - b; }
INLINE vf mul(vf a, vf b) { return a * b; }
#if defined(__aarch64__)
INLINE vf fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
#endif
INLINE vf max(vf a, vf b) { return a > b ? a : b; }
INLINE float sum(vf x) { return (x[0] + x[2]) + (x[1] + x[3]); }
INLINE float highest(vf x) {
    float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
}

INLINE void sum4(float *out, vf a, vf b, vf c, vf d) {
    out[0] = sum(a);
    out[1] = sum(b);
    out[2] = sum(c);
    out[3] = sum(d);
}
template <int STEP> INLINE vf swap_lanes(vf x) {
    return vf{x[0 ^ STEP], x[1 ^ STEP], x[2 ^ STEP], x[3 ^ STEP]};
}

INLINE vi load_words(const uint32_t *p) { vi x; memcpy(&x, p, 16); return x; }
INLINE vi load_words_first(const uint32_t *p, int n) { vi x = {0, 0, 0, 0}; memcpy(&x, p, 4 * n); return x; }
template <int N> INLINE vi shr(vi x) { return x >> N; }
template <int N> INLINE vi shl(vi x) { return x << N; }
INLINE vi shr_by(vi x, int n) { return x >> n; }
INLINE vi and_(vi a, uint32_t mask) { return a & mask; }
template <uint32_t MASK> INLINE vi select(vi a, vi b) { return (a & MASK) | (b & ~MASK); }
template <uint32_t MASK> INLINE vi xor_masked(vi a, vi b, vi c) { return a ^ and_(b ^ c, MASK); }
template <uint32_t BITS> INLINE vi and_or(vi a, uint32_t mask) { return (a & mask) | BITS; }
INLINE vf as_float(vi x) { return (vf)x; }

INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff, bits;
    float x;
    if (magnitude >= 0x7c00) bits = (magnitude << 13) + 0x70000000;  // infinity and NaN
    else if (magnitude >= 0x400) bits = (magnitude << 13) + 0x38000000;
    else {
        x = (float)magnitude * 5.9604644775390625e-8f;
        memcpy(&bits, &x, 4);
    }
    bits |= sign;
    memcpy(&x, &bits, 4);
    return x;
}
INLINE vf load_half(const uint16_t *p) {
    return vf{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
INLINE vf load_bf16(const uint16_t *p) {
    vi x = {(uint32_t)p[0] << 16, (uint32_t)p[1] << 16, (uint32_t)p[2] << 16, (uint32_t)p[3] << 16};
    return (vf)x;
}
INLINE vf load_e5m2(const uint8_t *p) {
    uint16_t h[4];
    for (int i = 0; i < 4; i++) h[i] = (uint16_t)(p[i] << 8);
    return load_half(h);
}
INLINE vf load_e4m3(const uint8_t *p) {
    uint16_t h[4];
    for (int i = 0; i < 4; i++) h[i] = (uint16_t)(((p[i] & 0x80) << 8) | ((p[i] & 0x7f) << 7));
    return load_half(h);
}
INLINE vf exp2_(vf x) {
    vf y;
    for (int i = 0; i < 4; i++) y[i] = x[i] < -126.0f ? 0.0f : exp2f(x[i]);
    return y;
}

template <int BITS> struct Lookup {
    const float *levels;
    INLINE explicit Lookup(const float *table) : levels(table) {}
    INLINE vf operator()(vi code) const {
        vi index = and_(code, (1u << BITS) - 1);
        return vf{levels[index[0]], levels[index[1]], levels[index[2]], levels[index[3]]};
    }
};

// Bytes of a table by the low BITS bits of each byte.
template <int BITS> struct ByteLookup {
    const uint8_t *bytes;
    INLINE explicit ByteLookup(const uint8_t *table) : bytes(table) {}
    INLINE vi operator()(vi index) const {
        uint8_t x[4 * W];
        memcpy(x, &index, sizeof x);
        for (uint8_t &i : x) i = bytes[i & ((1 << BITS) - 1)];
        memcpy(&index, x, sizeof x);
        return index;
    }
};
