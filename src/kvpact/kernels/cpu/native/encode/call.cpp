// kvp_encode, kvp_prompt and kvp_magnitudes: which calls are covered, and their tasks.
#include <atomic>
#include <initializer_list>
#include <math.h>
#include <string.h>

#include "pool.h"
#include "table.h"

namespace {

constexpr int64_t FEW = 4;       // tokens of a head that don't fill a register of their own

// Whether keys of a head are encoded by its numbers, so that heads can't be mixed.
bool by_head(const kvp_encode_args &a) { return a.kind == KVP_TRELLIS && !a.signs; }
// Whether so few tokens go as one task, of all heads.
bool few(const kvp_encode_args &a) { return a.group <= 1 && a.tokens <= FEW && !by_head(a); }
int64_t tasks_of(const kvp_encode_args &a) {
    if (a.tokens < 1 || a.batch * a.heads < 1) return 0;
    return few(a) ? 1 : a.batch * a.heads * ((a.start + a.tokens - 1) / PART - a.start / PART + 1);
}

struct Call {
    const kvp_encode_args *args;
    const Table *table;
};
// Parts begin at absolute multiples of PART: no two write to one word, and none cuts a group. All
// heads of a part follow each other, because they often lie side by side.
bool run_task(void *context, int64_t index) {
    const Call *call = (const Call *)context;
    const kvp_encode_args *one = call->args;
    for (; index >= tasks_of(*one); one++) index -= tasks_of(*one);
    const kvp_encode_args &a = *one;
    const int64_t pairs = a.batch * a.heads;
    if (few(a)) return call->table->encode_few(a, 0, pairs * a.tokens);
    const int64_t part = index / pairs + a.start / PART;
    int64_t begin = part * PART - a.start, end = begin + PART;
    if (begin < 0) begin = 0;
    if (end > a.tokens) end = a.tokens;
    return call->table->encode_span(a, Span{index % pairs, begin, end});
}

bool trellis_covered(const kvp_encode_args &a) {
    if (!a.trellis || !a.scale.base || a.bits > 6) return false;
    const kvp_trellis &t = *a.trellis;
    if (t.blocks < 1 || t.blocks > 3 || (t.interleave != 4 && t.interleave != 8)) return false;
    int64_t dim = 0;
    for (int b = 0; b < t.blocks; b++) {
        const kvp_block &block = t.block[b];
        if (block.dim < 8 || block.bits < 0 || block.bits > a.bits || !block.signs) return false;
        if (block.bits && (!block.cells || block.memory < 3 || block.memory > 4)) return false;
        if (block.dim < 32 && block.memory == 4) return false;
        dim += block.dim;
    }
    if (dim != a.dim || (t.order && !t.deviation)) return false;
    if ((t.first || t.center) && !a.base.base) return false;
    return a.group > 1 ? t.center == a.group && a.mean.base && a.step.base : !t.center;
}

bool covered(const kvp_encode_args &a) {
    if (a.tokens < 1) return true;
    if (a.dim < 1 || a.dim > MOST_DIM || a.bits < 1 || a.bits > 8) return false;
    if (a.kind < KVP_CODEBOOK || a.kind > KVP_TRELLIS || a.segment_tokens % 32 || a.segment_tokens < 32) return false;
    if (a.dtype < KVP_F32 || a.dtype > KVP_BF16 || !a.x.data || !a.codes.base) return false;
    if (a.group > 1) {
        if (PART % a.group || a.group % 32 || a.start % a.group || a.tokens % a.group) return false;
        const bool grid = a.scale.base && a.zero.base;
        if (a.kind == KVP_CODEBOOK ? !a.mean.base : a.kind == KVP_CHANNEL ? !grid : a.kind < KVP_BALANCED) return false;
        if (a.kind == KVP_BALANCED && (!grid || !a.balance.base)) return false;
    } else if (a.kind == KVP_CHANNEL || a.kind == KVP_BALANCED) {
        return false;
    }
    if (a.sinks > 0 && a.signs) return false;
    if (a.kind == KVP_TRELLIS && !trellis_covered(a)) return false;
    if (a.kind == KVP_CODEBOOK && (!a.levels || !a.steps || !a.scale.base)) return false;
    if ((a.kind == KVP_SYMMETRIC || a.kind == KVP_AFFINE) && (a.channels < 1 || a.bits < 2 || !a.scale.base)) return false;
    return a.kind != KVP_AFFINE || a.zero.base;
}

bool covered(const kvp_learn_args &a) {
    if (a.dim < 1 || a.dim > MOST_DIM || a.dtype < KVP_F32 || a.dtype > KVP_BF16 || !a.x.data || !a.trellis) return false;
    if (a.batch < 1 || a.heads < 1 || a.tokens < TILE || a.tokens > MOST_GROUP || a.tokens & (a.tokens - 1)) return false;
    const kvp_trellis &t = *a.trellis;
    if (t.blocks < 1 || t.blocks > 3 || t.center < 0 || t.center % TILE || (t.center && a.tokens % t.center)) return false;
    int64_t dim = 0;
    for (int b = 0; b < t.blocks; b++) {
        if (t.block[b].dim < 1) return false;
        dim += t.block[b].dim;
    }
    if (a.q.data && (a.q_tokens < 1 || a.q_heads < a.heads || a.q_heads % a.heads)) return false;
    return dim == a.dim && (a.weight ? a.order && a.deviation : a.first != nullptr);
}
struct Learning {
    const kvp_learn_args *args;
    const Table *table;
};
bool learn_task(void *context, int64_t head) {
    const Learning *call = (const Learning *)context;
    return call->table->learn_head(*call->args, head);
}
// Whether fp16 numbers are finite; and none is zero, or any.
bool good(const uint16_t *numbers, int64_t count, bool zero) {
    for (int64_t i = 0; i < count; i++)
        if ((numbers[i] & 0x7c00) == 0x7c00 || (!zero && !(numbers[i] & 0x7fff))) return false;
    return true;
}

int learn(const Table &table, const kvp_learn_args &a) {
    if (!covered(a)) return 2;
    Learning call{&a, &table};
    const int64_t threads = kvp_threads(a.threads, a.batch * a.heads * a.tokens * a.dim);
    if (!kvp_parallel(threads, a.heads, learn_task, &call)) return 3;
    if (a.first && !good(a.first, a.heads * a.dim, true)) return 4;
    if (!a.weight) return 0;
    return good(a.weight, a.heads * a.dim, false) && good(a.deviation, a.heads * a.trellis->blocks, false) ? 0 : 4;
}

constexpr int64_t PIECE = 1 << 14; // numbers of a task that reads them once

// Lines of `dim` numbers without gaps, and the largest magnitude in them, as bits.
struct Reach {
    const Table *table;
    const kvp_exact &x;
    int32_t dtype;
    int64_t heads, tokens, dim, count, lines = 1;
    std::atomic<uint32_t> most{0};
};
bool reach_task(void *context, int64_t index) {
    Reach &r = *(Reach *)context;
    const int64_t pieces = (r.dim + PIECE - 1) / PIECE, first = index / pieces * r.lines, from = index % pieces * PIECE;
    const int64_t numbers = r.dim - from < PIECE ? r.dim - from : PIECE;
    uint32_t most = 0;
    for (int64_t i = first; i < first + r.lines && i < r.count; i++) {
        const char *line = r.x.data + i / (r.heads * r.tokens) * r.x.row + i / r.tokens % r.heads * r.x.head + i % r.tokens * r.x.token;
        const uint32_t found = r.table->largest(line + from * (r.dtype == KVP_F32 ? 4 : 2), numbers, r.dtype);
        if (found > most) most = found;
    }
    for (uint32_t known = r.most; most > known && !r.most.compare_exchange_weak(known, most);) {}
    return true;
}

// Copies tokens of K or V, which have no gaps there.
void copy_tokens(char *to, const kvp_encode_args &a, int64_t first, int64_t count) {
    const size_t bytes = (size_t)a.dim * (a.dtype == KVP_F32 ? 4 : 2);
    for (int64_t pair = 0; pair < a.batch * a.heads && count > 0; pair++)
        for (int64_t t = first; t < first + count; t++, to += bytes)
            memcpy(to, a.x.data + pair / a.heads * a.x.row + pair % a.heads * a.x.head + t * a.x.token, bytes);
}

} // namespace

