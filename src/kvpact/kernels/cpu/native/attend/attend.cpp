// Decode attention over packed slots: blocks of tokens, an online softmax, two accumulators (exact
// values, and values in the codec's space). The torch body is kernels/torch/attend.py.
#include "attend/exact_tokens.h"
#include "attend/weights.h"
#include "simd/rotate.h"
#include "attend/rules.h"
#include "scratch.h"
#include "table.h"

namespace KVP_NS {

// Raises a row's peak to the highest of its scores, which is returned.
INLINE float raise_peak(float *state, const float *score, int64_t n, int64_t width) {
    vf top = load(score);
    for (int64_t i = W; i < n; i += W) top = max(top, load(score + i));
    const float most = highest(top), before = state[0];
    if (most > before) {
        state[0] = most;
        if (before != -INFINITY) {
            const float decay = expf(before - most);
            state[1] *= decay;
            scale_by(state + 2, decay, 2 * width);
        }
    }
    return most;
}

static void scores(Pass &p, int64_t t, int64_t n) {
    const int64_t packed = upto(p.a.k.exact_from - t, n);
    if (packed > 0) (p.a.k.kind == KVP_TRELLIS_CODES ? packed_scores<true> : packed_scores<false>)(p, t, packed);
    if (packed > 0 && p.a.k.offset.pairs) add_offsets(p, t, packed);
    exact_scores(p, t, n);
    for (int r = 0; r < p.rows; r++) apply_rules(p.a, p.b, p.h, p.r0 + r, p.score[r], t, n);
}

static void values(Pass &p, float *partial, int64_t t, int64_t n) {
    const kvp_attend_args &a = p.a;
    const int64_t stride = p.job.partial_row(), width = p.job.v_width, padded = whole(n, TILE);
    const int64_t packed = upto(a.v.exact_from - t, n);
    const ExactTokens exact(a.v, a, p.b, p.h, t, n);
    float top[MAX_ROWS];
    for (int r = 0; r < p.passed; r++)
        top[r] = r < p.rows ? raise_peak(partial + r * stride, p.score[r], padded, width) : -INFINITY;
#if defined(KVP_WHOLE)
    const bool whole_levels = packed > 0 && whole_format(a.v);
    RowWeights rows;
    rows.stored = exact.count;
    if (whole_levels && !rows.stored) {
        // The block's weights are relative to its own highest score, for the rounding's sake.
        alignas(64) float decay[MAX_ROWS + W];
        for (int r = 0; r < MAX_ROWS + W; r++) {
            const bool seen = r < p.passed && top[r] != -INFINITY;
            if (r < MAX_ROWS) rows.minus[r] = seen ? top[r] * LOG2E : 0;
            decay[r] = seen ? (top[r] - partial[r * stride]) * LOG2E : -INFINITY;
        }
        for (int r = 0; r < MAX_ROWS; r += W) store(decay + r, exp2_(load(decay + r)));
        memcpy(rows.share, decay, sizeof rows.share);
        return whole_values(p, rows, partial + 2, t, packed);
    }
    for (int r = 0; r < MAX_ROWS; r++) rows.share[r] = 1;
#endif
    for (int r = 0; r < p.passed; r++) {
        if (top[r] == -INFINITY) {
            memset(p.weight[r], 0, sizeof(float) * BLOCK);
            continue;
        }
        float *state = partial + r * stride;
        vf total = zero();
        const vf high = set1(state[0]), factor = set1(LOG2E);
        for (int64_t i = 0; i < padded; i += W) {
            vf w = exp2_(mul(sub(load(p.score[r] + i), high), factor));
            total = add(total, w);
            store(p.weight[r] + i, w);
        }
        state[1] += sum(total);
    }
    exact_values(p, partial + 2 + width, exact);
#if defined(KVP_WHOLE)
    if (whole_levels) return whole_values(p, rows, partial + 2, t, packed);
#endif
    if (packed > 0) packed_values(p, partial + 2, t, packed);
}

// The passes over a block of tokens: head after head, the query rows of each, some at a time.
struct Turn {
    struct {
        int64_t h, r;
        int rows, passed;
    } passes[TURN];
    int count = 0;
    const Job &job;
    int64_t h, last, r = 0;

