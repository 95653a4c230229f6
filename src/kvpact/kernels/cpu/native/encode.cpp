// Encodes tokens into slots: in tiles of 32 tokens of one head, or few tokens of many heads.
#include "encode_job.h"
#include "pack.h"
#include "quantize.h"

namespace KVP_NS {
namespace {

constexpr int TOKENS = 32;

struct EncodeScratch {
    alignas(64) float y[ENCODE_DIM * ENCODE_TOKENS]; // [tokens / W][channel][W]
    alignas(64) uint8_t codes[ENCODE_DIM * TOKENS];  // [channel][32]
    alignas(64) Side side;
};

// Where the unit of a field lies that `position` is in.
char *place(const kvp_encode_args &a, const kvp_field &field, int64_t pair, int64_t position, int64_t tokens, int64_t bytes) {
    const int64_t segment = position / a.segment_tokens, first = a.start / a.segment_tokens;
    const int64_t unit = (position - segment * a.segment_tokens) / tokens;
    char *base = (char *)field.base[segment - first];
    return base + pair / a.heads * field.row + pair % a.heads * field.head + unit * bytes;
}
char *codes_at(const kvp_encode_args &a, int64_t pair, int64_t position) {
    int64_t bytes = (int64_t)a.dim * 4 * a.bits; // by channel, and 8-bit floats
    if (a.kind != KVP_FLOAT8 && !a.by_channel) bytes = (int64_t)words_per_token(a.bits, a.dim) * 32 * 4;
    return place(a, a.codes, pair, position, TOKENS, bytes);
}
int groups_of(const kvp_encode_args &a) {
    if (a.kind == KVP_CHANNEL) return 0;
    return a.kind == KVP_SYMMETRIC || a.kind == KVP_AFFINE ? (a.dim + a.channels - 1) / a.channels : 1;
}
const char *row_of(const kvp_encode_args &a, int64_t pair, int64_t token) {
    return a.x.data + pair / a.heads * a.x.row + pair % a.heads * a.x.head + token * a.x.token;
}

// fp16 numbers of `count` lanes from `lane` on to the tokens from `token` of a tile on.
void put_side(const kvp_encode_args &a, const kvp_field &field, const uint16_t *numbers, int groups, int64_t pair,
              int64_t position, int lane, int count) {
    if (!field.base) return;
    char *tile = place(a, field, pair, position, TOKENS, (int64_t)groups * TOKENS * 2);
    for (int g = 0; g < groups; g++)
        memcpy(tile + (g * TOKENS + position % TOKENS) * 2, numbers + g * W + lane, (size_t)count * 2);
}

// The codes of the tokens begin <= i < end of a tile into place.
void put_codes(const kvp_encode_args &a, uint8_t *codes, int64_t pair, int64_t tile, int begin, int end) {
    if (begin > 0 || end < TOKENS) {
        uint8_t keep[TOKENS] = {};
        memset(keep + begin, 0xff, (size_t)(end - begin));
        for (int c = 0; c < a.dim; c++)
            for (int i = 0; i < TOKENS; i++) codes[c * TOKENS + i] &= keep[i];
    }
    char *to = codes_at(a, pair, tile);
    if (a.kind == KVP_FLOAT8)
        for (int c = 0; c < a.dim; c++) memcpy(to + c * TOKENS + begin, codes + c * TOKENS + begin, (size_t)(end - begin));
    else if (a.by_channel) pack_by_channel((uint32_t *)to, codes, a.bits, a.dim);
    else pack_by_token((uint32_t *)to, codes, a.bits, a.dim);
}

// Mean of each channel over `count` tokens, summed as a tree over tokens; taken out of y.
void centre(const kvp_encode_args &a, float *y, int count, uint16_t *mean) {
    const int blocks = count / W, stride = a.dim * W;
    for (int c = 0; c < a.dim; c++) {
        vf part[ENCODE_TOKENS / W];
        for (int b = 0; b < blocks; b++) part[b] = load(y + b * stride + c * W);
        for (int n = blocks / 2; n; n /= 2)
            for (int b = 0; b < n; b++) part[b] = part[b] + part[b + n];
        float lane[W];
        store(lane, part[0]);
        for (int n = W / 2; n; n /= 2)
            for (int i = 0; i < n; i++) lane[i] += lane[i + n];
        mean[c] = to_half(lane[0] / (float)count);
        const vf m = set1(from_half(mean[c]));
        for (int b = 0; b < blocks; b++) store(y + b * stride + c * W, load(y + b * stride + c * W) - m);
    }
}

// One grid per channel, over all tokens of the group.
void grids(const kvp_encode_args &a, const float *y, int count, uint16_t *scales, uint16_t *zeros) {
    const int blocks = count / W, stride = a.dim * W;
    for (int c = 0; c < a.dim; c++) {
        vf low = load(y + c * W), high = low;
        for (int b = 1; b < blocks; b++) {
            const vf x = load(y + b * stride + c * W);
            low = pick_lanes((Ints)(x < low), x, low);
            high = pick_lanes((Ints)(x > high), x, high);
        }
        float least = low[0], most = high[0];
        for (int i = 1; i < W; i++) {
            if (low[i] < least) least = low[i];
            if (high[i] > most) most = high[i];
        }
        scales[c] = to_half((most - least) / (float)((1 << a.bits) - 1));
        zeros[c] = to_half(least + 0.0f); // never -0
    }
}
void on_grids(const kvp_encode_args &a, const float *y, const uint16_t *scales, const uint16_t *zeros, uint8_t *codes) {
    for (int c = 0; c < a.dim; c++) {
        const vf inverse = reciprocal(set1(from_half(scales[c]))), zero_point = set1(from_half(zeros[c]));
        store_codes(codes + c * TOKENS, on_grid(load(y + c * W), zero_point, inverse, (1 << a.bits) - 1));
    }
}

void load_block(const kvp_encode_args &a, float *y, const char *const *rows) {
    load_lanes(y, rows, a.dim, a.dtype, a.signs);
    if (a.signs) rotate_lanes(y, a.signs, a.dim);
}

// A whole group of tokens of one head.
void encode_group(const kvp_encode_args &a, EncodeScratch &scratch, int64_t pair, int64_t token) {
    const int count = a.group;
    const int64_t position = a.start + token;
    float *y = scratch.y;
    const char *rows[W];
    for (int b = 0; b < count / W; b++) {
        for (int i = 0; i < W; i++) rows[i] = row_of(a, pair, token + b * W + i);
        load_block(a, y + b * a.dim * W, rows);
    }
    uint16_t first[ENCODE_DIM], second[ENCODE_DIM];
    if (a.kind == KVP_CHANNEL) {
        grids(a, y, count, first, second);
        memcpy(place(a, a.scale, pair, position, count, a.dim * 2), first, (size_t)a.dim * 2);
        memcpy(place(a, a.zero, pair, position, count, a.dim * 2), second, (size_t)a.dim * 2);
    } else {
        centre(a, y, count, first);
        memcpy(place(a, a.mean, pair, position, count, a.dim * 2), first, (size_t)a.dim * 2);
    }
    for (int tile = 0; tile < count; tile += TOKENS) {
        for (int i = 0; i < TOKENS; i += W) {
            const float *block = y + (tile + i) / W * a.dim * W;
            if (a.kind == KVP_CHANNEL) {
                on_grids(a, block, first, second, scratch.codes + i);
            } else {
                quantize(a, block, scratch.codes + i, &scratch.side);
                put_side(a, a.scale, scratch.side.scale, 1, pair, position + tile + i, 0, W);
            }
        }
        put_codes(a, scratch.codes, pair, position + tile, 0, TOKENS);
    }
}

// The tokens of one tile (not necessarily all) of one head.
void encode_tile(const kvp_encode_args &a, EncodeScratch &scratch, int64_t pair, int64_t token, int count) {
    const int64_t position = a.start + token;
    const int begin = (int)(position % TOKENS), end = begin + count, groups = groups_of(a);
    const char *rows[W];
    for (int i = begin / W * W; i < end; i += W) {
        for (int k = 0; k < W; k++) {
            const bool there = i + k >= begin && i + k < end;
            rows[k] = there ? row_of(a, pair, token + i + k - begin) : nullptr;
        }
        load_block(a, scratch.y, rows);
        quantize(a, scratch.y, scratch.codes + i, &scratch.side);
        const int from = i < begin ? begin - i : 0, to = end - i < W ? end - i : W;
        for (const auto &part : {std::make_pair(&a.scale, scratch.side.scale), std::make_pair(&a.zero, scratch.side.zero)})
            put_side(a, *part.first, part.second, groups, pair, position - begin + i + from, from, to - from);
    }
    put_codes(a, scratch.codes, pair, position - begin, begin, end);
}

} // namespace

void encode_span(const kvp_encode_args &a, Span span) {
    EncodeScratch &scratch = own_scratch<EncodeScratch>();
    for (int64_t token = span.begin; token < span.end;) {
        if (a.group > 1) {
            encode_group(a, scratch, span.pair, token);
            token += a.group;
        } else {
            const int64_t left = span.end - token, room = TOKENS - (a.start + token) % TOKENS;
            const int count = (int)(left < room ? left : room);
            encode_tile(a, scratch, span.pair, token, count);
            token += count;
        }
    }
}

void encode_few(const kvp_encode_args &a, int64_t first, int64_t last) {
    EncodeScratch &scratch = own_scratch<EncodeScratch>();
    const int groups = groups_of(a);
    for (int64_t i = first; i < last; i += W) {
        const int count = (int)(last - i < W ? last - i : W);
        const char *rows[W];
        for (int k = 0; k < W; k++) rows[k] = k < count ? row_of(a, (i + k) / a.tokens, (i + k) % a.tokens) : nullptr;
        load_block(a, scratch.y, rows);
        quantize(a, scratch.y, scratch.codes, &scratch.side);
        for (int k = 0; k < count; k++) {
            const int64_t pair = (i + k) / a.tokens, position = a.start + (i + k) % a.tokens;
            const int inside = (int)(position % TOKENS);
            char *to = codes_at(a, pair, position);
            if (a.kind == KVP_FLOAT8)
                for (int c = 0; c < a.dim; c++) to[c * TOKENS + inside] = (char)scratch.codes[c * TOKENS + k];
            else pack_one((uint32_t *)to, scratch.codes + k, a.bits, a.dim, inside, a.by_channel);
            put_side(a, a.scale, scratch.side.scale, groups, pair, position, k, 1);
            put_side(a, a.zero, scratch.side.zero, groups, pair, position, k, 1);
        }
    }
}

uint32_t largest(const void *p, int64_t count, int32_t dtype) {
    uint32_t most = 0;
    if (dtype == KVP_F32) {
        const uint32_t *x = (const uint32_t *)p;
        for (int64_t i = 0; i < count; i++) {
            const uint32_t size = x[i] & 0x7fffffff;
            most = size > most ? size : most;
        }
        return most;
    }
    const uint16_t *x = (const uint16_t *)p;
    uint16_t most16 = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint16_t size = x[i] & 0x7fff;
        most16 = size > most16 ? size : most16;
    }
    return most16;
}
} // namespace KVP_NS
