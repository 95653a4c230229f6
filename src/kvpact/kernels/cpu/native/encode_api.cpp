#include <math.h>
#include <string.h>

#include "encode_job.h"
#include "pool.h"

namespace {

enum { BASE = 1, AVX2 = 2, AVX512 = 4, NEON = 8 };

struct Level {
    void (*span)(const kvp_encode_args &, Span);
    void (*few)(const kvp_encode_args &, int64_t, int64_t);
    uint32_t (*largest)(const void *, int64_t, int32_t);
};

Level level_of(int level) {
#if defined(KVP_X86)
    if (level == AVX512) return {kvp_avx512::encode_span, kvp_avx512::encode_few, kvp_avx512::largest};
    if (level == AVX2) return {kvp_avx2::encode_span, kvp_avx2::encode_few, kvp_avx2::largest};
#elif defined(KVP_ARM)
    if (level == NEON) return {kvp_neon::encode_span, kvp_neon::encode_few, kvp_neon::largest};
#endif
    (void)level;
    return {kvp_base::encode_span, kvp_base::encode_few, kvp_base::largest};
}

constexpr int64_t FEW = 4;       // tokens of a head that don't fill a register of their own
constexpr int64_t PART = 128;    // tokens of one task
constexpr int64_t SMALL = 1 << 16; // numbers that are not worth a second thread

struct Call {
    const kvp_encode_args *args;
    Level level;
    int64_t parts; // of a head
};

// Parts begin at absolute multiples of PART: no two write to one word, and none cuts a group.
void run_task(void *context, int64_t index) {
    const Call *call = (const Call *)context;
    const kvp_encode_args &a = *call->args;
    const int64_t part = index % call->parts + a.start / PART;
    int64_t begin = part * PART - a.start, end = begin + PART;
    if (begin < 0) begin = 0;
    if (end > a.tokens) end = a.tokens;
    call->level.span(a, Span{index / call->parts, begin, end});
}

bool covered(const kvp_encode_args &a) {
    if (a.dim < 1 || a.dim > ENCODE_DIM || a.bits < 1 || a.bits > 8) return false;
    if (a.kind < KVP_CODEBOOK || a.kind > KVP_FLOAT8 || a.segment_tokens % 32 || a.segment_tokens < 32) return false;
    if (a.dtype < KVP_F32 || a.dtype > KVP_BF16 || !a.x.data || !a.codes.base) return false;
    if (a.group > 1) {
        if (PART % a.group || a.group % 32 || a.start % a.group || a.tokens % a.group) return false;
        if (a.kind == KVP_CHANNEL ? !a.scale.base || !a.zero.base : a.kind != KVP_CODEBOOK || !a.mean.base) return false;
    } else if (a.kind == KVP_CHANNEL) {
        return false;
    }
    if (a.kind == KVP_CODEBOOK && (!a.levels || !a.steps || !a.scale.base)) return false;
    if ((a.kind == KVP_SYMMETRIC || a.kind == KVP_AFFINE) && (a.channels < 1 || a.bits < 2 || !a.scale.base)) return false;
    return a.kind != KVP_AFFINE || a.zero.base;
}

} // namespace

int kvp_encode(int level, const kvp_encode_args *args, int64_t count) {
    if (!(kvp_levels() & level)) return 1;
    for (int64_t i = 0; i < count; i++)
        if (!covered(args[i])) return 2;
    for (int64_t i = 0; i < count; i++) {
        const kvp_encode_args &a = args[i];
        const int64_t pairs = a.batch * a.heads;
        if (a.tokens < 1 || pairs < 1) continue;
        Call call{&a, level_of(level), (a.start + a.tokens - 1) / PART - a.start / PART + 1};
        if (a.group <= 1 && a.tokens <= FEW) {
            call.level.few(a, 0, pairs * a.tokens);
            continue;
        }
        const int64_t threads = pairs * a.tokens * a.dim < SMALL ? 1 : a.threads;
        kvp_parallel(threads, pairs * call.parts, run_task, &call);
    }
    return 0;
}

float kvp_magnitude(int level, const kvp_exact *x, int32_t dtype, int64_t batch, int64_t heads, int64_t tokens,
                    int64_t dim) {
    const Level use = level_of(level);
    const int64_t size = dtype == KVP_F32 ? 4 : 2;
    // Rows without gaps are read in one go.
    if (x->token == dim * size || tokens == 1) {
        dim *= tokens;
        tokens = 1;
        if (x->head == dim * size || heads == 1) {
            dim *= heads;
            heads = 1;
        }
    }
    uint32_t most = 0;
    for (int64_t b = 0; b < batch; b++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t t = 0; t < tokens; t++) {
                const uint32_t found = use.largest(x->data + b * x->row + h * x->head + t * x->token, dim, dtype);
                if (found > most) most = found;
            }
    if (dtype == KVP_F16) {
        const int exponent = (int)(most >> 10), mantissa = (int)(most & 0x3ff);
        if (exponent == 31) return mantissa ? NAN : INFINITY;
        return exponent ? ldexpf((float)(mantissa | 0x400), exponent - 25) : ldexpf((float)mantissa, -24);
    }
    if (dtype == KVP_BF16) most <<= 16;
    float result;
    memcpy(&result, &most, 4);
    return result;
}