    Turn(const Job &of, int64_t first_head, int64_t last_head) : job(of), h(first_head), last(last_head) {}
    bool next() {
        for (count = 0; count < TURN && h < last; count++) {
            auto &x = passes[count];
            x.h = h;
            x.r = r;
            x.rows = next_rows(*job.args, job.rows - r, &x.passed);
            r += x.rows;
            if (r < job.rows) continue;
            r = 0;
            h++;
        }
        return count > 0;
    }
};

static bool task(const Job &job, int64_t index) {
    const kvp_attend_args &a = *job.args;
    const int64_t split = index % job.splits, part = index / job.splits;
    const int64_t b = part / job.parts(), first_head = part % job.parts() * job.heads;
    const int64_t last_head = upto(first_head + job.heads, a.heads);
    const int64_t begin = job.begin + split * job.chunk, end = upto(begin + job.chunk, job.end);
    const auto partial = [&](int64_t h) {
        return job.partial + ((b * a.heads + h) * job.splits + split) * job.partial_size();
    };
    for (int64_t h = first_head; h < last_head; h++)
        for (int64_t r = 0; r < job.rows; r++) {
            float *state = partial(h) + r * job.partial_row();
            memset(state, 0, sizeof(float) * job.partial_row());
            state[0] = -INFINITY;
        }
    TaskScratch *own = own_scratch<TaskScratch>();
    if (!own) return false;
    TaskScratch &scratch = *own;
    const Sizes k_size(a.k, true), v_size(a.v, false);
    if (a.k.kind == KVP_TRELLIS_CODES || a.v.kind == KVP_TRELLIS_CODES) {
        scratch.widened = own_scratch<Widened>();
        if (!scratch.widened) return false;
        if (a.k.kind == KVP_TRELLIS_CODES) scratch.widened->key.read(*a.k.trellis);
        if (a.v.kind == KVP_TRELLIS_CODES) scratch.widened->value.read(*a.v.trellis);
    }
#if defined(KVP_WHOLE)
    if (whole_format(a.k)) scratch.key_levels.read(a.k);
    if (whole_format(a.v)) scratch.value_levels.read(a.v);
#endif
    for (int64_t t = begin; t < end;) {
        const int64_t next = upto((t / job.block + 1) * job.block, end), first = t / TILE * TILE;
        for (Turn turn(job, first_head, last_head); turn.next();) {
            const auto pass = [&](int i) {
                const auto &x = turn.passes[i];
                return Pass{job, a, k_size, v_size, b, x.h, first_head, last_head, end, x.r, x.rows, x.passed, scratch, scratch.score[i], scratch.weight};
            };
            for (int i = 0; i < turn.count; i++) {
                Pass p = pass(i);
                scores(p, first, next - first);
            }
            for (int i = 0; i < turn.count; i++) {
                Pass p = pass(i);
                values(p, partial(p.h) + p.r0 * job.partial_row(), first, next - first);
            }
        }
        t = next;
    }
    return true;
}

// A query becomes one of the levels of a trellis, in the order of their bytes.
static void into_words(float *q, const kvp_stream &k, const Trellis &x, int64_t head) {
    alignas(64) float y[MOST_DIM];
    const kvp_trellis &from = *k.trellis;
    if (k.treated) {
        const int32_t *order = from.order ? from.order + head * k.dim : nullptr;
        const float *weight = from.weight ? from.weight + head * k.dim : nullptr;
        for (int i = 0; i < k.dim; i++) {
            const int c = order ? order[i] : i;
            y[i] = weight ? q[c] / weight[c] : q[c];
        }
        for (int i = 0, first = 0; i < from.blocks; first += from.block[i++].dim) {
            const kvp_block &b = from.block[i];
            const float size = from.deviation ? from.deviation[head * MOST_BLOCKS + i] : 1;
            rotate(y + first, b.signs, b.dim);
            for (int c = 0; c < b.dim; c++) y[first + c] *= size;
        }
    } else {
        rotate(q, k.signs, k.dim);
        memcpy(y, q, sizeof(float) * (size_t)k.dim);
    }
    memset(q, 0, sizeof(float) * (size_t)k.dim); // blocks without bits
    for (int i = 0; i < x.blocks; i++) {
        const TrellisBlock &b = x.block[i];
        each_place(b, x.wide, [&](int code, int step) {
            q[b.begin + byte_place(code, x.wide)] = y[b.first + step] * b.unit;
        });
    }
}

static int64_t whole_query(const Job &job) {
#if defined(KVP_WHOLE)
    if (whole_format(job.args->k) && !job.args->k.fold.base) return WholeQuery::floats(job.rows + MAX_ROWS, job.k_width);
#endif
    (void)job;
    return 0;
}

static void prepare(const Job &job) {
    const kvp_attend_args &a = *job.args;
    Trellis trellis;
    if (a.k.kind == KVP_TRELLIS_CODES) trellis.read(*a.k.trellis);
    const bool packed = job.rotated != job.q && a.k.exact_from > job.begin;
    for (int64_t i = 0; i < job.pairs(); i++) {
        float *q = job.q + i * job.q_size(), *rotated = job.rotated + i * job.q_size();
        // The last pass computes up to 3 rows more than there are.
        const int64_t padded = (job.rows + 3) / 4 * 4, end = job.rows * job.k_width;
        memset(q + end, 0, sizeof(float) * (size_t)(padded * job.k_width - end));
        for (int64_t r = 0; r < job.rows; r++) {
            const int64_t b = i / a.heads, h = i % a.heads * a.groups + r / a.queries;
            const char *from = a.q + b * a.q_row + h * a.q_head + r % a.queries * a.q_token;
            for (int64_t c = a.k.dim; c < job.k_width; c++) q[r * job.k_width + c] = 0;
            to_floats(q + r * job.k_width, from, a.q_dtype, a.k.dim);
            scale_by(q + r * job.k_width, a.scale, job.k_width);
        }
        if (!packed) continue; // or there is nothing that is rotated
        memcpy(rotated, q, sizeof(float) * (size_t)(padded * job.k_width));
        for (int64_t r = 0; r < job.rows; r++) {
            float *row = rotated + r * job.k_width;
            if (a.k.kind == KVP_TRELLIS_CODES) into_words(row, a.k, trellis, i % a.heads);
            else rotate(row, a.k.signs, a.k.dim);
        }
    }
#if defined(KVP_WHOLE)
    if (job.whole_size && a.k.exact_from > job.begin)
        for (int64_t i = 0; i < job.pairs(); i++)
            make_whole_query(WholeQuery(job.whole + i * job.whole_size, job.rows + MAX_ROWS, 0, job.k_width), a.k,
                              job.rotated + i * job.q_size(), (job.rows + 3) / 4 * 4);
#endif
}

static void finish(const Job &job) {
    const kvp_attend_args &a = *job.args;
    const int64_t stride = job.partial_row(), width = job.v_width;
    const bool packed = a.v.signs && a.v.exact_from > job.begin;
    for (int64_t i = 0; i < job.pairs(); i++)
        for (int64_t r = 0; r < job.rows; r++) {
            const int64_t b = i / a.heads, h = i % a.heads * a.groups + r / a.queries;
            float *all = job.partial + i * job.splits * job.partial_size() + r * stride;
            float peak = a.sink_logits ? a.sink_logits[h] : -INFINITY;
            for (int64_t s = 0; s < job.splits; s++) peak = fmaxf(peak, all[s * job.partial_size()]);
            float *out = a.out + output_row(a, b, h, r % a.queries) * a.v.dim;
            if (peak == -INFINITY) {
                memset(out, 0, sizeof(float) * a.v.dim);
                continue;
            }
            float total = a.sink_logits ? expf(a.sink_logits[h] - peak) : 0;
            for (int64_t s = 0; s < job.splits; s++) {
                float *state = all + s * job.partial_size();
                const float decay = expf(state[0] - peak);
                total += state[1] * decay;
                if (decay != 1.0f) scale_by(state + 2, decay, 2 * width);
                if (s) add_scaled(all + 2, state + 2, 1.0f, 2 * width);
            }
            if (packed) rotate_back(all + 2, a.v.signs, a.v.dim);
            const float share = 1.0f / total;
            for (int c = 0; c < a.v.dim; c++) out[c] = (all[2 + c] + all[2 + width + c]) * share;
        }
}

static uint64_t read(const char *data, int64_t bytes) {
    constexpr int N = 8;
    vf acc[N];
    for (int k = 0; k < N; k++) acc[k] = zero();
    int64_t i = 0;
    for (; i + N * W * 4 <= bytes; i += N * W * 4)
        for (int k = 0; k < N; k++) acc[k] = max(acc[k], load((const float *)(data + i) + k * W));
    for (int k = 1; k < N; k++) acc[0] = max(acc[0], acc[k]);
    float all[W];
    store(all, acc[0]);
    uint64_t sum = 0;
    memcpy(&sum, all, sizeof sum);
    return sum;
}

void fill_attend(Table &table) {
    table.whole_query = whole_query;
    table.prepare = prepare;
    table.task = task;
    table.finish = finish;
    table.read = read;
}
} // namespace KVP_NS
