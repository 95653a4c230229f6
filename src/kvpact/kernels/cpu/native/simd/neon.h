// 4 lanes: NEON of AArch64 (Armv8.0), with twice the registers and FMA, and tables by TBL.
#include <arm_neon.h>

constexpr int W = 4;
constexpr int REGISTERS = 32;
typedef float vf __attribute__((vector_size(16)));
typedef uint32_t vi __attribute__((vector_size(16)));

INLINE vf zero() { return vf{0, 0, 0, 0}; }
INLINE vf set1(float x) { return (vf)vdupq_n_f32(x); }
INLINE vf load(const float *p) { return (vf)vld1q_f32(p); }
INLINE void store(float *p, vf x) { vst1q_f32(p, (float32x4_t)x); }
INLINE vf load_first(const float *p, int n) { vf x = zero(); memcpy(&x, p, 4 * (size_t)n); return x; }
INLINE void store_first(float *p, vf x, int n) { memcpy(p, &x, 4 * (size_t)n); }
INLINE vf add(vf a, vf b) { return a + b; }
INLINE vf sub(vf a, vf b) { return a - b; }
INLINE vf mul(vf a, vf b) { return a * b; }
INLINE vf fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE vf max(vf a, vf b) { return (vf)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE float sum(vf x) { return vaddvq_f32((float32x4_t)x); }
INLINE float highest(vf x) { return vmaxvq_f32((float32x4_t)x); }

INLINE void sum4(float *out, vf a, vf b, vf c, vf d) {
    const float32x4_t low = vpaddq_f32((float32x4_t)a, (float32x4_t)b), high = vpaddq_f32((float32x4_t)c, (float32x4_t)d);
    vst1q_f32(out, vpaddq_f32(low, high));
}
template <int STEP> INLINE vf swap_lanes(vf x) {
    if constexpr (STEP == 1) return (vf)vrev64q_f32((float32x4_t)x);
    else return (vf)vextq_f32((float32x4_t)x, (float32x4_t)x, 2);
}

INLINE vi load_words(const uint32_t *p) { return (vi)vld1q_u32(p); }
INLINE vi load_words_first(const uint32_t *p, int n) { vi x = {0, 0, 0, 0}; memcpy(&x, p, 4 * (size_t)n); return x; }
template <int N> INLINE vi shr(vi x) { return x >> N; }
template <int N> INLINE vi shl(vi x) { return x << N; }
INLINE vi shr_by(vi x, int n) { return x >> n; }
INLINE vi and_(vi a, uint32_t mask) { return a & mask; }
template <uint32_t MASK> INLINE vi select(vi a, vi b) {
    return (vi)vbslq_u32(vdupq_n_u32(MASK), (uint32x4_t)a, (uint32x4_t)b);
}
template <uint32_t MASK> INLINE vi xor_masked(vi a, vi b, vi c) { return a ^ and_(b ^ c, MASK); }
template <uint32_t BITS> INLINE vi and_or(vi a, uint32_t mask) { return (a & mask) | BITS; }
INLINE vf as_float(vi x) { return (vf)x; }

INLINE vf halves(uint16x4_t x) { return (vf)vcvt_f32_f16(vreinterpret_f16_u16(x)); }
INLINE vf load_half(const uint16_t *p) { return halves(vld1_u16(p)); }
INLINE vf load_bf16(const uint16_t *p) { return (vf)vshll_n_u16(vld1_u16(p), 16); }
INLINE uint8x8_t four_bytes(const uint8_t *p) {
    uint32_t x;
    memcpy(&x, p, 4);
    return vcreate_u8(x);
}
INLINE vf load_e5m2(const uint8_t *p) { return halves(vget_low_u16(vshll_n_u8(four_bytes(p), 8))); }
INLINE vf load_e4m3(const uint8_t *p) {
    const uint16x4_t x = vreinterpret_u16_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(p)))));
    const uint16x4_t size = vand_u16(vshl_n_u16(x, 7), vdup_n_u16(0x3f80));
    return halves(vorr_u16(size, vand_u16(x, vdup_n_u16(0x8000))));
}

INLINE vf exp2_(vf x) {
    x = max(x, set1(-126.0f));
    const vf whole = (vf)vrndnq_f32((float32x4_t)x), f = sub(x, whole);
    vf y = set1(1.535336188e-4f);
    y = fma(y, f, set1(1.339887440e-3f));
    y = fma(y, f, set1(9.618437357e-3f));
    y = fma(y, f, set1(5.550332548e-2f));
    y = fma(y, f, set1(2.402264791e-1f));
    y = fma(y, f, set1(6.931472028e-1f));
    y = fma(y, f, set1(1.0f));
    const vi power = (vi)vcvtq_s32_f32((float32x4_t)whole) << 23;
    // What is far below the least normal number counts as nothing (-inf too).
    return (vf)(((vi)y + power) & (vi)vcgtq_f32((float32x4_t)x, vdupq_n_f32(-125.5f)));
}

// Levels by code, as bytes: those of level i are the table's bytes 4 * i to 4 * i + 3.
template <int BITS> struct Lookup {
    static constexpr int N = BITS <= 2 ? 1 : 1 << (BITS - 2); // registers of the table
    const float *levels;
    uint8x16x4_t table;
    INLINE explicit Lookup(const float *from) : levels(from) {
        float all[16];
        for (int i = 0; i < 16; i++) all[i] = from[i & ((1 << BITS) - 1)];
        for (int i = 0; i < 4; i++) table.val[i] = vreinterpretq_u8_f32(vld1q_f32(all + 4 * i));
    }
    INLINE vf operator()(vi code) const {
        if constexpr (BITS > 4) {
            code = and_(code, (1u << BITS) - 1);
            return vf{levels[code[0]], levels[code[1]], levels[code[2]], levels[code[3]]};
        } else {
            // 0x404040 * 0x04040404 is 0x03020100: the bytes are 4 * code + 0, 1, 2, 3.
            const vi one = select<(1u << BITS) - 1>(code, vi{} + 0x404040u);
            const uint8x16_t bytes = (uint8x16_t)(one * 0x04040404u);
            if constexpr (N == 1) return (vf)vqtbl1q_u8(table.val[0], bytes);
            else if constexpr (N == 2) return (vf)vqtbl2q_u8({{table.val[0], table.val[1]}}, bytes);
            else return (vf)vqtbl4q_u8(table, bytes);
        }
    }
};

// Bytes of a table by the low BITS bits of each byte.
template <int BITS> struct ByteLookup {
    static constexpr int N = 1 << (BITS - 4);
    uint8x16_t part[N];
    INLINE explicit ByteLookup(const uint8_t *table) {
        for (int i = 0; i < N; i++) part[i] = vld1q_u8(table + 16 * i);
    }
    INLINE uint8x16x4_t four(int i) const { return {{part[i], part[i + 1], part[i + 2], part[i + 3]}}; }
    INLINE vi operator()(vi code) const {
        const uint8x16_t index = (uint8x16_t)and_(code, ((1u << BITS) - 1) * 0x01010101u);
        if constexpr (N == 1) return (vi)vqtbl1q_u8(part[0], index);
        else if constexpr (N == 2) return (vi)vqtbl2q_u8({{part[0], part[1]}}, index);
        else if constexpr (N == 4) return (vi)vqtbl4q_u8(four(0), index);
        // Indices beyond a table leave what is there.
        else return (vi)vqtbx4q_u8(vqtbl4q_u8(four(0), index), four(4), vsubq_u8(index, vdupq_n_u8(64)));
    }
};
