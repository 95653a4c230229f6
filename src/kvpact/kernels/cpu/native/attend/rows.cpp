// Attention with many query rows per KV head: a block of tokens is decoded once into fp32 panels,
// and two matrix products do the rest. Over latents (kernels/torch/latent.py) the values are the keys'
// panels, so the second product is the other way round: channels times tokens, rows side by side.
// The torch bodies are torch/attend.py and torch/latent.py; ../README.md has the loops.
#include "attend/rows.h"
#include "attend/offset.h"
#include "attend/rules.h"
#include "attend/tiles.h"
#include "scratch.h"
#include "table.h"

namespace KVP_NS {

// Rows that a run has at least: a few strips of the product.
constexpr int64_t RUN_ROWS = 24;
constexpr int64_t MOST_RUN = 48; // and at most: its scores stay in the first-level cache
static_assert(RUN_ROWS % STRIP<VECTORS> == 0, "a run is whole strips");

// The memory of a task, cut up.
struct Room {
    float *q, *rotated; // [rows][q_width]
    float *factors;     // [rows][2 * pairs] of the offset that keys are stored without
    float *waves;       // panels [2 * pairs][PANEL] of TOKENS columns: cosines and sines
    float *key, *rope;  // panels [channels][PANEL] of TOKENS columns; of the rotated keys
    float *value;       // panels [TOKENS][PANEL] of the columns of what lies in V's place
    float *score;       // [rows of a run][TOKENS], then weights
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
        factors = take(job.at_once * 2 * a.k.offset.pairs);
        waves = take(TOKENS * 2 * a.k.offset.pairs);
        key = take(TOKENS * (int64_t)a.k.dim);
        rope = take(job.latent ? TOKENS * whole(a.v.dim, W) : 0);
        value = take(TOKENS * whole(a.v.dim, PANEL));
        score = take((job.latent ? job.at_once : MOST_RUN) * TOKENS);
        turned = take(job.latent ? TOKENS * whole(job.at_once, PANEL) : 0);
        for (float *&s : sum) s = take(job.latent ? job.width * job.at_once : 0);
        part = take(job.splits == 1 ? job.part_size() : 0);
    }
};

// The rows of a task and where it is. Rows are queries times query heads, all heads of a query
// together: so they stand in the order of their positions.
struct Rows {
    const RowsJob &job;
    const kvp_attend_args &a;
    const Room &room;
    Part part;
    int64_t b, h, first, count;
    bool gathered[2]; // whether the sums of exact, of packed values hold any
    TrellisScratch *trellis[2] = {}; // of K, of V
    INLINE int64_t query(int64_t i) const { return (uint32_t)(first + i) / (uint32_t)a.groups; }
    INLINE int64_t head(int64_t i) const { return h * a.groups + (uint32_t)(first + i) % (uint32_t)a.groups; }
};

static void read_queries(const Rows &r) {
    const kvp_attend_args &a = r.a;
    const int size = a.q_dtype == KVP_F32 ? 4 : 2;
    const int64_t width = r.job.q_width, rope = whole(a.k.dim, TILE);
    const bool rotates = a.k.exact_from > r.job.begin || (r.job.latent && a.v.exact_from > r.job.begin);
    for (int64_t i = 0; i < r.count; i++) {
        float *q = r.room.q + i * width, *rotated = r.room.rotated + i * width;
        const char *from = a.q + r.b * a.q_row + r.head(i) * a.q_head + r.query(i) * a.q_token;
        to_floats(q, from, a.q_dtype, a.k.dim);
        if (r.job.latent) to_floats(q + rope, from + (int64_t)a.k.dim * size, a.q_dtype, a.v.dim);
        scale_by(q, a.scale, width);
        if (!rotates) continue;
        for (int64_t k = 0; k < a.k.offset.pairs; k++) {
            float *factors = r.room.factors + 2 * (i * a.k.offset.pairs + k);
            offset_factors(a.k.offset, r.h, k, q, factors, factors + 1);
        }
        memcpy(rotated, q, sizeof(float) * width);
        if (a.k.signs) rotate(rotated, a.k.signs, a.k.dim);
        if (r.job.latent && a.v.signs) rotate(rotated + rope, a.v.signs, a.v.dim);
    }
}

