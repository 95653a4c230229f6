// Attention over ggml's KV cache: a tile of tokens of a KV head is decoded once for all of its query rows.
#include "ggml/digits.h"

#include "attend/product.h"
#include "scratch.h"

namespace KVP_NS {
namespace {

constexpr float LOG2_E = 1.44269504f;
constexpr int64_t FEW = 12; // rows whose weights become whole numbers rather than that values become fp32
constexpr uint16_t HIDDEN = 0xfc00; // -inf in the mask
alignas(64) const char nothing[MOST_WIDTH * 4] = {};

// Where the scratch memory of a thread goes; counts when there is none.
struct Room {
    char *base;
    size_t used = 0;
    template <class T> T *take(int64_t count) {
        T *p = base ? (T *)(base + used) : nullptr;
        used += ((size_t)count * sizeof(T) + 63) / 64 * 64;
        return p;
    }
};

// A task: the scratch memory that its rows need.
struct Task {
    const Job &job;
    const bool coded;
    float *query, *score, *keys, *values;
#if defined(KVP_AVX512)
    CodePanel panel;
    CodedRows codes;
#endif
    const char *next_k = nullptr, *next_v = nullptr; // what a head prefetches of the next tile
    int64_t share_k, share_v;

    static bool codes_of(const Job &job) {
#if defined(KVP_AVX512)
        return !is_number(job.k->type);
#else
        (void)job;
        return false;
#endif
    }
    Task(const Job &from, int64_t heads, int64_t rows, Room &room) : job(from), coded(codes_of(from)) {
        const int64_t all = heads * rows, blocks = job.k_dim / BLOCK;
        query = room.take<float>(coded ? 0 : all * job.k_dim);
        keys = room.take<float>(coded ? 0 : TOKENS * padded(job.k_dim));
        score = room.take<float>(rows * TOKENS);
        values = room.take<float>(TOKENS * padded(job.v_dim));
#if defined(KVP_AVX512)
        panel.words = room.take<vi>(coded ? TOKENS / W * blocks * WORDS : 0);
        panel.unit = room.take<float>(coded ? TOKENS * blocks : 0);
        panel.least = room.take<float>(coded && has_least(job.k->type) ? TOKENS * blocks : 0);
        if (!has_least(job.k->type)) panel.least = nullptr;
        codes.code = room.take<int8_t>(coded ? all * job.k_dim : 0);
        codes.unit = room.take<float>(coded ? all * blocks : 0);
        codes.sum = room.take<float>(coded ? all * blocks : 0);
        codes.middle = room.take<int32_t>(coded ? all * blocks : 0);
#else
        (void)blocks;
#endif
        share_k = TOKENS * (int64_t)job.k->nb[1] / job.heads;
        share_v = TOKENS * (int64_t)job.v->nb[1] / job.heads;
    }

    int64_t head_of(const Rows &rows, int64_t r) const { return rows.head * job.groups + (rows.first + r) % job.groups; }

    // Queries of the rows, from row `at` of this task on.
    void prepare(const Rows &rows, int64_t at) {
        const float scale = job.softcap != 0 ? job.scale : job.scale * LOG2_E;
        for (int64_t r = 0; r < rows.count; r++) {
            const float *q = job.query(rows.stream, head_of(rows, r), (rows.first + r) / job.groups);
#if defined(KVP_AVX512)
            if (coded) {
                code_row(q, job.k_dim, scale, zero_code(job.k->type), at + r, codes);
                continue;
            }
#endif
            float *to = query + (at + r) * job.k_dim;
            for (int64_t c = 0; c < job.k_dim; c++) to[c] = q[c] * scale;
        }
    }

    static void fetch(const char *p, int64_t from, int64_t to) {
        if (p)
            for (int64_t i = from / 64 * 64; i < to; i += 64) prefetch(p + i);
    }

