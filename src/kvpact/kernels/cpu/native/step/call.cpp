// kvp_step: one layer's step in one call. Nothing is written before everything was checked and
// attended; what is then written lies after the tokens held, where nobody reads yet.
#include <math.h>
#include <string.h>
#include <vector>

#include "scratch.h"
#include "table.h"

namespace {

// Larger ones the ordinary way decides about: with keys as large, products may overflow.
constexpr float LARGEST_QUERY = 9.9e30f;

struct Side {
    const kvp_stream &stream; // its `fresh` are the new tokens
    const kvp_store *plan;
    const kvp_append &append;
};

// Whether all numbers are at most `limit` (and so finite).
bool within(int level, const kvp_exact &x, int32_t dtype, const kvp_attend_args &a, int64_t heads, int64_t tokens,
            int64_t dim, float limit) {
    const Table *table = table_of(level);
    return table && magnitude_of(*table, {x, dtype, a.batch, heads, tokens, dim}, 1) <= limit;
}

float number(const char *at, int32_t dtype) {
    float x;
    if (dtype == KVP_F32) {
        memcpy(&x, at, 4);
        return x;
    }
    uint16_t bits;
    memcpy(&bits, at, 2);
    if (dtype == KVP_BF16) {
        const uint32_t wide = (uint32_t)bits << 16;
        memcpy(&x, &wide, 4);
        return x;
    }
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    x = exponent ? ldexpf((float)(fraction + 1024), exponent - 25) : ldexpf((float)fraction, -24);
    return bits >> 15 ? -x : x;
}

// Copies of the tokens from `start` on in fp32, without their offset; they have no gaps.
void take_off(float *to, const kvp_exact &x, int32_t dtype, const kvp_offset &o, const kvp_encode_args &args) {
    const int64_t size = dtype == KVP_F32 ? 4 : 2;
    for (int64_t b = 0; b < args.batch; b++)
        for (int64_t h = 0; h < args.heads; h++)
            for (int64_t t = 0; t < args.tokens; t++, to += args.dim) {
                const char *from = x.data + b * x.row + h * x.head + t * x.token;
                for (int64_t c = 0; c < args.dim; c++) to[c] = number(from + c * size, dtype);
                int64_t position = args.start + t - (o.origin ? o.origin[b] : 0);
                if (position < 0) position = 0;
                for (int64_t pair = 0; pair < o.pairs; pair++) {
                    const int32_t *channels = o.channels + 3 * pair;
                    const float *bias = o.bias + 2 * (h * o.pairs + pair);
                    const float *wave = o.table + 2 * channels[2] * o.length + position;
                    const float c = wave[0], s = wave[o.length];
                    to[channels[0]] -= bias[0] * c - bias[1] * s;
                    to[channels[1]] -= bias[1] * c + bias[0] * s;
                }
            }
}

int encode(int level, const Side &side, const kvp_attend_args &a) {
    static thread_local Scratch scratch;
    if (!side.append.tokens) return 0;
    kvp_encode_args args = side.plan->form;
    const int64_t segment = side.append.start / args.segment_tokens;
    for (kvp_field *field : {&args.codes, &args.scale, &args.zero, &args.mean, &args.balance, &args.base, &args.step})
        if (field->base) field->base += segment;
    args.x = side.stream.fresh;
    if (side.append.x) {
        args.x = side.stream.tail;
        args.x.data = side.append.x;
    }
    args.dtype = side.stream.dtype;
    args.batch = a.batch;
    args.heads = a.heads;
    args.tokens = side.append.tokens;
    args.start = side.append.start;
    args.threads = a.threads;
    if (side.stream.offset.pairs) {
        float *shifted = scratch.floats((size_t)(a.batch * a.heads * args.tokens * args.dim));
        if (!shifted) return 3;
        take_off(shifted, args.x, args.dtype, side.stream.offset, args);
        const int64_t token = args.dim * (int64_t)sizeof(float), head = args.tokens * token;
        args.x = {(const char *)shifted, a.heads * head, head, token};
        args.dtype = KVP_F32;
    }
    return kvp_encode(level, &args, 1);
}

// Copies new tokens after the tail.
void keep(const Side &side, const kvp_attend_args &a) {
    if (!side.append.spare) return;
    const kvp_exact &to = side.stream.tail, &from = side.stream.fresh;
    const size_t bytes = (size_t)side.stream.dim * (side.stream.dtype == KVP_F32 ? 4 : 2);
    for (int64_t b = 0; b < a.batch; b++)
        for (int64_t h = 0; h < a.heads; h++)
            for (int64_t t = a.fresh - side.plan->kept; t < a.fresh; t++)
                memcpy(side.append.spare + b * to.row + h * to.head + t * to.token,
                       from.data + b * from.row + h * from.head + t * from.token, bytes);
}

} // namespace

int kvp_step(int level, const kvp_step_args *steps, int64_t count) {
    static thread_local std::vector<kvp_attend_args> calls;
    static thread_local Scratch output;
    const Table *table = table_of(level);
    if (!table) return 1;
    if (count < 1) return 0;
    try {
        calls.resize((size_t)count);
    } catch (...) {
        return 3;
    }
    for (int64_t i = 0; i < count; i++) {
        const kvp_step_args &s = steps[i];
        const kvp_step_plan &plan = *s.plan;
        kvp_attend_args &a = calls[(size_t)i] = plan.attend;
        for (int side = 0; side < 2; side++) {
            kvp_stream &x = side ? a.v : a.k;
            const kvp_append &append = side ? s.v : s.k;
            x.exact_from = append.exact_from;
            x.tail = append.tail;
            x.fresh.data = append.fresh;
            if (!within(level, x.fresh, x.dtype, a, a.heads, a.fresh, x.dim, (side ? plan.v : plan.k).limit)) return 4;
        }
        a.q = s.q;
        a.out = s.out;
        a.held = s.held;
        a.first = s.held + a.fresh - a.queries;
        a.threads = s.threads;
        const int64_t width = a.k.dim + (plan.kernel == KVP_STEP_LATENT ? a.v.dim : 0);
        const kvp_exact q = {a.q, a.q_row, a.q_head, a.q_token};
        if (!within(level, q, a.q_dtype, a, a.heads * a.groups, a.queries, width, LARGEST_QUERY)) return 4;
        const int64_t room = a.heads * a.groups * a.queries * (width + a.v.dim) + MOST_DIM;
        if (s.rounded && !(a.out = output.floats((size_t)room))) return 3;
    }
    int status = 0;
    if (steps[0].plan->kernel == KVP_STEP_FEW) status = kvp_attend(level, calls.data(), count);
    else
        for (int64_t i = 0; i < count && !status; i++)
            status = kvp_attend_rows(level, &calls[(size_t)i], steps[i].plan->kernel == KVP_STEP_LATENT);
    for (int64_t i = 0; i < count && !status; i++) {
        const kvp_step_args &s = steps[i];
        const kvp_attend_args &a = calls[(size_t)i];
        const int64_t dim = s.plan->kernel == KVP_STEP_LATENT ? a.k.dim : a.v.dim;
        for (int64_t row = 0; s.rounded && row < a.heads * a.groups * a.queries; row++)
            table->narrow(s.rounded + row / a.queries * s.rounded_head + row % a.queries * s.rounded_token,
                          a.out + row * dim, dim, a.q_dtype);
        const Side k = {a.k, &s.plan->k, s.k}, v = {a.v, &s.plan->v, s.v};
        keep(k, a);
        keep(v, a);
        status = encode(level, k, a);
        if (!status) status = encode(level, v, a);
    }
    return status;
}
