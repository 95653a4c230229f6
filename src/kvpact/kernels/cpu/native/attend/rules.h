// What happens to scores before the softmax: softcap, masks, window, padding (attention/logits.py).
#pragma once
#include "attend/exact.h"
#include "attend/formats.h"

namespace KVP_NS {

// The scores s of query row `row` (of KV head h) and the tokens t to t + n; -inf behind them, up to
// a whole tile.
INLINE void apply_rules(const kvp_attend_args &a, int64_t b, int64_t h, int64_t row, float *s, int64_t t, int64_t n) {
    const int64_t query = row % a.queries, head = h * a.groups + row / a.queries;
    if (a.softcap > 0) soft_cap(s, n, a.softcap);
    if (a.mask) {
        const char *mask = a.mask + b * a.mask_row + head * a.mask_head + query * a.mask_query;
        if (a.mask_float)
            for (int64_t i = 0; i < n; i++) s[i] += ((const float *)mask)[t + i];
        else
            for (int64_t i = 0; i < n; i++)
                if (!mask[t + i]) s[i] = -INFINITY;
    }
    const int64_t at = a.first + query;
    int64_t low = a.window ? from(at - a.window + 1, 0) : 0, high = a.held + a.fresh;
    if (a.padding) low = from(low, a.padding[b]);
    if (a.causal) high = upto(high, at + 1);
    for (int64_t i = 0; i < upto(low - t, n); i++) s[i] = -INFINITY;
    for (int64_t i = from(high - t, 0); i < n; i++) s[i] = -INFINITY;
    for (int64_t i = n; i < whole(n, TILE); i++) s[i] = -INFINITY;
}
} // namespace KVP_NS