    // Panels of keys: [panel of tokens][channel][PANEL].
    template <class Read> void read_keys(const char *const *token, int64_t n, const Read &read) {
        for (int64_t t = 0; t < n; t += W) {
            fetch(next_k, share_k * t / TOKENS, share_k * (t + W) / TOKENS);
            float *to = keys + t / PANEL * job.k_dim * PANEL + t % PANEL;
            for (int64_t c = 0; c < job.k_dim; c += BLOCK) {
                alignas(64) float lines[W * BLOCK];
                for (int i = 0; i < W; i++) {
                    vf x[VECTORS_OF_BLOCK];
                    read.at(token[t + i], c, job.k_dim, x);
                    for (int v = 0; v < VECTORS_OF_BLOCK; v++) store(lines + i * BLOCK + v * W, x[v]);
                }
                for (int64_t v = 0; v < BLOCK && c + v < job.k_dim; v += W) {
                    vf x[W];
                    for (int i = 0; i < W; i++) x[i] = load(lines + i * BLOCK + v);
                    transpose(x);
                    for (int i = 0; i < W && c + v + i < job.k_dim; i++) store(to + (c + v + i) * PANEL, x[i]);
                }
            }
        }
    }
    // Panels of values: [panel of channels][token][PANEL].
    template <class Read> void read_values(const char *const *token, int64_t n, const Read &read) {
        for (int64_t t = 0; t < n; t++) {
            fetch(next_v, share_v * t / TOKENS, share_v * (t + 1) / TOKENS);
            for (int64_t c = 0; c < job.v_dim; c += BLOCK) {
                vf x[VECTORS_OF_BLOCK];
                read.at(token[t], c, job.v_dim, x);
                for (int v = 0; v < VECTORS_OF_BLOCK; v++) {
                    const int64_t channel = c + v * W;
                    store(values + (channel / PANEL * TOKENS + t) * PANEL + channel % PANEL, x[v]);
                }
            }
        }
    }

    // Which rows see any of the tokens, [low, high), and which tokens any row sees.
    void visible(const Rows &rows, int64_t from, int64_t n, int64_t &low, int64_t &high, bool *some) const {
        low = 0, high = rows.count;
        if (!job.mask) {
            for (int64_t t = 0; t < n; t++) some[t] = true;
            return;
        }
        uint16_t all[TOKENS];
        for (int64_t t = 0; t < TOKENS; t++) all[t] = 0;
        bool first = true;
        for (int64_t r = 0; r < rows.count;) {
            const uint16_t *seen = job.seen(rows.stream, head_of(rows, r), (rows.first + r) / job.groups) + from;
            uint16_t any = 0;
            for (int64_t t = 0; t < n; t++) {
                const uint16_t shown = (uint16_t)(seen[t] ^ HIDDEN);
                all[t] |= shown;
                any |= shown;
            }
            const int64_t next = job.mask->ne[2] == 1 ? r + job.groups - (rows.first + r) % job.groups : r + 1;
            if (any) {
                if (first) low = r;
                first = false;
                high = next < rows.count ? next : rows.count;
            }
            r = next;
        }
        if (first) high = low;
        for (int64_t t = 0; t < n; t++) some[t] = all[t] != 0;
    }

