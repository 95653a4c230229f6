// Scores of an index: queries times its packed keys (kernels/index.py). Where levels are multiplied as whole numbers
// (attend/whole.h), keys stay bytes: the scales of a group are taken into the queries, which are rounded to 16
// bits. Elsewhere a group's keys become numbers, and a matrix product does the rest. KVP_AMX: the processor multiplies
// whole tiles, up to 16 rows of 64 bytes.
#include "attend/whole.h"
#include "scratch.h"
#include "simd/lanes.h"
#include "table.h"
#if !defined(KVP_WHOLE)
#include "attend/product.h"
#endif

namespace KVP_NS {
namespace {

constexpr int GROUP = KVP_INDEX_GROUP;

#if defined(KVP_WHOLE)
#if defined(KVP_AMX)
constexpr int HEADS = 16; // at once
constexpr int FLIP = 0;   // of keys' bits: tiles multiply signed bytes
constexpr int64_t WHOLE = 64; // channels

// How the calling thread's tiles are shaped: 0 to 3 sums, 4 and 5 factors, 6 and 7 keys.
struct Tiles {
    Tiles() {
        struct {
            uint8_t palette = 1, start = 0, unused[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        for (int i = 0; i < 8; i++) {
            shape.bytes[i] = 64;
            shape.rows[i] = 16;
        }
        _tile_loadconfig(&shape);
    }
    ~Tiles() { _tile_release(); }
};
#else
constexpr int HEADS = 2;
constexpr int VECTORS_AT_ONCE = W == 16 ? 4 : 2; // whose sums stay in registers
constexpr int FLIP = 0x80808080;
constexpr int64_t WHOLE = 1;
#endif
constexpr int64_t width(int64_t dim) { return (dim + WHOLE - 1) / WHOLE * WHOLE; } // of a row of queries

struct ScanScratch {
    alignas(64) uint32_t keys[MOST_DIM / 4 * GROUP]; // [channels / 4][token]: four levels each
    alignas(64) float most[MOST_DIM], scale[MOST_DIM];
    alignas(64) char factors[2 * HEADS * MOST_DIM];

#if defined(KVP_AMX)
    // Where keys have one of 16 words of four channels, as instructions that pack leave factors.
    static constexpr int64_t place(int64_t word) { return (word & ~15) + word % 4 * 4 + word % 16 / 4; }
#else
    static constexpr int64_t place(int64_t word) { return word; }
#endif

    // Makes the greatest whole numbers of a head's channels, times the scales of any group, just fit; returns the unit.
    float prepare(float *to, const float *q, int64_t dim) const {
        vf high = zero();
        for (int64_t c = 0; c < dim; c += W) high = max(high, magnitude(mul(load(q + c), load(most + c))));
        const float top = highest(high), greatest = most_whole(dim);
        const vf inverse = set1(top > 1e-30f ? greatest / top : 0);
        for (int64_t c = 0; c < dim; c += W) store(to + c, mul(load(q + c), inverse));
        for (int64_t c = dim; c < width(dim); c += W) store(to + c, zero());
        return top / greatest;
    }
    void read(const int8_t *codes, const float *scales, int64_t dim) {
        memcpy(scale, scales, sizeof(float) * dim);
        memset(scale + dim, 0, sizeof(float) * (width(dim) - dim));
        for (int64_t at = 0; at < GROUP * dim; at += 64) prefetch(codes + GROUP * dim + at);
        for (int64_t t = 0; t < GROUP; t += W)
            for (int64_t c = 0; c < dim / 4; c += W) {
                const int64_t some = dim / 4 - c < W ? dim / 4 - c : W;
                vf r[W];
                for (int i = 0; i < W; i++) {
                    const float *from = (const float *)(codes + (t + i) * dim) + c;
                    r[i] = some == W ? load(from) : load_first(from, (int)some);
                }
                transpose(r);
                for (int64_t i = 0; i < some; i++) store((float *)keys + place(c + i) * GROUP + t, (vf)((Ints)r[i] ^ FLIP));
            }
    }
    // Scores are times `gain`; the positive ones of some heads are added to `out`, or all are written.
#if defined(KVP_AMX)
    alignas(64) int32_t sums[4][HEADS * 16]; // of high digits, then of low ones: [head][token] of 16 tokens, then of 16 more

    void products(const float *q, const float *gain, int64_t heads, int64_t dim, bool summed, float *out, int64_t row) {
        char *low = factors, *high = factors + HEADS * MOST_DIM;
        const int64_t step = width(dim);
        for (int64_t h = 0; h < heads; h++)
            for (int64_t c = 0; c < step; c += 64) {
                const float *from = q + h * step + c;
                vi x[4];
                for (int k = 0; k < 4; k++) x[k] = _mm512_cvtps_epi32(mul(load(from + k * W), load(scale + c + k * W)));
                const vi a = _mm512_packs_epi32(x[0], x[1]), b = _mm512_packs_epi32(x[2], x[3]), last = _mm512_set1_epi16(255);
                _mm512_store_si512(low + h * step + c, _mm512_packus_epi16(a & last, b & last));
                _mm512_store_si512(high + h * step + c, _mm512_packs_epi16(_mm512_srai_epi16(a, 8), _mm512_srai_epi16(b, 8)));
            }
        asm volatile("" ::: "memory"); // GCC does not know that tiles are read from it
        for (int64_t t = 0; t < GROUP; t += 32) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t c = 0; c < step; c += 64) {
                _tile_loadd(4, high + c, step);
                _tile_loadd(5, low + c, step);
                _tile_loadd(6, keys + c / 4 * GROUP + t, 4 * GROUP);
                _tile_loadd(7, keys + c / 4 * GROUP + t + 16, 4 * GROUP);
                _tile_dpbssd(0, 4, 6);
                _tile_dpbssd(1, 4, 7);
                _tile_dpbusd(2, 5, 6);
                _tile_dpbusd(3, 5, 7);
            }
            _tile_stored(0, sums[0], 64);
            _tile_stored(1, sums[1], 64);
            _tile_stored(2, sums[2], 64);
            _tile_stored(3, sums[3], 64);
            float *to = out + t;
            vf all[2] = {summed ? load(to) : zero(), summed ? load(to + W) : zero()};
            for (int64_t h = 0; h < heads; h++)
                for (int k = 0; k < 2; k++) {
                    const WholeSum sum{_mm512_load_si512(sums[k] + h * W), _mm512_load_si512(sums[2 + k] + h * W)};
                    if (summed) all[k] = fma(max(sum.value(), zero()), set1(gain[h]), all[k]);
                    else store(to + h * row + k * W, mul(sum.value(), set1(gain[h])));
                }
            for (int k = 0; summed && k < 2; k++) store(to + k * W, all[k]);
        }
    }
    void scores(const float *q, const float *gain, int64_t heads, int64_t dim, bool summed, float *out, int64_t row) {
        for (int64_t h = 0; h < heads; h += HEADS)
            products(q + h * width(dim), gain + h, heads - h < HEADS ? heads - h : HEADS, dim, summed, summed ? out : out + h * row, row);
    }
#else
    template <int N>
    void products(const float *q, const float *gain, int64_t dim, bool summed, float *out, int64_t row) {
        constexpr int V = VECTORS_AT_ONCE;
        int32_t offset[N];
        for (int h = 0; h < N; h++) {
            vi all = no_sum();
            for (int64_t c = 0; c < dim; c += TILE) {
                vf x[TILE / W];
                for (int k = 0; k < TILE / W; k++) x[k] = mul(load(q + h * dim + c + k * W), load(scale + c + k * W));
                all = add_sums(all, put_factors<8>(factors + 2 * (h * dim + c), x));
            }
            offset[h] = total(all);
        }
        for (int64_t t = 0; t < GROUP; t += V * W) {
            WholeSum sums[V][N];
            for (int k = 0; k < V; k++)
                for (int h = 0; h < N; h++) sums[k][h].start(offset[h]);
            for (int64_t c = 0; c < dim / 4; c++) {
                Operand x[V];
                for (int k = 0; k < V; k++) x[k] = bytes_of(load_words(keys + c * GROUP + t + k * W));
                for (int h = 0; h < N; h++) add_products<V>(&sums[0][h], N, x, factors + 2 * h * dim + c * FACTORS);
            }
            for (int k = 0; k < V; k++)
                for (int h = 0; h < N; h++) {
                    const vf x = sums[k][h].value();
                    float *to = out + t + k * W;
                    if (summed) store(to, fma(max(x, zero()), set1(gain[h]), load(to)));
                    else store(to + h * row, mul(x, set1(gain[h])));
                }
        }
    }
    void scores(const float *q, const float *gain, int64_t heads, int64_t dim, bool summed, float *out, int64_t row) {
        for (int64_t h = 0; h < heads; h += 2) {
            float *to = summed ? out : out + h * row;
            if (h + 1 < heads) products<2>(q + h * dim, gain + h, dim, summed, to, row);
            else products<1>(q + h * dim, gain + h, dim, summed, to, row);
        }
    }
#endif
};

#else
constexpr int HEADS = 8; // at once
constexpr int64_t width(int64_t dim) { return dim; } // of a row of queries

struct ScanScratch {
    alignas(64) float keys[MOST_DIM * GROUP]; // panels [dim][PANEL]
    alignas(64) float most[MOST_DIM], score[HEADS * GROUP];

