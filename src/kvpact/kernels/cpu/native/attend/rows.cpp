// Attention with many query rows per KV head: a block of tokens is decoded once into fp32 panels,
// and two matrix products do the rest. Over latents (attention/latent.py) the values are the keys'
// panels, so the second product is the other way round: channels times tokens, rows side by side.
// The torch bodies are attention/attend.py and attention/latent.py.
#include "attend/rows.h"
#include "attend/rules.h"
#include "attend/tiles.h"
#include "table.h"

namespace KVP_NS {

// The memory of a task, cut up.
struct Room {
    float *q, *rotated; // [rows][q_width]
    float *key, *rope;  // panels [channels][PANEL] of TOKENS columns; of the rotated keys
    float *value;       // panels [TOKENS][PANEL] of the columns of what lies in V's place
    float *score;       // [rows][TOKENS], then weights
    float *turned;      // latents: panels [TOKENS][PANEL] of weights, rows side by side
    float *sum[2];      // latents: [width][rows], of exact values and of packed ones
    float *part;
    int64_t size = 0;

    Room(const RowsJob &job, float *memory) {
        const kvp_attend_args &a = *job.args;
        auto take = [&](int64_t floats) {
            float *at = memory + size;
            size += whole(floats, 16);
            return at;
        };
        q = take(job.at_once * job.q_width);
        rotated = take(job.at_once * job.q_width);
        key = take(TOKENS * (int64_t)a.k.dim);
        rope = take(job.latent ? TOKENS * whole(a.v.dim, W) : 0);
        value = take(TOKENS * whole(a.v.dim, PANEL));
        score = take(job.at_once * TOKENS);
        turned = take(job.latent ? TOKENS * whole(job.at_once, PANEL) : 0);
        for (float *&s : sum) s = take(job.latent ? job.width * job.at_once : 0);
        part = take(job.splits == 1 ? job.part_size() : 0);
    }
};

// The rows of a task and where it is.
struct Rows {
    const RowsJob &job;
    const kvp_attend_args &a;
    const Room &room;
    Part part;
    int64_t b, h, first, count;
};

static void read_queries(const Rows &r) {
    const kvp_attend_args &a = r.a;
    const int size = a.q_dtype == KVP_F32 ? 4 : 2;
    const int64_t width = r.job.q_width, rope = whole(a.k.dim, TILE);
    for (int64_t i = 0; i < r.count; i++) {
        float *q = r.room.q + i * width, *rotated = r.room.rotated + i * width;
        const int64_t row = r.first + i, head = r.h * a.groups + row / a.queries;
        const char *from = a.q + r.b * a.q_row + head * a.q_head + row % a.queries * a.q_token;
        to_floats(q, from, a.q_dtype, a.k.dim);
        if (r.job.latent) to_floats(q + rope, from + (int64_t)a.k.dim * size, a.q_dtype, a.v.dim);
        for (int64_t c = 0; c < width; c++) q[c] *= a.scale;
        memcpy(rotated, q, sizeof(float) * width);
        if (a.k.signs) rotate(rotated, a.k.signs, a.k.dim);
        if (r.job.latent && a.v.signs) rotate(rotated + rope, a.v.signs, a.v.dim);
    }
}

// score (+)= q k for the first n columns of the panels, which have `height` rows.
static void scores(const Rows &r, const float *q, const float *panels, int64_t dim, int64_t height, int64_t n, bool add) {
    product({r.count, dim, q, r.job.q_width, panels, r.room.score, TOKENS, add}, (n + W - 1) / W, height * PANEL);
}

// Scores of the tokens t to t + n, those before `lead` aside, become weights. True where the sums
// gathered so far have to be multiplied with the numbers left in `decay`.
static bool weigh(const Rows &r, int64_t t, int64_t lead, int64_t n, float *decay) {
    const float log2e = 1.44269504088896340736f;
    bool changed = false;
    for (int64_t i = 0; i < r.count; i++) {
        float *s = r.room.score + i * TOKENS;
        apply_rules(r.a, r.b, r.h, r.first + i, s, t, n);
        for (int64_t k = 0; k < lead; k++) s[k] = -INFINITY;
        vf top = load(s);
        for (int64_t k = W; k < n; k += W) top = max(top, load(s + k));
        const float before = r.part.peak[i], peak = highest(top) > before ? highest(top) : before;
        decay[i] = 1;
        if (peak == -INFINITY) {
            memset(s, 0, sizeof(float) * TOKENS);
            continue;
        }
        vf total = zero();
        const vf high = set1(peak), factor = set1(log2e);
        for (int64_t k = 0; k < n; k += W) {
            const vf w = exp2_(mul(sub(load(s + k), high), factor));
            total = add(total, w);
            store(s + k, w);
        }
        if (peak > before && before != -INFINITY) {
            decay[i] = expf(before - peak);
            changed = true;
        }
        r.part.peak[i] = peak;
        r.part.total[i] = r.part.total[i] * decay[i] + sum(total);
    }
    return changed;
}

// Decodes what lies in V's place into panels; returns whether it is packed.
static bool decode_values(const Rows &r, int64_t t, int64_t begin, int64_t end) {
    return values({r.a, r.a.v, r.b, r.h, t, begin, end, r.room.value, TOKENS * PANEL});
}

static void add_values(const Rows &r, int64_t t, int64_t begin, int64_t end, const float *decay, bool changed) {
    const int64_t width = r.job.width, panel = TOKENS * PANEL;
    if (changed)
        for (int64_t i = 0; i < r.count; i++)
            if (decay[i] != 1) {
                scale_by(r.part.exact + i * width, decay[i], width);
                scale_by(r.part.packed + i * width, decay[i], width);
            }
    const bool packed = decode_values(r, t, begin, end);
    const int64_t lead = begin - t;
    product({r.count, end - begin, r.room.score + lead, TOKENS, r.room.value + lead * PANEL,
             packed ? r.part.packed : r.part.exact, width, true},
            (r.a.v.dim + W - 1) / W, panel);
}

// The same over the keys' panels: sum[channel][row].
static void add_latents(const Rows &r, bool packed, int64_t lead, int64_t n, float *decay, bool changed) {
    const int64_t rows = whole(r.count, W), at_once = r.job.at_once, dim = r.a.k.dim;
    for (int64_t i = r.count; i < rows; i++) {
        memset(r.room.score + i * TOKENS, 0, sizeof(float) * TOKENS);
        decay[i] = 1;
    }
    if (changed)
        for (float *sum : r.room.sum)
            for (int64_t c = 0; c < dim; c++)
                for (int64_t i = 0; i < rows; i += W)
                    store(sum + c * at_once + i, mul(load(sum + c * at_once + i), load(decay + i)));
    for (int64_t i = 0; i < rows; i += W)
        for (int64_t k = 0; k < n; k += W)
            transpose_block(r.room.score + i * TOKENS + k, TOKENS,
                            r.room.turned + i / PANEL * TOKENS * PANEL + k * PANEL + i % PANEL, PANEL);
    for (int64_t k = 0; k < n; k += PANEL) {
        const int64_t begin = from(lead, k), end = upto(k + PANEL, n);
        if (begin >= end) continue;
        product({dim, end - begin, r.room.key + k * dim + begin - k, PANEL, r.room.turned + begin * PANEL,
                 r.room.sum[packed], at_once, true},
                rows / W, TOKENS * PANEL);
    }
}

// Tokens from `begin` to `end`, all packed or all exact, in K and in V.
static void block(const Rows &r, int64_t begin, int64_t end) {
    const kvp_attend_args &a = r.a;
    const int64_t t = begin / TILE * TILE, lead = begin - t, n = end - t;
    bool packed = keys({a, a.k, r.b, r.h, t, begin, end, r.room.key, a.k.dim * PANEL});
    scores(r, packed ? r.room.rotated : r.room.q, r.room.key, a.k.dim, a.k.dim, n, false);
    if (r.job.latent) {
        const bool packed_rope = decode_values(r, t, begin, end);
        const int64_t rope = whole(a.k.dim, TILE), height = whole(a.v.dim, W);
        for (int64_t k = 0; k < n; k += W)
            for (int64_t c = 0; c < height; c += W)
                transpose_block(r.room.value + c / PANEL * TOKENS * PANEL + k * PANEL + c % PANEL, PANEL,
                                r.room.rope + k / PANEL * height * PANEL + c * PANEL + k % PANEL, PANEL);
        scores(r, (packed_rope ? r.room.rotated : r.room.q) + rope, r.room.rope, a.v.dim, height, n, true);
    }
    alignas(64) float decay[MOST_AT_ONCE];
    const bool changed = weigh(r, t, lead, n, decay);
    if (r.job.latent) add_latents(r, packed, lead, n, decay, changed);
    else add_values(r, t, begin, end, decay, changed);
}

// Merges what the splits of a task's rows have gathered, and writes the outputs.
static void merge(const RowsJob &job, int64_t pair, int64_t first, int64_t count, float *parts) {
    const kvp_attend_args &a = *job.args;
    const kvp_stream &x = job.values();
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = first + i, b = pair / a.heads, h = pair % a.heads * a.groups + row / a.queries;
        float peak = a.sink_logits ? a.sink_logits[h] : -INFINITY;
        for (int64_t s = 0; s < job.splits; s++) peak = fmaxf(peak, Part(job, parts + s * job.part_size()).peak[i]);
        float *out = a.out + ((b * a.heads * a.groups + h) * a.queries + row % a.queries) * x.dim;
        if (peak == -INFINITY) {
            memset(out, 0, sizeof(float) * x.dim);
            continue;
        }
        float total = a.sink_logits ? expf(a.sink_logits[h] - peak) : 0;
        alignas(64) float exact[MOST_DIM], packed[MOST_DIM];
        memset(exact, 0, sizeof(float) * job.width);
        memset(packed, 0, sizeof(float) * job.width);
        for (int64_t s = 0; s < job.splits; s++) {
            const Part part(job, parts + s * job.part_size());
            const float decay = expf(part.peak[i] - peak);
            total += part.total[i] * decay;
            add_scaled(exact, part.exact + i * job.width, decay, job.width);
            add_scaled(packed, part.packed + i * job.width, decay, job.width);
        }
        if (x.signs) rotate_back(packed, x.signs, x.dim);
        const float share = 1.0f / total;
        for (int c = 0; c < x.dim; c++) out[c] = (exact[c] + packed[c]) * share;
    }
}