// Consecutive rows, and the columns of a block that any of them sees.
struct Run {
    int64_t first, count, from, to;
};

// Splits a task's rows where causality or the window hides columns of a block from some of them.
// Rows stand in the order of their positions, so each run has the columns of its first and last row.
static int find_runs(const Rows &r, int64_t t, int64_t lead, int64_t n, Run *runs) {
    const kvp_attend_args &a = r.a;
    if (r.job.latent) {
        runs[0] = {0, r.count, lead, n};
        return 1;
    }
    int count = 0;
    for (int64_t i = 0; i < r.count; i += RUN_ROWS) {
        const int64_t last = upto(i + RUN_ROWS, r.count) - 1;
        int64_t low = lead, high = n;
        if (a.window) low = from(low, a.first + r.query(i) - a.window + 1 - t);
        if (a.causal) high = upto(high, a.first + r.query(last) + 1 - t);
        if (low >= high) continue;
        Run *before = count ? runs + count - 1 : nullptr;
        const bool fits = before && before->first + before->count == i && last + 1 - before->first <= MOST_RUN;
        if (fits && before->from == low && before->to == high) before->count = last + 1 - before->first;
        else runs[count++] = {i, last + 1 - i, low, high};
    }
    return count;
}

// score (+)= q k for the columns of a run; the panels have `height` rows.
static void scores(const Rows &r, const Run &run, const float *q, const float *panels, int64_t dim, int64_t height, bool add) {
    const int64_t width = r.job.q_width, column = run.from / PANEL * PANEL;
    product({run.count, dim, q + run.first * width, width, panels + column * height,
             r.room.score + column, TOKENS, add},
            (run.to - column + W - 1) / W, height * PANEL);
}

// Adds what the keys of a packed block are stored without: the product of the rows' factors with the
// waves. Sink tokens are whole: their columns are zero.
static void read_waves(const Rows &r, int64_t t, int64_t n) {
    const kvp_stream &k = r.a.k;
    const int64_t height = 2 * k.offset.pairs;
    for (int64_t pair = 0; pair < k.offset.pairs; pair++) {
        const Waves waves(k.offset, pair, r.b, t);
        for (int64_t i = 0; i < n; i += W) {
            float *to = r.room.waves + i / PANEL * height * PANEL + 2 * pair * PANEL + i % PANEL;
            store(to, waves.cosine(i));
            store(to + PANEL, waves.sine(i));
        }
    }
    for (int64_t s = 0; s < k.n_sinks; s++) {
        const int64_t i = k.sink_positions[r.b * k.n_sinks + s] - t;
        if (i < 0 || i >= n) continue;
        float *column = r.room.waves + i / PANEL * height * PANEL + i % PANEL;
        for (int64_t row = 0; row < height; row++) column[row * PANEL] = 0;
    }
}

static void add_offset(const Rows &r, const Run &run) {
    const int64_t height = 2 * r.a.k.offset.pairs, column = run.from / PANEL * PANEL;
    product({run.count, height, r.room.factors + run.first * height, height, r.room.waves + column * height,
             r.room.score + column, TOKENS, true},
            (run.to - column + W - 1) / W, height * PANEL);
}

