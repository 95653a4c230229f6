// kvp_attend_rows: how a call with many query rows per KV head is cut into tasks.
#include "attend/rows.h"
#include "pool.h"
#include "scratch.h"
#include "table.h"

namespace {

float *task_memory(int64_t floats) {
    static thread_local Scratch scratch;
    return scratch.floats((size_t)floats);
}

constexpr int64_t CACHED = 80 << 10;      // numbers of queries and sums that a task may hold
constexpr int64_t LEAST_AT_ONCE = 64;     // rows of a task, or decoding would take most of its time
constexpr int64_t SMALL = 1 << 21;        // products that are not worth a second thread
constexpr int64_t SHORTEST = 4 * TOKENS;  // of the parts that tokens are split into

struct Call {
    const RowsJob *job;
    const Table *table;
};

bool run_task(void *context, int64_t index) {
    const Call *call = (const Call *)context;
    call->table->rows_task(*call->job, index);
    return true;
}

bool run_finish(void *context, int64_t index) {
    const Call *call = (const Call *)context;
    call->table->rows_finish(*call->job, index);
    return true;
}

} // namespace

int kvp_attend_rows(int level, const kvp_attend_args *args, int latent) {
    const kvp_attend_args &a = *args;
    const Table *table = table_of(level);
    if (!table) return 1;
    if (a.k.dim < 1 || a.v.dim < 1 || a.k.dim > MOST_DIM || a.v.dim > MOST_DIM || a.k.bits < 1 || a.v.bits < 1) return 2;
    bool failed = false;
    RowsJob job;
    job.args = args;
    job.latent = latent != 0;
    job.memory = task_memory;
    job.failed = &failed;
    job.rows = a.groups * a.queries;
    job.q_width = whole(a.k.dim, 32) + (latent ? whole(a.v.dim, 32) : 0);
    job.width = whole(job.values().dim, 32);
    // As many rows as fit into the second-level cache, equal in all parts, and enough parts for the
    // threads to share.
    int64_t most = CACHED / (job.q_width + job.width) / 16 * 16;
    most = most > MOST_AT_ONCE ? MOST_AT_ONCE : most;
    const int64_t share = a.batch * a.heads * job.rows / (4 * (a.threads > 1 ? a.threads : 1)) / 16 * 16;
    if (share < most && a.threads > 1) most = share;
    if (most < LEAST_AT_ONCE) most = LEAST_AT_ONCE;
    job.parts = (job.rows + most - 1) / most;
    job.at_once = whole((job.rows + job.parts - 1) / job.parts, 16);
    job.parts = (job.rows + job.at_once - 1) / job.at_once;
    const int64_t total = a.held + a.fresh;
    job.begin = a.window && a.first - a.window + 1 > 0 ? (a.first - a.window + 1) / TOKENS * TOKENS : 0;
    job.end = a.causal && a.first + a.queries < total ? a.first + a.queries : total;
    if (job.begin > job.end) job.begin = job.end;
    const int64_t tokens = job.end - job.begin, pairs = a.batch * a.heads, tasks = pairs * job.parts;
    const int64_t threads = tokens * pairs * job.rows * (job.q_width + job.width) < SMALL ? 1 : a.threads;
    job.splits = 1;
    if (threads > 1 && tasks % threads && tasks < 8 * threads) {
        job.splits = (4 * threads + tasks - 1) / tasks;
        const int64_t longest = tokens / SHORTEST;
        if (job.splits > longest) job.splits = longest > 1 ? longest : 1;
    }
    job.chunk = whole((tokens + job.splits - 1) / job.splits, TOKENS);
    static thread_local Scratch scratch;
    job.partial = scratch.floats((size_t)(job.splits > 1 ? tasks * job.splits * job.part_size() : 1));
    if (!job.partial) return 3;
    Call call{&job, table};
    kvp_parallel(threads, tasks * job.splits, run_task, &call);
    if (failed) return 3;
    if (job.splits > 1) kvp_parallel(threads, tasks, run_finish, &call);
    return 0;
}
