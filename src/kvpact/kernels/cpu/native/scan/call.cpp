// kvp_scan: which calls are covered, and their tasks. kvp_gather: slots that lie apart, copied.
#include <string.h>

#include "pool.h"
#include "table.h"

namespace {

constexpr int64_t SPAN = 1024; // tokens of a task

struct Scan {
    const kvp_scan_args *args;
    const Table *table;
    int64_t parts; // of a row
};

bool run_task(void *context, int64_t index) {
    const Scan *scan = (const Scan *)context;
    const int64_t begin = index % scan->parts * SPAN, end = begin + SPAN;
    return scan->table->scan_span(*scan->args, Span{index / scan->parts, begin, end < scan->args->tokens ? end : scan->args->tokens});
}

template <int64_t SIZE> void copy(char *to, const char *from, const char *next, const kvp_gather_args &a) {
    for (int64_t i = 0; i < a.pieces; i++) {
        __builtin_prefetch(next + i * a.step);
        memcpy(to + i * a.step, from + i * a.step, SIZE ? SIZE : a.size);
    }
}

struct Gather {
    const kvp_gather_args &a;
    int64_t head;
    const char *operator()(int64_t i) const {
        const uint32_t item = (uint32_t)a.items[i], unit = item / (uint32_t)a.inside, segment = unit / (uint32_t)a.segment_units;
        return a.from.base[segment] + a.row * a.from.row + head * a.from.head +
               (unit - segment * a.segment_units) * a.unit + a.places[item - unit * a.inside];
    }
};

} // namespace

int kvp_scan(int level, const kvp_scan_args *args) {
    const kvp_scan_args &a = *args;
    const Table *table = table_of(level);
    if (!table) return 1;
    if (a.dim < TILE || a.dim > MOST_DIM || a.dim % TILE || a.tokens % KVP_INDEX_GROUP || a.heads < 1) return 2;
    if (a.batch < 1 || a.queries < 1 || a.tokens < 1) return 0;
    Scan scan{args, table, (a.tokens + SPAN - 1) / SPAN};
    return kvp_parallel(a.threads, a.batch * scan.parts, run_task, &scan) ? 0 : 3;
}

int kvp_gather(const kvp_gather_args *args) {
    const kvp_gather_args &a = *args;
    constexpr int64_t AHEAD = 2; // items: processors do not guess where the next one lies
    for (int64_t h = 0; h < a.heads; h++) {
        const Gather from{a, a.head + h};
        for (int64_t i = 0; i < a.count; i++) {
            const char *next = from(i + AHEAD < a.count ? i + AHEAD : i);
            char *to = a.out + h * a.out_head + i / a.inside * a.unit + a.places[i % a.inside];
            if (a.size == 4) copy<4>(to, from(i), next, a);
            else if (a.size == 2) copy<2>(to, from(i), next, a);
            else if (a.size == 1) copy<1>(to, from(i), next, a);
            else copy<0>(to, from(i), next, a);
        }
    }
    return 0;
}
