// What keys of a trellis learn from a cache's first tokens (methods/trellis_learning.py), head by head.
#include "encode/keys.h"
#include "scratch.h"
#include "table.h"

namespace KVP_NS {
namespace {

constexpr float FLOOR = 0.001f; // of the mean energy

struct LearnScratch {
    alignas(64) float y[MOST_DIM * MOST_GROUP]; // a row: [tokens / W][channel][W]
    alignas(64) Side side;
    float first[MOST_DIM], weight[MOST_DIM], queries[MOST_DIM], energy[MOST_DIM], part[MOST_DIM];
    double sum[MOST_DIM];
};

// The nearest 8-bit float (e5m2) of a number from 0 to the largest of these.
float near_e5m2(float x) {
    if (x < 0x1p-14f) return rintf(x * 0x1p16f) * 0x1p-16f;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = (bits + 0xfffff + (bits >> 21 & 1)) & ~0x1fffffu;
    memcpy(&x, &bits, 4);
    return x;
}

// Adds `rows` rows of `width` numbers up in the first one, in the order of tree_sum.
void fold(float *s, int64_t rows, int64_t width) {
    while (rows > 1) {
        const int64_t half = rows / 2, count = half * width;
        for (int64_t i = 0; i < count; i++) s[i] += s[count + i];
        if (rows % 2) memcpy(s + count, s + (rows - 1) * width, (size_t)width * sizeof(float));
        rows = half + rows % 2;
    }
}
float folded(float *s, int size) {
    fold(s, size, 1);
    return s[0];
}

struct Learner {
    const kvp_learn_args &a;
    LearnScratch &s;
    float *rows; // [batch][channel]
    const int64_t head;
    const int dim, tokens, group;
    kvp_trellis known{};

    Learner(const kvp_learn_args &args, LearnScratch &scratch, float *room, int64_t which)
        : a(args), s(scratch), rows(room), head(which), dim(a.dim), tokens((int)a.tokens),
          group(a.trellis->center ? a.trellis->center : tokens) {}

    void learn() {
        if (a.first) first_key();
        if (a.weight) channels();
        know(*a.known);
    }

  private:
    void channels() {
        for (int c = 0; c < dim; c++) s.queries[c] = a.query_energy ? a.query_energy[head * dim + c] : 1;
        if (a.q.data) mean_energy();
        if (a.query_energy || a.q.data) floor(s.queries);
        residual_energy();
        uint16_t *weight = a.weight + head * dim;
        if (a.weighted) {
            weigh(weight);
            known.weight = s.weight;
            residual_energy();
        } else {
            for (int c = 0; c < dim; c++) {
                s.weight[c] = 1;
                weight[c] = to_half(1);
            }
        }
        int16_t *order = a.order + head * dim;
        for (int c = 0; c < dim; c++) order[c] = (int16_t)c;
        if (a.sorted) sort(order);
        deviations(order);
    }
    int64_t padding(int64_t row) const { return a.padding ? a.padding[row] : 0; }
    const char *token(int64_t row, int64_t t) const { return a.x.data + row * a.x.row + head * a.x.head + t * a.x.token; }

    // The mean of the rows' first keys; W rows at a time.
    void first_key() {
        int64_t there = 0;
        for (int64_t b = 0; b < a.batch; b += W) {
            const char *keys[W];
            float counts[W];
            for (int i = 0; i < W; i++) {
                const int64_t row = b + i, place = row < a.batch ? padding(row) : 0;
                keys[i] = row < a.batch ? token(row, place < 0 ? 0 : place < tokens ? place : tokens - 1) : nullptr;
                counts[i] = keys[i] && place < tokens;
                there += counts[i] != 0;
            }
            load_lanes(s.y, keys, dim, a.dtype, nullptr);
            for (int i = 0; i < W && keys[i]; i++)
                for (int c = 0; c < dim; c++) rows[(b + i) * dim + c] = s.y[c * W + i] * counts[i];
        }
        fold(rows, a.batch, dim);
        uint16_t *key = a.first + head * dim;
        for (int c = 0; c < dim; c++) {
            key[c] = to_half(rows[c] / (float)(there ? there : 1));
            s.first[c] = from_half(key[c]);
        }
        known.first = s.first;
    }

    // The mean over the queries of a head, each energy rounded to 8 bits as if it had waited (cache/stream/energies.py).
    void mean_energy() {
        const int64_t groups = a.q_heads / a.heads;
        for (int c = 0; c < dim; c++) s.sum[c] = 0;
        float *total = s.y, *one = s.y + dim * W;
        for (int64_t b = 0; b < a.batch; b++)
            for (int64_t t = 0; t < a.q_tokens; t += W) {
                const int64_t count = a.q_tokens - t < W ? a.q_tokens - t : W;
                for (int64_t g = 0; g < groups; g++) {
                    const char *rows[W];
                    for (int64_t i = 0; i < W; i++) rows[i] = i < count ? a.q.data + b * a.q.row + (head * groups + g) * a.q.head + (t + i) * a.q.token : nullptr;
                    load_lanes(g ? one : total, rows, dim, a.dtype, nullptr);
                    for (int i = 0; i < dim * W; i++) total[i] = g ? total[i] + one[i] * one[i] : total[i] * total[i];
                }
                for (int c = 0; c < dim; c++)
                    for (int64_t i = 0; i < count; i++) {
                        const float mean = total[c * W + i] / (float)groups;
                        s.sum[c] += near_e5m2(mean < 57344 ? mean : 57344);
                    }
            }
        for (int c = 0; c < dim; c++) s.queries[c] = (float)(s.sum[c] / (double)(a.batch * a.q_tokens));
    }

