#include <stdlib.h>

#include "pool.h"
#include "rows.h"

namespace {

enum { BASE = 1, AVX2 = 2, AVX512 = 4, NEON = 8 };

struct Level {
    void (*task)(const RowsJob &, int64_t);
    void (*finish)(const RowsJob &, int64_t);
};

Level level_of(int level) {
#if defined(KVP_X86)
    if (level == AVX512) return {kvp_avx512::rows_task, kvp_avx512::rows_finish};
    if (level == AVX2) return {kvp_avx2::rows_task, kvp_avx2::rows_finish};
#elif defined(KVP_ARM)
    if (level == NEON) return {kvp_neon::rows_task, kvp_neon::rows_finish};
#endif
    (void)level;
    return {kvp_base::rows_task, kvp_base::rows_finish};
}

// Memory of a thread, kept for its next task.
struct Memory {
    void *data = nullptr;
    size_t size = 0;
    ~Memory() { free(data); }
    float *get(int64_t floats) {
        const size_t bytes = ((size_t)floats * sizeof(float) + 4095) / 4096 * 4096;
        if (bytes > size) {
            free(data);
            data = aligned_alloc(4096, bytes);
            size = data ? bytes : 0;
        }
        return (float *)data;
    }
};

float *task_memory(int64_t floats) {
    static thread_local Memory memory;
    return memory.get(floats);
}

constexpr int64_t CACHED = 80 << 10;      // numbers of queries and sums that a task may hold
constexpr int64_t SMALL = 1 << 21;        // products that are not worth a second thread
constexpr int64_t SHORTEST = 4 * TOKENS;  // of the parts that tokens are split into

struct Call {
    const RowsJob *job;
    Level level;
};

void run_task(void *context, int64_t index) {
    const Call *call = (const Call *)context;
    call->level.task(*call->job, index);
}

void run_finish(void *context, int64_t index) {
    const Call *call = (const Call *)context;
    call->level.finish(*call->job, index);
}

int64_t whole(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

} // namespace

int kvp_attend_rows(int level, const kvp_attend_args *args, int latent) {
    const kvp_attend_args &a = *args;
    if (!(kvp_levels() & level)) return 1;
    if (a.k.dim < 1 || a.v.dim < 1 || a.k.dim > 1024 || a.v.dim > 1024 || a.k.bits < 1 || a.v.bits < 1) return 2;
    bool failed = false;
    RowsJob job;
    job.args = args;
    job.latent = latent != 0;
    job.memory = task_memory;
    job.failed = &failed;
    job.rows = a.groups * a.queries;
    job.q_width = whole(a.k.dim, 32) + (latent ? whole(a.v.dim, 32) : 0);
    job.width = whole(job.values().dim, 32);
    // As many rows as fit into the second-level cache, alike in all parts.
    int64_t most = CACHED / (job.q_width + job.width) / 16 * 16;
    most = most < 64 ? 64 : most > MOST_AT_ONCE ? MOST_AT_ONCE : most;
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
    static thread_local Memory memory;
    job.partial = memory.get(job.splits > 1 ? tasks * job.splits * job.part_size() : 1);
    if (!job.partial) return 3;
    Call call{&job, level_of(level)};
    kvp_parallel(threads, tasks * job.splits, run_task, &call);
    if (failed) return 3;
    if (job.splits > 1) kvp_parallel(threads, tasks, run_finish, &call);
    return 0;
}
