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

// Copies a run of items of one unit piece by piece, so that a unit's cache lines are read in order, and each once.
template <int64_t SIZE> void copy(const kvp_gather_args &a, char *const *to, const char *const *from, int64_t count, const char *next) {
    for (int64_t i = 0; i < a.pieces; i++) {
        __builtin_prefetch(next + i * a.step);
        for (int64_t k = 0; k < count; k++) memcpy(to[k] + i * a.step, from[k] + i * a.step, SIZE ? SIZE : a.size);
    }
}

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
    constexpr int64_t MOST = TILE; // items of a run
    if (!a.count) return 0;
    const char *from[MOST];
    char *to[MOST];
    const auto unit = [&](int64_t h, uint32_t unit) { // where a unit lies
        const uint32_t segment = unit / (uint32_t)a.segment_units;
        return a.from.base[segment] + a.row * a.from.row + h * a.from.head + (unit - segment * a.segment_units) * a.unit;
    };
    for (int64_t h = 0; h < a.heads; h++) {
        char *out = a.out + h * a.out_head;
        const char *next = unit(a.head + h, (uint32_t)a.items[0] / (uint32_t)a.inside);
        for (int64_t first = 0, end, place = 0; first < a.count; first = end) {
            const char *base = next;
            const int64_t begin = (uint32_t)a.items[first] / (uint32_t)a.inside * a.inside;
            for (end = first; end < a.count && end - first < MOST && a.items[end] < begin + a.inside; end++) {
                from[end - first] = base + a.places[a.items[end] - begin];
                to[end - first] = out + a.places[place];
                if (++place == a.inside) out += a.unit, place = 0;
            }
            if (end < a.count) next = unit(a.head + h, (uint32_t)a.items[end] / (uint32_t)a.inside);
            if (a.size == 4) copy<4>(a, to, from, end - first, next);
            else if (a.size == 2) copy<2>(a, to, from, end - first, next);
            else if (a.size == 1) copy<1>(a, to, from, end - first, next);
            else copy<0>(a, to, from, end - first, next);
        }
    }
    return 0;
}