// The scores of a run become weights, in units of e to the row's highest score. The sums gathered
// so far are multiplied with what that makes of them, which `decay` notes for latents' sums.
static bool weigh(const Rows &r, const Run &run, int64_t t, float *decay) {
    const kvp_attend_args &a = r.a;
    const int64_t start = run.from / W * W, stop = whole(run.to, W), width = r.job.width;
    const int64_t padding = a.padding ? a.padding[r.b] - t : 0;
    bool changed = false;
    for (int64_t i = run.first; i < run.first + run.count; i++) {
        float *s = r.room.score + (i - run.first) * TOKENS;
        const int64_t at = a.first + r.query(i) - t;
        int64_t low = from(run.from, padding), high = run.to;
        if (a.window) low = from(low, at - a.window + 1);
        if (a.causal) high = upto(high, at + 1);
        cap_and_mask(a, r.b, r.head(i), r.query(i), s, t, low, high);
        for (int64_t k = start; k < upto(low, stop); k++) s[k] = -INFINITY;
        for (int64_t k = from(high, start); k < stop; k++) s[k] = -INFINITY;
        vf top = load(s + start);
        for (int64_t k = start + W; k < stop; k += W) top = max(top, load(s + k));
        const float before = r.part.peak[i], now = highest(top), peak = now > before ? now : before;
        decay[i] = 1;
        if (peak == -INFINITY) {
            memset(s + start, 0, sizeof(float) * (stop - start));
            continue;
        }
        vf total = zero();
        const vf level = set1(peak), factor = set1(LOG2E);
        for (int64_t k = start; k < stop; k += W) {
            const vf w = exp2_(mul(sub(load(s + k), level), factor));
            total = add(total, w);
            store(s + k, w);
        }
        if (peak > before && before != -INFINITY) {
            decay[i] = expf(before - peak);
            changed = true;
            if (!r.job.latent) {
                if (r.gathered[0]) scale_by(r.part.exact + i * width, decay[i], width);
                if (r.gathered[1]) scale_by(r.part.packed + i * width, decay[i], width);
            }
        }
        r.part.peak[i] = peak;
        r.part.total[i] = r.part.total[i] * decay[i] + sum(total);
    }
    return changed;
}

// Decodes what lies in V's place into panels; returns whether it is packed.
static bool decode_values(const Rows &r, int64_t t, int64_t begin, int64_t end) {
    return values({r.a, r.a.v, r.b, r.h, t, begin, end, r.room.value, TOKENS * PANEL, r.trellis[1]});
}

// sum += weights v for the columns of a run.
static void add_values(const Rows &r, const Run &run, bool packed) {
    const int64_t width = r.job.width;
    product({run.count, run.to - run.from, r.room.score + run.from, TOKENS,
             r.room.value + run.from * PANEL, (packed ? r.part.packed : r.part.exact) + run.first * width, width, true},
            (r.a.v.dim + W - 1) / W, TOKENS * PANEL);
}

// The same over the keys' panels, for all rows: sum[channel][row].
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
static void block(Rows &r, int64_t begin, int64_t end) {
    const kvp_attend_args &a = r.a;
    const int64_t t = begin / TILE * TILE, lead = begin - t, n = end - t;
    Run runs[MOST_AT_ONCE / RUN_ROWS + 1];
    const int count = find_runs(r, t, lead, n, runs);
    if (!count) return;
    const bool packed = keys({a, a.k, r.b, r.h, t, begin, end, r.room.key, a.k.dim * PANEL, r.trellis[0]});
    const bool packed_values = decode_values(r, t, begin, end);
    const float *q = packed ? r.room.rotated : r.room.q;
    r.gathered[packed_values] = true;
    alignas(64) float decay[MOST_AT_ONCE];
    const bool offset = packed && a.k.offset.pairs;
    if (offset) read_waves(r, t, n);
    if (!r.job.latent) {
        for (int i = 0; i < count; i++) {
            scores(r, runs[i], q, r.room.key, a.k.dim, a.k.dim, false);
            if (offset) add_offset(r, runs[i]);
            weigh(r, runs[i], t, decay);
            add_values(r, runs[i], packed_values);
        }
    } else {
        scores(r, runs[0], q, r.room.key, a.k.dim, a.k.dim, false);
        const int64_t rope = whole(a.k.dim, TILE), height = whole(a.v.dim, W);
        for (int64_t k = 0; k < n; k += W)
            for (int64_t c = 0; c < height; c += W)
                transpose_block(r.room.value + c / PANEL * TOKENS * PANEL + k * PANEL + c % PANEL, PANEL,
                                r.room.rope + k / PANEL * height * PANEL + c * PANEL + k % PANEL, PANEL);
        scores(r, runs[0], (packed_values ? r.room.rotated : r.room.q) + rope, r.room.rope, a.v.dim, height, true);
        const bool changed = weigh(r, runs[0], t, decay);
        add_latents(r, packed, lead, n, decay, changed);
    }
}