    // Softcap, mask and the online softmax of a row: weights replace scores. False: it sees nothing here.
    bool weigh(const Rows &rows, int64_t r, int64_t from, int64_t n, float *s, const Sums &sums) const {
        const int64_t h = head_of(rows, r);
        const vf none = set1(-INFINITY), one = set1(1), cap = set1(job.softcap * LOG2_E), slope = set1(job.slope(h) * LOG2_E);
        const uint16_t *seen = job.mask ? job.seen(rows.stream, h, (rows.first + r) / job.groups) + from : nullptr;
        uint16_t own[TOKENS];
        if (n < TOKENS) {
            for (int64_t t = 0; t < TOKENS; t++) own[t] = t >= n ? HIDDEN : seen ? seen[t] : 0;
            seen = own;
        }
        vf top = none;
        for (int64_t t = 0; t < TOKENS; t += W) {
            vf x = load(s + t);
            if (job.softcap != 0) { // tanh(|x|) = (1 - e) / (1 + e)
                const vf e = exp2_(mul(magnitude(x), set1(-2 * LOG2_E))), y = (one - e) / (one + e);
                x = mul(cap, (vf)((Ints)y | ((Ints)x & (int32_t)0x80000000)));
            }
            if (seen) {
                const vf m = load_half(seen + t);
                x = pick_lanes((Ints)(m == none), none, fma(m, slope, x));
            }
            store(s + t, x);
            top = max(top, x);
        }
        const float before = sums.peak[r], highest_here = highest(top), peak = before > highest_here ? before : highest_here;
        if (peak == -INFINITY) {
            memset(s, 0, TOKENS * sizeof(float));
            return false;
        }
        vf total = zero();
        for (int64_t t = 0; t < TOKENS; t += W) {
            const vf x = exp2_(sub(load(s + t), set1(peak)));
            store(s + t, x);
            total = add(total, x);
        }
        if (peak > before) {
            const float decay = before == -INFINITY ? 0 : exp2f(before - peak);
            float *acc = sums.acc + r * padded(job.v_dim);
            sums.total[r] *= decay;
            for (int64_t c = 0; c < job.v_dim; c += W) store(acc + c, mul(load(acc + c), set1(decay)));
            sums.peak[r] = peak;
        }
        sums.total[r] += sum(total);
        return true;
    }