int kvp_encode(int level, const kvp_encode_args *args, int64_t count) {
    const Table *table = table_of(level);
    if (!table) return 1;
    for (int64_t i = 0; i < count; i++)
        if (!covered(args[i])) return 2;
    int64_t tasks = 0, numbers = 0;
    for (int64_t i = 0; i < count; i++) {
        tasks += tasks_of(args[i]);
        numbers += args[i].batch * args[i].heads * args[i].tokens * args[i].dim;
    }
    Call call{args, table};
    return kvp_parallel(kvp_threads(args->threads, numbers), tasks, run_task, &call) ? 0 : 3;
}

int kvp_prompt(int level, const kvp_prompt_args *args) {
    const kvp_prompt_plan *plan = args->plan;
    const Table *table = table_of(level);
    if (!table) return 1;
    kvp_encode_args sides[2] = {plan->k, plan->v};
    sides[0].x = args->k;
    sides[1].x = args->v;
    for (int i = 0; i < 2; i++) {
        kvp_encode_args &a = sides[i];
        const char *const *fields = i ? args->v_table : args->k_table;
        const int64_t segments = i ? plan->v_segments : plan->k_segments;
        for (kvp_field *field : {&a.codes, &a.scale, &a.zero, &a.mean, &a.balance, &a.base, &a.step})
            if (field->base) field->base = fields + ((intptr_t)field->base - 1) * segments;
        a.threads = args->threads;
    }
    if (plan->learn.tokens) {
        kvp_learn_args a = plan->learn;
        kvp_trellis &known = *args->known;
        a.x = args->k;
        a.q = args->q;
        a.threads = args->threads;
        known = *a.trellis;
        const int64_t count = a.heads * a.dim;
        uint16_t *to = args->state;
        float *number = args->numbers;
        if (a.weight) {
            known.weight = number;
            number += count;
        }
        if (a.first) {
            a.first = to;
            known.first = number;
            to += count;
            number += count;
        }
        if (a.weight) {
            a.weight = to;
            a.order = (int16_t *)(to + count);
            a.deviation = to + 2 * count;
            known.order = (int32_t *)number;
            known.deviation = number + count;
        }
        a.known = &known;
        sides[0].trellis = &known;
        const int status = learn(*table, a);
        if (status) return status;
    }
    copy_tokens(args->k_tail, sides[0], plan->k_tail, plan->tokens - plan->k_tail);
    copy_tokens(args->v_tail, sides[1], plan->v_tail, plan->tokens - plan->v_tail);
    copy_tokens(args->k_sinks, sides[0], 0, plan->k_sinks);
    copy_tokens(args->v_sinks, sides[1], 0, plan->v_sinks);
    return kvp_encode(level, sides, 2);
}

