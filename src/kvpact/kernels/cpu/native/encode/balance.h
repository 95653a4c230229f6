// KVarN (methods/kvarn.py): deviations of rows and columns balanced, then a grid per row. Rows are
// channels for K and tokens for V. y is [tokens / W][channel][W], as the encoder has it.
#pragma once
#include "encode/quantize.h"

namespace KVP_NS {

constexpr int SWEEPS = 16;
constexpr float SCALE_MIN = 0.740818f, SCALE_MAX = 22026.47f, STD_MIN = 1e-3f, STD_MAX = 1e3f;
constexpr float UNIT_MIN = 1.0f / (1 << 20);

// One number per token, or per channel.
typedef float Numbers[MOST_DIM];

struct Balance {
    alignas(64) float x[MOST_DIM * MOST_GROUP], u[MOST_DIM * MOST_GROUP], v[MOST_DIM * MOST_GROUP];
    alignas(64) Numbers column, row, best_column, best_row, column_std, row_std;
    uint16_t column_half[MOST_DIM], scale[MOST_DIM], zero[MOST_DIM];
};

// A tile of tokens of one head.
struct BalancedTile {
    const kvp_encode_args &a;
    Balance &s;
    Side &side;
    int dim, tokens, blocks;

    BalancedTile(const kvp_encode_args &args, Balance &scratch, Side &room)
        : a(args), s(scratch), side(room), dim(args.dim), tokens(args.group), blocks(args.group / W) {}

    // Columns are tokens (K) or channels (V).
    bool keys() const { return !a.by_channel; }
    int columns() const { return keys() ? tokens : dim; }
    int rows() const { return keys() ? dim : tokens; }