    float prepare(float *to, const float *q, int64_t dim) const {
        memcpy(to, q, sizeof(float) * dim);
        return 1;
    }
    void read(const int8_t *codes, const float *scales, int64_t dim) {
        for (int64_t t = 0; t < GROUP; t++)
            for (int64_t c = 0; c < dim; c++)
                keys[(t / PANEL * dim + c) * PANEL + t % PANEL] = (float)codes[t * dim + c] * scales[c];
    }
    void scores(const float *q, const float *gain, int64_t heads, int64_t dim, bool summed, float *out, int64_t row) {
        for (int64_t first = 0; first < heads; first += HEADS) {
            const int64_t some = heads - first < HEADS ? heads - first : HEADS;
            product({some, dim, q + first * dim, dim, keys, score, GROUP, false}, GROUP / W, dim * PANEL);
            for (int64_t h = 0; h < some; h++) {
                float *to = out + (summed ? 0 : (first + h) * row);
                for (int j = 0; j < GROUP; j += W) {
                    const vf x = load(score + h * GROUP + j);
                    store(to + j, summed ? fma(max(x, zero()), set1(gain[first + h]), load(to + j)) : x);
                }
            }
        }
    }
};
#endif

} // namespace

static bool scan_span(const kvp_scan_args &a, Span span) {
    static thread_local Scratch numbers;
    const int64_t first = span.pair * a.queries * a.heads, rows = a.queries * a.heads, width = KVP_NS::width(a.dim);
    ScanScratch *own = own_scratch<ScanScratch>();
    float *q = numbers.floats((size_t)(rows * (width + 1))), *gain = q + rows * width;
    if (!own || !q) return false;
    ScanScratch &s = *own;
#if defined(KVP_AMX)
    const Tiles tiles;
#endif
    const int8_t *codes = a.codes + span.pair * a.tokens * a.dim;
    const float *scale = a.scale + span.pair * (a.tokens / GROUP) * a.dim;
    memset(s.most, 0, sizeof s.most);
    for (int64_t g = span.begin / GROUP; g < span.end / GROUP; g++)
        for (int64_t c = 0; c < a.dim; c += W) store(s.most + c, max(load(s.most + c), load(scale + g * a.dim + c)));
    for (int64_t i = 0; i < rows; i++) gain[i] = s.prepare(q + i * width, a.q + (first + i) * a.dim, a.dim) * (a.weight ? a.weight[first + i] : 1);
    for (int64_t t = span.begin; t < span.end; t += GROUP) {
        s.read(codes + t * a.dim, scale + t / GROUP * a.dim, a.dim);
        for (int64_t i = 0; i < rows; i += a.heads) {
            float *out = a.out + (a.weight ? (first + i) / a.heads : first + i) * a.out_row + t;
            if (a.weight) memset(out, 0, sizeof(float) * GROUP);
            s.scores(q + i * width, gain + i, a.heads, a.dim, a.weight, out, a.out_row);
        }
    }
    return true;
}

void fill_scan(Table &table) { table.scan_span = scan_span; }
} // namespace KVP_NS
