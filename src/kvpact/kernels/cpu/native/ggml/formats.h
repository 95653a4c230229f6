// ggml's types into numbers: 32 channels at a time, as vectors.
#pragma once
#include "ggml/job.h"
#include "simd/lanes.h"

namespace KVP_NS {

constexpr int VECTORS_OF_BLOCK = BLOCK / W;

INLINE float half_at(const char *p) {
    uint16_t x;
    memcpy(&x, p, 2);
    return from_half(x);
}
INLINE Ints lane_numbers() {
    Ints x;
    for (int i = 0; i < W; i++) x[i] = i;
    return x;
}
constexpr float IQ4_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

template <int TYPE> struct Blocks {
    static constexpr int KIND = TYPE;
    static constexpr bool NUMBERS = is_number(TYPE);
    static constexpr int HALF = VECTORS_OF_BLOCK / 2;
    static constexpr bool FIVE = TYPE == ggml_abi::Q5_0 || TYPE == ggml_abi::Q5_1;
    static constexpr int CODES = (has_least(TYPE) ? 4 : 2) + (FIVE ? 4 : 0); // where they begin
    Lookup<4> levels{IQ4_LEVELS};
    Ints places = lane_numbers();

    INLINE void operator()(const char *p, vf *to) const {
        if constexpr (is_number(TYPE)) {
            constexpr int dtype = TYPE == ggml_abi::F32 ? KVP_F32 : TYPE == ggml_abi::F16 ? KVP_F16 : KVP_BF16;
            for (int i = 0; i < VECTORS_OF_BLOCK; i++) to[i] = load_numbers(p + i * W * (TYPE == ggml_abi::F32 ? 4 : 2), dtype);
            return;
        }
        const vf unit = set1(half_at(p));
        const uint8_t *codes = (const uint8_t *)p + CODES;
        if constexpr (TYPE == ggml_abi::Q8_0) {
            for (int i = 0; i < VECTORS_OF_BLOCK; i++) to[i] = mul(floats((load_codes(codes + i * W) ^ 128) - 128), unit);
            return;
        }
        Ints all[VECTORS_OF_BLOCK];
        for (int i = 0; i < HALF; i++) {
            const Ints x = load_codes(codes + i * W);
            all[i] = x & 15;
            all[HALF + i] = x >> 4;
        }
        if constexpr (FIVE) {
            int32_t fifth;
            memcpy(&fifth, p + CODES - 4, 4);
            for (int i = 0; i < VECTORS_OF_BLOCK; i++) all[i] |= (((Ints{} + fifth) >> (places + i * W)) & 1) << 4;
        }
        for (int i = 0; i < VECTORS_OF_BLOCK; i++) {
            if constexpr (TYPE == ggml_abi::IQ4_NL) to[i] = mul(levels((vi)all[i]), unit);
            else if constexpr (has_least(TYPE)) to[i] = add(mul(floats(all[i]), unit), set1(half_at(p + 2)));
            else to[i] = mul(floats(all[i] - (FIVE ? 16 : 8)), unit);
        }
    }
    // The last channels of a vector whose width is no multiple of 32.
    INLINE void some(const char *p, int64_t count, vf *to) const {
        alignas(64) char whole[BLOCK * 4] = {};
        memcpy(whole, p, (size_t)count * block_size(TYPE) / BLOCK);
        (*this)(whole, to);
    }
    INLINE void at(const char *row, int64_t channel, int64_t dim, vf *to) const {
        const char *p = row + channel / BLOCK * (int64_t)block_size(TYPE);
        if (is_number(TYPE) && dim - channel < BLOCK) some(p, dim - channel, to);
        else (*this)(p, to);
    }
};

// Calls work(Blocks<type>()).
template <class Work> INLINE void with_blocks(int type, Work &&work) {
    switch (type) {
    case ggml_abi::F32: return work(Blocks<ggml_abi::F32>());
    case ggml_abi::F16: return work(Blocks<ggml_abi::F16>());
    case ggml_abi::BF16: return work(Blocks<ggml_abi::BF16>());
    case ggml_abi::Q8_0: return work(Blocks<ggml_abi::Q8_0>());
    case ggml_abi::Q4_0: return work(Blocks<ggml_abi::Q4_0>());
    case ggml_abi::Q4_1: return work(Blocks<ggml_abi::Q4_1>());
    case ggml_abi::Q5_0: return work(Blocks<ggml_abi::Q5_0>());
    case ggml_abi::Q5_1: return work(Blocks<ggml_abi::Q5_1>());
    case ggml_abi::IQ4_NL: return work(Blocks<ggml_abi::IQ4_NL>());
    }
}
} // namespace KVP_NS