    void divide(float *to, const float *from, const float *by, bool by_token) const {
        for (int b = 0; b < blocks; b++) {
            const vf token = load(by + (by_token ? b * W : 0));
            for (int c = 0; c < dim; c++) {
                const int i = (b * dim + c) * W;
                store(to + i, load(from + i) / (by_token ? token : set1(by[c])));
            }
        }
    }
    // Standard deviations over channels, one per token.
    void token_deviations(float *out, const float *y) const {
        const vf count = set1((float)dim);
        for (int b = 0; b < blocks; b++) {
            const float *block = y + b * dim * W;
            leaves<1>(side.sums, dim, [&](int c, vf *part) { part[0] = load(block + c * W); });
            const vf mean = tree(side.sums[0], after_leaves(dim)) / count;
            leaves<1>(side.sums, dim, [&](int c, vf *part) {
                const vf rest = load(block + c * W) - mean;
                part[0] = rest * rest;
            });
            store(out + b * W, square_root(tree(side.sums[0], after_leaves(dim)) / count));
        }
    }
    void channel_deviations(float *out, const float *y) const {
        const vf count = set1((float)tokens);
        for (int c = 0; c < dim; c += W) {
            float mean[W];
            store(mean, over_tokens(c, dim, blocks, [&](int b, int channel, int) { return load(y + (b * dim + channel) * W); }) / count);
            const vf sum = over_tokens(c, dim, blocks, [&](int b, int channel, int k) {
                const vf rest = load(y + (b * dim + channel) * W) - set1(mean[k]);
                return rest * rest;
            });
            store_first(out + c, square_root(sum / count), dim - c < W ? dim - c : W);
        }
    }
    void deviations(float *out, const float *y, bool per_token) const {
        per_token ? token_deviations(out, y) : channel_deviations(out, y);
    }
    // In the order of the flattened tile.
    static float flat_sum(float *x, int size) {
        while (size > 1) {
            const int half = size / 2;
            for (int i = 0; i < half; i++) x[i] += x[half + i];
            if (size % 2) x[half] = x[size - 1];
            size = half + size % 2;
        }
        return x[0];
    }
    float whole_deviation(const float *y) const {
        for (int b = 0; b < blocks; b++) {
            const float *block = y + b * dim * W;
            if (keys()) {
                for (int c = 0; c < dim; c++) store(s.u + c * tokens + b * W, load(block + c * W));
            } else {
                char *to[W];
                for (int i = 0; i < W; i++) to[i] = (char *)(s.u + (b * W + i) * dim);
                store_lanes(to, block, dim, KVP_F32, nullptr);
            }
        }
        const int size = dim * tokens;
        memcpy(s.v, s.u, (size_t)size * sizeof(float));
        const float mean = flat_sum(s.v, size) / (float)size;
        for (int i = 0; i < size; i++) s.v[i] = (s.u[i] - mean) * (s.u[i] - mean);
        return sqrtf(flat_sum(s.v, size) / (float)size);
    }
    static float spread(const float *deviation, int count) {
        float low = STD_MAX, high = STD_MIN;
        for (int i = 0; i < count; i++) {
            const float x = clamped(deviation[i], STD_MIN, STD_MAX);
            low = x < low ? x : low;
            high = x > high ? x : high;
        }
        return high / low;
    }
    static void grow(float *scale, const float *deviation, int count) {
        for (int i = 0; i < count; i++)
            scale[i] = clamped(scale[i] * clamped(deviation[i], STD_MIN, STD_MAX), SCALE_MIN, SCALE_MAX);
    }
    // Into best_column and best_row.
    void balance(const float *y) const {
        const int size = dim * tokens;
        float whole = whole_deviation(y);
        whole = whole == 0 ? 1 : whole;
        for (int i = 0; i < size; i += W) store(s.x + i, load(y + i) / set1(whole));
        for (int i = 0; i < columns(); i++) s.column[i] = s.best_column[i] = 1;
        for (int i = 0; i < rows(); i++) s.row[i] = s.best_row[i] = 1;
        float best = __builtin_inff();
        deviations(s.column_std, s.x, keys());
        for (int sweep = 0; sweep < SWEEPS; sweep++) {
            grow(s.column, s.column_std, columns());
            divide(s.u, s.x, s.column, keys());
            divide(s.v, s.u, s.row, !keys());
            deviations(s.row_std, s.v, !keys());
            grow(s.row, s.row_std, rows());
            divide(s.v, s.u, s.row, !keys());
            deviations(s.column_std, s.v, keys());
            deviations(s.row_std, s.v, !keys());
            const float uneven = spread(s.column_std, columns()) + spread(s.row_std, rows());
            if (!(uneven < best)) continue;
            best = uneven;
            memcpy(s.best_column, s.column, (size_t)columns() * sizeof(float));
            memcpy(s.best_row, s.row, (size_t)rows() * sizeof(float));
        }
        for (int i = 0; i < rows(); i++) s.best_row[i] *= whole;
    }
    // Least and largest number of each row, of v.
    void ends(float *low, float *high) const {
        if (!keys()) {
            for (int b = 0; b < blocks; b++) {
                vf least = load(s.v + b * dim * W), most = least;
                for (int c = 1; c < dim; c++) {
                    const vf x = load(s.v + (b * dim + c) * W);
                    least = pick_lanes((Ints)(x < least), x, least);
                    most = pick_lanes((Ints)(x > most), x, most);
                }
                store(low + b * W, least);
                store(high + b * W, most);
            }
            return;
        }
        for (int c = 0; c < dim; c++) {
            low[c] = high[c] = s.v[c * W];
            for (int b = 0; b < blocks; b++)
                for (int i = 0; i < W; i++) {
                    const float x = s.v[(b * dim + c) * W + i];
                    low[c] = x < low[c] ? x : low[c];
                    high[c] = x > high[c] ? x : high[c];
                }
        }
    }
    // Whether there is more than zeros; then column_half, scale and zero are set, and u is balanced.
    bool encode(const float *y) const {
        const float steps = (float)((1 << a.bits) - 1);
        float unit = 1;
        if (keys()) {
            vf most = zero();
            for (int i = 0; i < dim * tokens; i += W) most = max(magnitude(load(y + i)), most);
            const float size = highest(most);
            if (size < UNIT_MIN) {
                for (int c = 0; c < dim; c++) s.scale[c] = to_half((float)(2.0 / (double)steps)), s.zero[c] = to_half(-1);
                memset(s.column_half, 0, sizeof s.column_half);
                return false;
            }
            int exponent;
            frexpf(size, &exponent);
            unit = exponent > 0 ? 1 : ldexpf(1, exponent);
        }
        balance(y);
        for (int i = 0; i < rows(); i++) s.row[i] = s.best_row[i] / unit;
        for (int i = 0; i < columns(); i++) {
            s.column_half[i] = to_half(s.best_column[i] * unit);
            s.column[i] = from_half(s.column_half[i]);
        }
        divide(s.u, y, s.column, keys());
        divide(s.v, s.u, s.row, !keys());
        ends(s.column_std, s.row_std);
        for (int i = 0; i < rows(); i++) {
            s.scale[i] = to_half(s.row[i] * ((s.row_std[i] - s.column_std[i]) / steps));
            s.zero[i] = to_half(s.row[i] * s.column_std[i] + 0.0f); // never -0
        }
        return true;
    }
    // Codes of the tokens of block b.
    void codes(int b, uint8_t *to) const {
        const int most = (1 << a.bits) - 1;
        const float *block = s.u + b * dim * W;
        if (keys()) {
            for (int c = 0; c < dim; c++) {
                const vf inverse = reciprocal(set1(from_half(s.scale[c])));
                store_codes(to + c * 32, on_grid(load(block + c * W), set1(from_half(s.zero[c])), inverse, most));
            }
            return;
        }
        const vf inverse = reciprocal(load_half(s.scale + b * W)), zero_point = load_half(s.zero + b * W);
        for (int c = 0; c < dim; c++) store_codes(to + c * 32, on_grid(load(block + c * W), zero_point, inverse, most));
    }
};
} // namespace KVP_NS