    void know(const kvp_trellis &to) {
        const int blocks = a.trellis->blocks;
        if (a.first) memcpy((float *)to.first + head * dim, s.first, (size_t)dim * sizeof(float));
        if (!a.weight) return;
        memcpy((float *)to.weight + head * dim, s.weight, (size_t)dim * sizeof(float));
        for (int c = 0; c < dim; c++) ((int32_t *)to.order)[head * dim + c] = a.order[head * dim + c];
        for (int b = 0; b < 3; b++)
            ((float *)to.deviation)[head * 3 + b] = b < blocks ? from_half(a.deviation[head * blocks + b]) : 0;
    }

    // The tokens of a row; in the place of those before `start` the mean of the others of their group.
    void load_row(int64_t row, int start) {
        for (int t = 0; t < tokens; t += W) {
            const char *keys[W];
            for (int i = 0; i < W; i++) keys[i] = token(row, t + i);
            load_lanes(s.y + t * dim, keys, dim, a.dtype, nullptr);
        }
        for (int begin = 0; begin < start; begin += group)
            leave_out(s.y + begin * dim, dim, group, start - begin, KVP_F32, s.part);
    }

    // The mean square of the keys less their bases.
    void residual_energy() {
        int64_t total = 0;
        for (int64_t b = 0; b < a.batch; b++) {
            const int64_t end = a.sinks + padding(b);
            const int start = (int)(end < 0 ? 0 : end < tokens ? end : tokens);
            total += tokens - start;
            load_row(b, start);
            for (int begin = 0; begin < tokens; begin += group) squares(s.y + begin * dim, start - begin);
            for (int c = 0; c < dim; c += W) {
                const vf sum = over_tokens(c, dim, tokens / W, [&](int block, int channel, int) {
                    return load(s.y + (block * dim + channel) * W);
                });
                store_first(rows + b * dim + c, sum, dim - c < W ? dim - c : W);
            }
        }
        fold(rows, a.batch, dim);
        for (int c = 0; c < dim; c++) s.energy[c] = rows[c] / (float)(total ? total : 1);
        floor(s.energy);
    }
    // Of a group, in place; zeros before `start`.
    void squares(float *y, int start) {
        const Keys keys(known, dim, s.side, 0);
        if (!a.trellis->center) return squares(keys, y, start, nullptr, [&](int b) { return keys.bases(y + b * dim * W); });
        const TileMean mean(keys, y, group);
        squares(keys, y, start, mean.mean, [&](int b) { return mean.bases(y + b * dim * W, b); });
    }
    template <class Flag> void squares(const Keys &keys, float *y, int start, const float *mean, Flag &&flag_of) {
        for (int b = 0; b < group / W; b++) {
            const Ints flag = flag_of(b);
            const vf counted = pick_lanes(lanes_from(start - b * W), set1(1), zero());
            for (int c = 0; c < dim; c++) {
                float *block = y + b * dim * W;
                const vf rest = keys.less_base(block, c, flag, mean);
                store(block + c * W, rest * rest * counted);
            }
        }
    }

    // Adds a share of the mean over channels; energies of nothing are 1.
    void floor(float *energy) {
        memcpy(s.part, energy, (size_t)dim * sizeof(float));
        const float mean = folded(s.part, dim) / (float)dim;
        for (int c = 0; c < dim; c++) energy[c] = mean > 0 ? energy[c] + FLOOR * mean : 1;
    }
    void weigh(uint16_t *weight) {
        for (int c = 0; c < dim; c++) {
            s.weight[c] = sqrtf(sqrtf(s.queries[c] / s.energy[c]));
            s.part[c] = s.weight[c] * s.weight[c];
        }
        const float size = sqrtf(folded(s.part, dim) / (float)dim);
        for (int c = 0; c < dim; c++) {
            weight[c] = to_half(s.weight[c] / size);
            s.weight[c] = from_half(weight[c]);
        }
    }
    // The most important channel first, of equal ones the first. Each counts those that stand before it: no
    // function of the C++ library, which the linker could take from another instruction set.
    void sort(int16_t *order) {
        int32_t bits[MOST_DIM]; // in the order of the numbers, which are not negative
        for (int c = 0; c < dim; c++) s.part[c] = s.queries[c] * s.energy[c];
        memcpy(bits, s.part, (size_t)dim * sizeof(float));
        for (int c = 0; c < dim; c++) {
            int before = 0;
            for (int i = 0; i < c; i++) before += bits[i] >= bits[c];
            for (int i = c + 1; i < dim; i++) before += bits[i] > bits[c];
            order[before] = (int16_t)c;
        }
    }
    void deviations(const int16_t *order) {
        const int blocks = a.trellis->blocks;
        float deviation[3], least = 0;
        for (int b = 0, begin = 0; b < blocks; b++) {
            const int width = a.trellis->block[b].dim;
            for (int i = 0; i < width; i++) {
                const int c = order[begin + i];
                s.part[i] = s.weight[c] * s.weight[c] * s.energy[c];
            }
            deviation[b] = sqrtf(folded(s.part, width) / (float)width);
            least = b == 0 || deviation[b] < least ? deviation[b] : least;
            begin += width;
        }
        for (int b = 0; b < blocks; b++) a.deviation[head * blocks + b] = to_half(deviation[b] / least);
    }
};

} // namespace

static bool learn_head(const kvp_learn_args &a, int64_t head) {
    static thread_local Scratch room;
    LearnScratch *own = own_scratch<LearnScratch>();
    float *rows = room.floats((size_t)(a.batch * a.dim));
    if (!own || !rows) return false;
    Learner(a, *own, rows, head).learn();
    return true;
}

void fill_learn(Table &table) { table.learn_head = learn_head; }
} // namespace KVP_NS