// Merges what the splits of a task's rows have gathered, and writes the outputs.
static void merge(const Rows &r, float *parts) {
    const RowsJob &job = r.job;
    const kvp_attend_args &a = r.a;
    const kvp_stream &x = job.values();
    const bool any_packed = x.exact_from > job.begin;
    for (int64_t i = 0; i < r.count; i++) {
        const int64_t h = r.head(i);
        const float sink = a.sink_logits ? a.sink_logits[h] : -INFINITY;
        float peak = sink;
        for (int64_t s = 0; s < job.splits; s++) peak = fmaxf(peak, Part(job, parts + s * job.part_size()).peak[i]);
        float *out = a.out + output_row(a, r.b, h, r.query(i)) * x.dim;
        if (peak == -INFINITY) {
            memset(out, 0, sizeof(float) * x.dim);
            continue;
        }
        float total = expf(sink - peak);
        for (int64_t s = 0; s < job.splits; s++) {
            const Part part(job, parts + s * job.part_size());
            total += part.total[i] * expf(part.peak[i] - peak);
        }
        alignas(64) float exact[MOST_DIM], packed[MOST_DIM];
        memset(exact, 0, sizeof(float) * job.width);
        if (any_packed) memset(packed, 0, sizeof(float) * job.width);
        for (int64_t s = 0; s < job.splits; s++) {
            const Part part(job, parts + s * job.part_size());
            const float share = expf(part.peak[i] - peak) / total;
            add_scaled(exact, part.exact + i * job.width, share, job.width);
            if (any_packed) add_scaled(packed, part.packed + i * job.width, share, job.width);
        }
        if (any_packed) {
            if (x.signs) rotate_back(packed, x.signs, x.dim);
            add_scaled(exact, packed, 1, job.width);
        }
        memcpy(out, exact, sizeof(float) * x.dim);
    }
}

// Tasks with the last queries come first: with causality they take the longest.
static Rows rows_of(const RowsJob &job, int64_t task, const Room &room, float *part) {
    const int64_t pair = task / job.parts, first = (job.parts - 1 - task % job.parts) * job.at_once;
    return {job, *job.args, room, Part(job, part), pair / job.args->heads, pair % job.args->heads,
            first, upto(job.at_once, job.rows - first), {false, false}};
}

static void rows_finish(const RowsJob &job, int64_t index) {
    float *parts = job.partial + index * job.splits * job.part_size();
    merge(rows_of(job, index, Room(job, nullptr), parts), parts);
}

static void rows_task(const RowsJob &job, int64_t index) {
    const kvp_attend_args &a = *job.args;
    float *memory = job.memory(Room(job, nullptr).size);
    if (!memory) {
        __atomic_store_n(job.failed, true, __ATOMIC_RELAXED);
        return;
    }
    const Room room(job, memory);
    const int64_t split = index % job.splits;
    Rows r = rows_of(job, index / job.splits, room, job.splits == 1 ? room.part : job.partial + index * job.part_size());
    if (a.k.kind == KVP_TRELLIS_CODES || a.v.kind == KVP_TRELLIS_CODES) {
        TrellisScratch *own = own_scratch<TrellisScratch>();
        if (!own) {
            __atomic_store_n(job.failed, true, __ATOMIC_RELAXED);
            return;
        }
        if (a.k.kind == KVP_TRELLIS_CODES) r.trellis[0] = own;
        if (a.v.kind == KVP_TRELLIS_CODES) r.trellis[1] = own;
    }
    memset(r.part.exact, 0, sizeof(float) * job.part_size());
    for (int64_t i = 0; i < job.at_once; i++) r.part.peak[i] = -INFINITY;
    if (job.latent)
        for (float *sum : room.sum) memset(sum, 0, sizeof(float) * job.width * job.at_once);
    read_queries(r);

    // Tokens that any of these rows sees.
    int64_t t = job.begin + split * job.chunk, end = upto(t + job.chunk, job.end);
    if (a.window) t = from(t, a.first + r.query(0) - a.window + 1);
    if (a.padding) t = from(t, a.padding[r.b]);
    if (a.causal) end = upto(end, a.first + r.query(r.count - 1) + 1);
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
    if (job.splits == 1) merge(r, room.part);
}

void fill_rows(Table &table) {
    table.rows_task = rows_task;
    table.rows_finish = rows_finish;
}
} // namespace KVP_NS
