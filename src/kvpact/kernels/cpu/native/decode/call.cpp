// kvp_decode: which calls are covered, and their tasks.
#include "pool.h"
#include "table.h"

namespace {

struct Call {
    const kvp_decode_args *args;
    const Table *table;
    int64_t parts; // of a head
};

bool run_task(void *context, int64_t index) {
    const Call *call = (const Call *)context;
    const kvp_decode_args &a = *call->args;
    int64_t begin = (index % call->parts + a.first / PART) * PART, end = begin + PART;
    if (begin < a.first) begin = a.first;
    if (end > a.last) end = a.last;
    return call->table->decode_span(a, Span{index / call->parts, begin, end});
}

bool covered(const kvp_decode_args &a) {
    const kvp_stream &s = a.slots;
    if (s.dim < 1 || s.dim > MOST_DIM || s.bits < 1 || s.channels < 1 || s.segment_tokens < 32) return false;
    if (s.kind < KVP_TABLE || s.kind > KVP_TRELLIS_CODES || s.segment_tokens % 32 || !s.codes.base || !a.out) return false;
    if (s.kind <= KVP_LINEAR && (s.bits > 8 || !s.table)) return false;
    if (s.kind == KVP_TRELLIS_CODES && (!s.trellis || !s.scale.base || s.dim < 8)) return false;
    if (s.kind == KVP_RAW && (s.number < KVP_F32 || s.number > KVP_BF16)) return false;
    if (a.dtype < KVP_F32 || a.dtype > KVP_BF16 || a.first < 0 || a.last < a.first) return false;
    if (!s.fold.base && !s.shift.base) return true;
    return s.group >= 32 && s.group % 32 == 0 && s.segment_tokens % s.group == 0;
}

} // namespace

int kvp_decode(int level, const kvp_decode_args *args) {
    const kvp_decode_args &a = *args;
    const Table *table = table_of(level);
    if (!table) return 1;
    if (!covered(a)) return 2;
    const int64_t pairs = a.batch * a.heads, tokens = a.last - a.first;
    if (tokens < 1 || pairs < 1) return 0;
    Call call{args, table, (a.last - 1) / PART - a.first / PART + 1};
    return kvp_parallel(kvp_threads(a.threads, pairs * tokens * a.slots.dim), pairs * call.parts, run_task, &call) ? 0 : 3;
}