static void rows_finish(const RowsJob &job, int64_t index) {
    const int64_t first = index % job.parts * job.at_once;
    merge(job, index / job.parts, first, upto(job.at_once, job.rows - first), job.partial + index * job.splits * job.part_size());
}

static void rows_task(const RowsJob &job, int64_t index) {
    const kvp_attend_args &a = *job.args;
    float *memory = job.memory(Room(job, nullptr).size);
    if (!memory) {
        __atomic_store_n(job.failed, true, __ATOMIC_RELAXED);
        return;
    }
    const Room room(job, memory);
    const int64_t split = index % job.splits, task = index / job.splits, pair = task / job.parts;
    const int64_t first = task % job.parts * job.at_once;
    Rows r{job, a, room, Part(job, job.splits == 1 ? room.part : job.partial + index * job.part_size()),
           pair / a.heads, pair % a.heads, first, upto(job.at_once, job.rows - first)};
    memset(r.part.exact, 0, sizeof(float) * job.part_size());
    for (int64_t i = 0; i < job.at_once; i++) r.part.peak[i] = -INFINITY;
    if (job.latent)
        for (float *sum : room.sum) memset(sum, 0, sizeof(float) * job.width * job.at_once);
    read_queries(r);

    // Tokens that any of these rows sees.
    const int64_t last = first + r.count - 1;
    const bool one_head = first / a.queries == last / a.queries;
    int64_t t = job.begin + split * job.chunk, end = upto(t + job.chunk, job.end);
    if (a.window) t = from(t, a.first + (one_head ? first % a.queries : 0) - a.window + 1);
    if (a.padding) t = from(t, a.padding[r.b]);
    if (a.causal && one_head) end = upto(end, a.first + last % a.queries + 1);
    while (t < end) {
        int64_t next = upto((t / TOKENS + 1) * TOKENS, end);
        if (t < a.k.exact_from) next = upto(next, a.k.exact_from);
        if (t < a.v.exact_from) next = upto(next, a.v.exact_from);
        block(r, t, next);
        t = next;
    }
    if (job.latent)
        for (int64_t i = 0; i < r.count; i += W)
            for (int64_t c = 0; c < job.width; c += W) {
                transpose_block(room.sum[0] + c * job.at_once + i, job.at_once, r.part.exact + i * job.width + c, job.width);
                transpose_block(room.sum[1] + c * job.at_once + i, job.at_once, r.part.packed + i * job.width + c, job.width);
            }
    if (job.splits == 1) merge(job, pair, first, r.count, room.part);
}

void fill_rows(Table &table) {
    table.rows_task = rows_task;
    table.rows_finish = rows_finish;
}
} // namespace KVP_NS
