// Exact tokens of a block: sinks, window, open group, new tokens.
#pragma once
#include "attend/packed.h"

namespace KVP_NS {

// The exact tokens of a block: sinks where there are slots, tail and new tokens after them.
struct ExactTokens {
    int count = 0;
    int index[BLOCK];
    const char *at[BLOCK];

    INLINE ExactTokens(const kvp_stream &x, const kvp_attend_args &a, int64_t b, int64_t h, int64_t t, int64_t n) {
        for (int64_t s = 0; s < x.n_sinks; s++) {
            const int64_t i = x.sink_positions[b * x.n_sinks + s] - t;
            if (i < 0 || i >= n || i + t >= x.exact_from) continue;
            put(i, x.sinks.data + b * x.sinks.row + h * x.sinks.head + s * x.sinks.token);
        }
        for (int64_t i = from(x.exact_from - t, 0); i < n; i++) put(i, exact_token(x, a, b, h, t + i));
    }
    INLINE void put(int64_t i, const char *data) {
        index[count] = (int)i;
        at[count++] = data;
    }
    // Prefetches tokens that don't follow the one before: processors don't guess where they are.
    INLINE void ask(int first, int n, const kvp_stream &x) const {
        const int64_t bytes = x.dim * (x.dtype == KVP_F32 ? 4 : 2);
        for (int i = first; i < upto(first + n, count); i++)
            for (int64_t c = 0; c < bytes && !(i && at[i] == at[i - 1] + bytes); c += 64) prefetch(at[i] + c);
    }
    // Tokens from `first` on as fp32 rows of `width`, zeros after dim: where they lie if they are
    // such there, else as copies.
    INLINE void read(const float **to, float *copy, int first, int n, const kvp_stream &x, int64_t width) const {
        if (x.dtype == KVP_F32 && x.dim == width) {
            for (int i = 0; i < n; i++) to[i] = (const float *)at[first + i];
            return;
        }
        for (int i = 0; i < n; i++, copy += width) {
            for (int64_t c = x.dim / W * W; c < width; c++) copy[c] = 0;
            to_floats(copy, at[first + i], x.dtype, x.dim);
            to[i] = copy;
        }
    }
};

constexpr int AT_ONCE = 16;
constexpr int AHEAD = 2 * AT_ONCE; // tokens from one that is read to one that is asked for
constexpr int TOGETHER = 4; // tokens whose products are summed
constexpr int ROWS_TOGETHER = REGISTERS == 32 ? 4 : 2; // query rows of these

// The products of four tokens with some query rows, [rows][4].
INLINE void dot_tokens(float (*out)[TOGETHER], const float *const *x, const float *q, int64_t width) {
    vf acc[ROWS_TOGETHER][TOGETHER];
    for (int r = 0; r < ROWS_TOGETHER; r++)
        for (int i = 0; i < TOGETHER; i++) acc[r][i] = zero();
    for (int64_t c = 0; c < width; c += W) {
        vf y[ROWS_TOGETHER];
        for (int r = 0; r < ROWS_TOGETHER; r++) y[r] = load(q + r * width + c);
        for (int i = 0; i < TOGETHER; i++) {
            const vf t = load(x[i] + c);
            for (int r = 0; r < ROWS_TOGETHER; r++) acc[r][i] = fma(t, y[r], acc[r][i]);
        }
    }
    for (int r = 0; r < ROWS_TOGETHER; r++) sum4(out[r], acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
}

static void exact_scores(Pass &p, int64_t t, int64_t n) {
    const ExactTokens tokens(p.a.k, p.a, p.b, p.h, t, n);
    const int64_t width = p.job.k_width;
    const float *q = p.job.q + (p.b * p.a.heads + p.h) * p.job.q_size() + p.r0 * width;
    alignas(64) float copy[AT_ONCE * MOST_DIM];
    const float *x[AT_ONCE];
    tokens.ask(0, AHEAD, p.a.k);
    for (int first = 0; first < tokens.count; first += AT_ONCE) {
        const int count = (int)upto(AT_ONCE, tokens.count - first);
        tokens.ask(first + AHEAD, AT_ONCE, p.a.k);
        tokens.read(x, copy, first, count, p.a.k, width);
        for (int i = count; i < whole(count, TOGETHER); i++) x[i] = x[count - 1];
        for (int r = 0; r < p.rows; r += ROWS_TOGETHER)
            for (int i = 0; i < count; i += TOGETHER) {
                alignas(16) float sums[ROWS_TOGETHER][TOGETHER];
                dot_tokens(sums, x + i, q + r * width, width);
                const int *index = tokens.index + first + i;
                const bool row = i + TOGETHER <= count && index[TOGETHER - 1] == index[0] + TOGETHER - 1;
                for (int k = 0; k < ROWS_TOGETHER; k++) {
                    float *to = p.score[r + k];
                    if (row) memcpy(to + index[0], sums[k], sizeof sums[k]);
                    else
                        for (int j = 0; j < upto(TOGETHER, count - i); j++) to[index[j]] = sums[k][j];
                }
            }
    }
}

// Adds tokens, by their weights, to R query rows.
template <int R>
INLINE void add_tokens(Pass &p, float *acc, int r0, const float *const *x, const int *index, int count) {
    const int64_t width = p.job.v_width, stride = p.job.partial_row();
    for (int64_t c = 0; c < width; c += 2 * W) {
        vf low[R], high[R];
        for (int r = 0; r < R; r++) {
            low[r] = load(acc + (r0 + r) * stride + c);
            high[r] = load(acc + (r0 + r) * stride + c + W);
        }
        for (int i = 0; i < count; i++) {
            const vf a = load(x[i] + c), b = load(x[i] + c + W);
            for (int r = 0; r < R; r++) {
                const vf w = set1(p.weight[r0 + r][index[i]]);
                low[r] = fma(a, w, low[r]);
                high[r] = fma(b, w, high[r]);
            }
        }
        for (int r = 0; r < R; r++) {
            store(acc + (r0 + r) * stride + c, low[r]);
            store(acc + (r0 + r) * stride + c + W, high[r]);
        }
    }
}

static void exact_values(Pass &p, float *acc, const ExactTokens &tokens) {
    alignas(64) float copy[AT_ONCE * MOST_DIM];
    const float *x[AT_ONCE];
    tokens.ask(0, AHEAD, p.a.v);
    for (int first = 0; first < tokens.count; first += AT_ONCE) {
        const int count = (int)upto(AT_ONCE, tokens.count - first);
        const int *index = tokens.index + first;
        tokens.ask(first + AHEAD, AT_ONCE, p.a.v);
        tokens.read(x, copy, first, count, p.a.v, p.job.v_width);
        int r = 0;
        for (; r + 4 <= p.rows; r += 4) add_tokens<4>(p, acc, r, x, index, count);
        if (p.rows - r == 3) add_tokens<3>(p, acc, r, x, index, count);
        if (p.rows - r == 2) add_tokens<2>(p, acc, r, x, index, count);
        if (p.rows - r == 1) add_tokens<1>(p, acc, r, x, index, count);
    }
    for (int i = 0; i < tokens.count; i++)
        for (int r = 0; r < p.passed; r++) p.weight[r][tokens.index[i]] = 0;
}
} // namespace KVP_NS