int kvp_magnitudes(int level, const kvp_tensor *x, int64_t count, int64_t threads, float *out) {
    const Table *table = table_of(level);
    if (!table) return 1;
    for (int64_t i = 0; i < count; i++) out[i] = magnitude_of(*table, x[i], threads);
    return 0;
}

float magnitude_of(const Table &table, const kvp_tensor &tensor, int64_t threads) {
    const kvp_exact *x = &tensor.x;
    const int32_t dtype = (int32_t)tensor.dtype;
    int64_t heads = tensor.heads, tokens = tensor.tokens, dim = tensor.dim;
    const int64_t size = dtype == KVP_F32 ? 4 : 2, batch = tensor.batch, all = batch * heads * tokens * dim;
    if (all < 1) return 0;
    // Rows without gaps are read in one go.
    if (x->token == dim * size || tokens == 1) {
        dim *= tokens;
        tokens = 1;
        if (x->head == dim * size || heads == 1) {
            dim *= heads;
            heads = 1;
        }
    } else if (x->head == dim * size) {
        dim *= heads;
        heads = 1;
    }
    Reach reach{&table, *x, dtype, heads, tokens, dim, batch * heads * tokens};
    const int64_t pieces = (dim + PIECE - 1) / PIECE;
    reach.lines = dim < PIECE ? PIECE / dim : 1;
    kvp_parallel(all < 4 * PIECE ? 1 : threads, (reach.count + reach.lines - 1) / reach.lines * pieces, reach_task, &reach);
    uint32_t most = reach.most;
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