    // Tokens [from, from + n) for the rows, whose queries begin at row `at` of this task.
    void tile(const Rows &rows, int64_t at, int64_t from, int64_t n, const Sums &sums) {
        int64_t low, high;
        bool some[TOKENS] = {};
        visible(rows, from, n, low, high, some);
        if (low == high) return;
        const char *token[TOKENS];
        const auto point = [&](const char *first, size_t step) {
            for (int64_t t = 0; t < TOKENS; t++) token[t] = some[t] ? first + t * (int64_t)step : nothing;
        };
        point(job.key(rows.stream, rows.head, from), job.k->nb[1]);
        const int64_t groups = (n + W - 1) / W, count = high - low;
        if (coded) {
#if defined(KVP_AVX512)
            const int64_t blocks = job.k_dim / BLOCK;
            with_blocks(job.k->type, [&](auto read) {
                if constexpr (!read.NUMBERS)
                    for (int64_t g = 0; g < groups; g++) {
                        fetch(next_k, share_k * g * W / TOKENS, share_k * (g + 1) * W / TOKENS);
                        code_tokens<read.KIND>(token + g * W, blocks, g, panel);
                    }
            });
            coded_rows(codes, at + low, count, blocks, groups, panel, score);
#endif
        } else {
            with_blocks(job.k->type, [&](auto read) { read_keys(token, groups * W, read); });
            product({count, job.k_dim, query + (at + low) * job.k_dim, job.k_dim, keys, score, TOKENS, false}, groups, job.k_dim * PANEL);
        }
        bool any = false;
        for (int64_t r = 0; r < count; r++) any |= weigh(rows, low + r, from, n, score + r * TOKENS, sums);
        if (!any) return;
        point(job.value(rows.stream, rows.head, from), job.v->nb[1]);
        const int64_t row = padded(job.v_dim);
#if defined(KVP_AVX512)
        if (!is_number(job.v->type) && job.k->type != ggml_abi::F32 && count <= FEW) {
            fetch(next_v, 0, share_v);
            return with_blocks(job.v->type, [&](auto read) {
                if constexpr (!read.NUMBERS) add_values<read.KIND>(token, job.v_dim / BLOCK, score, count, sums.acc + low * row, row);
            });
        }
#endif
        with_blocks(job.v->type, [&](auto read) { read_values(token, n, read); });
        product({count, n, score, TOKENS, values, sums.acc + low * row, row, true}, (job.v_dim + W - 1) / W, TOKENS * PANEL);
    }
};

void clear(const Job &job, const Sums &sums, int64_t rows) {
    for (int64_t r = 0; r < rows; r++) sums.peak[r] = -INFINITY, sums.total[r] = 0;
    memset(sums.acc, 0, sizeof(float) * (size_t)(rows * padded(job.v_dim)));
}

void finish(const Job &job, int64_t stream, int64_t head, int64_t row, float peak, float total, const float *acc) {
    const int64_t h = head * job.groups + row % job.groups;
    float decay = 1;
    if (job.sinks) {
        const float sink = ((const float *)job.sinks->data)[h] * LOG2_E, top = sink > peak ? sink : peak;
        decay = exp2f(peak - top);
        total = total * decay + exp2f(sink - top);
    }
    const float unit = total > 0 ? decay / total : 0;
    float *out = job.result(stream, h, row / job.groups);
    for (int64_t c = 0; c < job.v_dim; c++) out[c] = acc[c] * unit;
}

// A task in the scratch memory of this thread, with sums of `own` rows after it.
template <class Work> bool with_task(const Job &job, int64_t heads, int64_t rows, int64_t own, Work &&work) {
    static thread_local Scratch scratch;
    const auto make = [&](Room &room, Sums &sums) {
        Task task(job, heads, rows, room);
        sums = {room.take<float>(own), room.take<float>(own), room.take<float>(own * padded(job.v_dim))};
        return task;
    };
    Room size{nullptr}, room{nullptr};
    Sums sums;
    make(size, sums);
    room.base = (char *)scratch.get(size.used);
    if (!room.base) return false;
    Task task = make(room, sums);
    work(task, sums);
    return true;
}

} // namespace

static bool part(const Job &job, int64_t stream, int64_t from, int64_t to, Sums sums) {
    const int64_t rows = job.queries * job.groups, width = padded(job.v_dim);
    return with_task(job, job.heads, rows, 0, [&](Task &task, const Sums &) {
        for (int64_t h = 0; h < job.heads; h++) task.prepare({stream, h, 0, rows}, h * rows);
        clear(job, sums, job.heads * rows);
        // Prefetched where all heads of a token stand together.
        const bool near = job.k->nb[2] < job.k->nb[1] && job.v->nb[2] < job.v->nb[1];
        for (int64_t t = from; t < to; t += TOKENS)
            for (int64_t h = 0; h < job.heads; h++) {
                const bool next = near && t + 2 * TOKENS <= to;
                task.next_k = next ? job.key(stream, 0, t + TOKENS) + h * task.share_k : nullptr;
                task.next_v = next ? job.value(stream, 0, t + TOKENS) + h * task.share_v : nullptr;
                task.tile({stream, h, 0, rows}, h * rows, t, to - t < TOKENS ? to - t : TOKENS,
                          {sums.peak + h * rows, sums.total + h * rows, sums.acc + h * rows * width});
            }
    });
}

static bool all_tokens(const Job &job, Rows rows) {
    return with_task(job, 1, rows.count, rows.count, [&](Task &task, const Sums &sums) {
        task.prepare(rows, 0);
        clear(job, sums, rows.count);
        for (int64_t t = 0; t < job.tokens; t += TOKENS) task.tile(rows, 0, t, job.tokens - t < TOKENS ? job.tokens - t : TOKENS, sums);
        for (int64_t r = 0; r < rows.count; r++)
            finish(job, rows.stream, rows.head, rows.first + r, sums.peak[r], sums.total[r], sums.acc + r * padded(job.v_dim));
    });
}

static void merge(const Job &job, int64_t stream, int64_t head, int64_t row, int64_t parts, int64_t apart, Sums sums) {
    float peak = -INFINITY, total = 0;
    for (int64_t i = 0; i < parts; i++) peak = peak > sums.peak[i * apart] ? peak : sums.peak[i * apart];
    for (int64_t i = 0; i < parts; i++) {
        const float *acc = sums.acc + i * apart;
        const float w = sums.total[i * apart] > 0 ? exp2f(sums.peak[i * apart] - peak) : 0;
        total += sums.total[i * apart] * w;
        for (int64_t c = 0; c < padded(job.v_dim); c++) sums.acc[c] = (i ? sums.acc[c] : 0) + acc[c] * w;
    }
    finish(job, stream, head, row, peak, total, sums.acc);
}

GgmlKernels ggml_kernels() { return {part, all_tokens, merge}; }
} // namespace KVP_NS
