// Exact tokens of a block: sinks, window, open group, new tokens.
#pragma once
#include "packed.h"

namespace KVP_NS {

// The exact tokens of a block: sinks where there are slots, tail and new tokens behind them.
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
    // Tokens `first` to `last` as fp32 rows of `width`, zeros behind dim.
    INLINE void read(float *to, int first, int last, const kvp_stream &x, int64_t width) const {
        for (int i = first; i < last; i++, to += width) {
            for (int64_t c = x.dim / W * W; c < width; c++) to[c] = 0;
            to_floats(to, at[i], x.dtype, x.dim);
        }
    }
};

constexpr int AT_ONCE = 16;

static void exact_scores(Pass &p, int64_t t, int64_t n) {
    const ExactTokens tokens(p.a.k, p.a, p.b, p.h, t, n);
    const int64_t width = p.job.k_width;
    const float *q = p.job.q + (p.b * p.a.heads + p.h) * p.job.q_size() + p.r0 * width;
    alignas(64) float x[AT_ONCE * MOST_DIM];
    for (int first = 0; first < tokens.count; first += AT_ONCE) {
        const int last = (int)upto(first + AT_ONCE, tokens.count);
        tokens.read(x, first, last, p.a.k, width);
        for (int r = 0; r < p.rows; r += 4)
            for (int i = first; i < last; i++) {
                const float *row = x + (i - first) * width;
                vf acc[4] = {zero(), zero(), zero(), zero()};
                for (int64_t c = 0; c < width; c += W) {
                    vf y = load(row + c);
                    for (int k = 0; k < 4; k++) acc[k] = fma(y, load(q + (r + k) * width + c), acc[k]);
                }
                store_sums(&p.score[r][tokens.index[i]], BLOCK, acc[0], acc[1], acc[2], acc[3]);
            }
    }
}

static void exact_values(Pass &p, float *acc, const ExactTokens &tokens) {
    const int64_t width = p.job.v_width, stride = p.job.partial_row();
    alignas(64) float x[AT_ONCE * MOST_DIM];
    for (int first = 0; first < tokens.count; first += AT_ONCE) {
        const int last = (int)upto(first + AT_ONCE, tokens.count);
        tokens.read(x, first, last, p.a.v, width);
        for (int r = 0; r < p.rows; r++)
            for (int64_t c = 0; c < width; c += 2 * W) {
                float *to = acc + r * stride + c;
                vf low = load(to), high = load(to + W);
                for (int i = first; i < last; i++) {
                    const vf w = set1(p.weight[r][tokens.index[i]]);
                    low = fma(load(x + (i - first) * width + c), w, low);
                    high = fma(load(x + (i - first) * width + c + W), w, high);
                }
                store(to, low);
                store(to + W, high);
            }
    }
    for (int i = 0; i < tokens.count; i++)
        for (int r = 0; r < p.passed; r++) p.weight[r][tokens.index[i]] = 0;
}
} // namespace KVP_NS
