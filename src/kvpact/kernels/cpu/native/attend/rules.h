// What happens to scores before the softmax: softcap, masks, window, padding (kernels/torch/logits.py).
#pragma once
#include "attend/exact.h"
#include "attend/formats.h"

namespace KVP_NS {

// Softcap and mask for the scores s of a query and the tokens t + low to t + high.
INLINE void cap_and_mask(const kvp_attend_args &a, int64_t b, int64_t head, int64_t query, float *s, int64_t t,
                         int64_t low, int64_t high) {
    if (low >= high) return;
    if (a.softcap > 0) soft_cap(s + low, high - low, a.softcap);
    if (!a.mask) return;
    const char *mask = a.mask + b * a.mask_row + head * a.mask_head + query * a.mask_query;
    if (a.mask_float)
        for (int64_t i = low; i < high; i++) s[i] += ((const float *)mask)[t + i];
    else
        for (int64_t i = low; i < high; i++)
            if (!mask[t + i]) s[i] = -INFINITY;
}

// The scores s of query row `row` (of KV head h) and the tokens t to t + n; -inf after them, up to
// a whole tile.
INLINE void apply_rules(const kvp_attend_args &a, int64_t b, int64_t h, int64_t row, float *s, int64_t t, int64_t n) {
    const int64_t query = row % a.queries, head = h * a.groups + row / a.queries;
    cap_and_mask(a, b, head, query, s, t, 0, n);
    const int64_t at = a.first + query;
    int64_t low = a.window ? from(at - a.window + 1, 0) : 0, high = a.held + a.fresh;
    if (a.padding) low = from(low, a.padding[b]);
    if (a.causal) high = upto(high, at + 1);
    for (int64_t i = 0; i < upto(low - t, n); i++) s[i] = -INFINITY;
    for (int64_t i = from(high - t, 0); i < n; i++) s[i] = -INFINITY;
    for (int64_t i = n; i < whole(n, TILE); i++) s[i] = -INFINITY;
}
} // namespace KVP_NS
