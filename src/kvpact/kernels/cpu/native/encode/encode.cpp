// Encodes tokens into slots: in tiles of 32 tokens of one head, or few tokens of many heads.
#include "encode/balance.h"
#include "encode/keys.h"
#include "encode/pack.h"
#include "encode/quantize.h"
#include "scratch.h"
#include "table.h"

namespace KVP_NS {
namespace {

struct EncodeScratch {
    alignas(64) float y[MOST_DIM * MOST_GROUP]; // [tokens / W][channel][W]
    alignas(64) uint8_t codes[MOST_DIM * TILE];  // [channel][32]
    alignas(64) Side side;
    TrellisScratch *trellis;
};
// The thread's, with what the kind of codes needs; NULL: there is no memory.
EncodeScratch *scratch_of(const kvp_encode_args &a) {
    EncodeScratch *own = own_scratch<EncodeScratch>();
#if defined(KVP_AVX512)
    if (own && a.kind == KVP_CODEBOOK && a.bits == 4) own->side.cells.fill(a.steps);
#endif
    if (!own || a.kind != KVP_TRELLIS) return own;
    own->trellis = own_scratch<TrellisScratch>();
    if (!own->trellis) return nullptr;
    if (!a.by_channel) own->trellis->places.fill(*a.trellis);
    return own;
}

// Where the unit of a field lies that `position` is in.
char *place(const kvp_encode_args &a, const kvp_field &field, int64_t pair, int64_t position, int64_t tokens, int64_t bytes) {
    const int64_t segment = position / a.segment_tokens, first = a.start / a.segment_tokens;
    const int64_t unit = (position - segment * a.segment_tokens) / tokens;
    char *base = (char *)field.base[segment - first];
    return base + pair / a.heads * field.row + pair % a.heads * field.head + unit * bytes;
}
char *codes_at(const kvp_encode_args &a, int64_t pair, int64_t position) {
    const bool by_token = a.kind != KVP_FLOAT8 && !a.by_channel;
    int64_t bytes = tile_bytes(a.bits, a.dim, by_token);
    if (by_token && a.kind == KVP_TRELLIS) bytes = (int64_t)words_per_token(*a.trellis) * TILE * 4;
    return place(a, a.codes, pair, position, TILE, bytes);
}
// Scales of a token.
int scales_of(const kvp_encode_args &a) {
    if (a.kind == KVP_CHANNEL) return 0;
    return a.kind == KVP_SYMMETRIC || a.kind == KVP_AFFINE ? channel_groups(a.dim, a.channels) : 1;
}
const char *row_of(const kvp_encode_args &a, int64_t pair, int64_t token) {
    return a.x.data + pair / a.heads * a.x.row + pair % a.heads * a.x.head + token * a.x.token;
}

// fp16 numbers of `count` lanes from `lane` on to the tokens from `token` of a tile on.
void put_side(const kvp_encode_args &a, const kvp_field &field, const uint16_t *numbers, int groups, int64_t pair,
              int64_t position, int lane, int count) {
    if (!field.base) return;
    char *tile = place(a, field, pair, position, TILE, (int64_t)groups * TILE * 2);
    for (int g = 0; g < groups; g++)
        memcpy(tile + (g * TILE + position % TILE) * 2, numbers + g * W + lane, (size_t)count * 2);
}

// Scales and zeros of `count` lanes.
void put_sides(const kvp_encode_args &a, const EncodeScratch &scratch, int64_t pair, int64_t position, int lane, int count) {
    if (a.kind == KVP_TRELLIS) {
        char *tile = place(a, a.scale, pair, position, TILE, TILE);
        memcpy(tile + position % TILE, scratch.trellis->scale + lane, (size_t)count);
        return;
    }
    const int groups = scales_of(a);
    put_side(a, a.scale, scratch.side.scale, groups, pair, position, lane, count);
    put_side(a, a.zero, scratch.side.zero, groups, pair, position, lane, count);
}

// The codes of the tokens begin <= i < end of a tile into place.
void put_codes(const kvp_encode_args &a, EncodeScratch &scratch, int64_t pair, int64_t tile, int begin, int end) {
    uint8_t *codes = scratch.codes;
    if (begin > 0 || end < TILE) {
        uint8_t keep[TILE] = {};
        memset(keep + begin, 0xff, (size_t)(end - begin));
        for (int c = 0; c < a.dim; c++)
            for (int i = 0; i < TILE; i++) codes[c * TILE + i] &= keep[i];
    }
    char *to = codes_at(a, pair, tile);
    if (a.kind == KVP_FLOAT8)
        for (int c = 0; c < a.dim; c++) memcpy(to + c * TILE + begin, codes + c * TILE + begin, (size_t)(end - begin));
    else if (a.kind == KVP_TRELLIS && a.by_channel) pack_interleaved((uint32_t *)to, codes, a.bits, a.dim, a.trellis->interleave);
    else if (a.kind == KVP_TRELLIS) pack_placed((uint32_t *)to, codes, scratch.trellis->places);
    else if (a.by_channel) pack_by_channel((uint32_t *)to, codes, a.bits, a.dim);
    else pack_by_token((uint32_t *)to, codes, a.bits, a.dim);
}

// The codes of one token into its tile.
void put_one(const kvp_encode_args &a, const EncodeScratch &scratch, char *tile, int token, const uint8_t *codes) {
    uint32_t *words = (uint32_t *)tile;
    if (a.kind == KVP_FLOAT8)
        for (int c = 0; c < a.dim; c++) tile[c * TILE + token] = (char)codes[c * TILE];
    else if (a.kind == KVP_TRELLIS && a.by_channel) pack_one_interleaved(words, codes, a.bits, a.dim, a.trellis->interleave, token);
    else if (a.kind == KVP_TRELLIS) pack_one_placed(words, codes, scratch.trellis->places, token);
    else pack_one(words, codes, a.bits, a.dim, token, a.by_channel);
}

// Mean of each channel over `count` tokens, summed as a tree over tokens; taken out of y.
void centre(const kvp_encode_args &a, float *y, int count, uint16_t *mean) {
    const int blocks = count / W, stride = a.dim * W;
    for (int c = 0; c < a.dim; c++) {
        vf part[MOST_GROUP / W];
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
        store_codes(codes + c * TILE, on_grid(load(y + c * W), zero_point, inverse, (1 << a.bits) - 1));
    }
}

void prefetch_row(const char *row, int bytes) {
    for (int i = 0; i < bytes; i += 64) prefetch(row + i);
}
void load_block(const kvp_encode_args &a, float *y, const char *const *rows) {
    load_lanes(y, rows, a.dim, a.dtype, a.signs);
    if (a.signs) rotate_lanes(y, a.signs, a.dim);
}

// y is rotated and less its mean.
void quantize_block(const kvp_encode_args &a, EncodeScratch &scratch, float *y, uint8_t *codes) {
    if (a.kind == KVP_TRELLIS) trellis_vectors(a, y, codes, scratch.side, *scratch.trellis);
    else quantize(a, y, codes, &scratch.side);
}

// Numbers per token from the group's first token on, of one of its tiles.
void put_tile(const kvp_encode_args &a, const kvp_field &field, const uint16_t *numbers, int64_t pair, int64_t position,
              int tile) {
    memcpy(place(a, field, pair, position + tile, TILE, TILE * 2), numbers + tile, TILE * 2);
}
void put_group(const kvp_encode_args &a, const kvp_field &field, const uint16_t *numbers, int64_t pair, int64_t position) {
    memcpy(place(a, field, pair, position, a.group, a.dim * 2), numbers, (size_t)a.dim * 2);
}
bool encode_balanced(const kvp_encode_args &a, EncodeScratch &scratch, int64_t pair, int64_t position) {
    Balance *balance = own_scratch<Balance>();
    if (!balance) return false;
    const BalancedTile whole(a, *balance, scratch.side);
    const Balance &found = *balance;
    const bool any = whole.encode(scratch.y);
    if (whole.keys()) {
        put_group(a, a.scale, found.scale, pair, position);
        put_group(a, a.zero, found.zero, pair, position);
    } else {
        put_group(a, a.balance, found.column_half, pair, position);
    }
    for (int tile = 0; tile < a.group; tile += TILE) {
        if (whole.keys()) {
            put_tile(a, a.balance, found.column_half, pair, position, tile);
        } else {
            put_tile(a, a.scale, found.scale, pair, position, tile);
            put_tile(a, a.zero, found.zero, pair, position, tile);
        }
        if (!any) continue; // codes of zero
        for (int i = 0; i < TILE; i += W) whole.codes((tile + i) / W, scratch.codes + i);
        put_codes(a, scratch, pair, position + tile, 0, TILE);
    }
    return true;
}

// The bases of `count` tokens, from the lane of the first one on.
void put_bases(const kvp_encode_args &a, Ints flag, int64_t pair, int64_t position, int lane, int count) {
    if (!a.base.base) return;
    uint32_t *words = (uint32_t *)place(a, a.base, pair, position, TILE, 8);
    for (int i = 0; i < count; i++) {
        const int inside = (int)(position % TILE) + i;
        words[inside / 16] |= (uint32_t)flag[lane + i] << inside % 16 * 2;
    }
}
void encode_keys(const kvp_encode_args &a, EncodeScratch &scratch, int64_t pair, int64_t position) {
    const Keys keys(*a.trellis, a.dim, scratch.side, pair % a.heads);
    const TileMean mean(keys, scratch.y, a.group);
    memcpy(place(a, a.mean, pair, position, a.group, a.dim), mean.whole, (size_t)a.dim);
    memcpy(place(a, a.step, pair, position, a.group, 2), &mean.step, 2);
    for (int tile = 0; tile < a.group; tile += TILE) {
        for (int i = 0; i < TILE; i += W) {
            const int b = (tile + i) / W;
            const float *block = scratch.y + b * a.dim * W;
            const Ints flag = mean.bases(block, b);
            put_bases(a, flag, pair, position + tile + i, 0, W);
            keys.rotated(scratch.trellis->y, block, flag, mean.mean);
            quantize_block(a, scratch, scratch.trellis->y, scratch.codes + i);
            put_sides(a, scratch, pair, position + tile + i, 0, W);
        }
        put_codes(a, scratch, pair, position + tile, 0, TILE);
    }
}

// A whole group of tokens of one head.
bool encode_group(const kvp_encode_args &a, EncodeScratch &scratch, int64_t pair, int64_t token) {
    const int count = a.group;
    const int64_t position = a.start + token;
    float *y = scratch.y;
    const char *rows[W];
    for (int b = 0; b < count / W; b++) {
        for (int i = 0; i < W; i++) rows[i] = row_of(a, pair, token + b * W + i);
        load_block(a, y + b * a.dim * W, rows);
    }
    if (position < a.sinks) {
        float mean[MOST_DIM];
        leave_out(y, a.dim, count, (int)(a.sinks - position), a.dtype, mean);
    }
    if (a.kind == KVP_BALANCED) return encode_balanced(a, scratch, pair, position);
    if (a.kind == KVP_TRELLIS) {
        encode_keys(a, scratch, pair, position);
        return true;
    }
    uint16_t first[MOST_DIM], second[MOST_DIM];
    if (a.kind == KVP_CHANNEL) {
        grids(a, y, count, first, second);
        put_group(a, a.scale, first, pair, position);
        put_group(a, a.zero, second, pair, position);
    } else {
        centre(a, y, count, first);
        put_group(a, a.mean, first, pair, position);
    }
    for (int tile = 0; tile < count; tile += TILE) {
        for (int i = 0; i < TILE; i += W) {
            float *block = y + (tile + i) / W * a.dim * W;
            if (a.kind == KVP_CHANNEL) {
                on_grids(a, block, first, second, scratch.codes + i);
            } else {
                quantize(a, block, scratch.codes + i, &scratch.side);
                put_side(a, a.scale, scratch.side.scale, 1, pair, position + tile + i, 0, W);
            }
        }
        put_codes(a, scratch, pair, position + tile, 0, TILE);
    }
    return true;
}

// The tokens of one tile (not necessarily all) of one head.
void encode_tile(const kvp_encode_args &a, EncodeScratch &scratch, int64_t pair, int64_t token, int count) {
    const int64_t position = a.start + token;
    const int begin = (int)(position % TILE), end = begin + count;
    const int row_bytes = a.dim * (a.dtype == KVP_F32 ? 4 : 2);
    const char *rows[W];
    for (int i = begin / W * W; i < end; i += W) {
        for (int k = 0; k < W; k++) {
            const bool there = i + k >= begin && i + k < end;
            rows[k] = there ? row_of(a, pair, token + i + k - begin) : nullptr;
        }
        load_block(a, scratch.y, rows);
        // The next ones come while these are quantized: tokens lie too far apart to be foreseen.
        for (int k = 0; k < W; k++)
            if (rows[k] && token + i + k - begin + W < a.tokens) prefetch_row(rows[k] + W * a.x.token, row_bytes);
        const int from = i < begin ? begin - i : 0, to = end - i < W ? end - i : W;
        const int64_t at = position - begin + i + from;
        float *y = scratch.y;
        if (a.kind == KVP_TRELLIS && !a.signs) {
            const Keys keys(*a.trellis, a.dim, scratch.side, pair % a.heads);
            const Ints flag = keys.bases(y);
            put_bases(a, flag, pair, at, from, to - from);
            y = scratch.trellis->y;
            keys.rotated(y, scratch.y, flag, nullptr);
        }
        quantize_block(a, scratch, y, scratch.codes + i);
        put_sides(a, scratch, pair, at, from, to - from);
    }
    put_codes(a, scratch, pair, position - begin, begin, end);
}

} // namespace

static bool encode_span(const kvp_encode_args &a, Span span) {
    EncodeScratch *own = scratch_of(a);
    if (!own) return false;
    EncodeScratch &scratch = *own;
    for (int64_t token = span.begin; token < span.end;) {
        if (a.group > 1) {
            if (!encode_group(a, scratch, span.pair, token)) return false;
            token += a.group;
        } else {
            const int64_t left = span.end - token, room = TILE - (a.start + token) % TILE;
            const int count = (int)(left < room ? left : room);
            encode_tile(a, scratch, span.pair, token, count);
            token += count;
        }
    }
    return true;
}

static bool encode_few(const kvp_encode_args &a, int64_t first, int64_t last) {
    EncodeScratch *own = scratch_of(a);
    if (!own) return false;
    EncodeScratch &scratch = *own;
    for (int64_t i = first; i < last; i += W) {
        const int count = (int)(last - i < W ? last - i : W);
        const char *rows[W];
        for (int k = 0; k < W; k++) rows[k] = k < count ? row_of(a, (i + k) / a.tokens, (i + k) % a.tokens) : nullptr;
        load_block(a, scratch.y, rows);
        quantize_block(a, scratch, scratch.y, scratch.codes);
        for (int k = 0; k < count; k++) {
            const int64_t pair = (i + k) / a.tokens, position = a.start + (i + k) % a.tokens;
            const int inside = (int)(position % TILE);
            put_one(a, scratch, codes_at(a, pair, position), inside, scratch.codes + k);
            put_sides(a, scratch, pair, position, k, 1);
        }
    }
    return true;
}

static uint32_t largest(const void *p, int64_t count, int32_t dtype) {
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

// As many numbers as a vector has can be read after the last one.
static void narrow(char *to, const float *from, int64_t count, int32_t dtype) {
    const int64_t size = dtype == KVP_F32 ? 4 : 2;
    for (int64_t i = 0; i < count; i += W) {
        char part[4 * W];
        const bool whole = i + W <= count;
        store_numbers(whole ? to + i * size : part, load(from + i), dtype);
        if (!whole) memcpy(to + i * size, part, (size_t)((count - i) * size));
    }
}

void fill_encode(Table &table) {
    table.narrow = narrow;
    table.encode_span = encode_span;
    table.encode_few = encode_few;
    table.largest = largest;
}
} // namespace KVP_NS
