// kvp_attend: what a call needs, and how it is cut into tasks.
#include <algorithm>
#include <atomic>
#include <vector>

#include "pool.h"
#include "scratch.h"
#include "table.h"

namespace {

constexpr int64_t TASKS = 2; // of a thread, where there are heads enough

// All calls of one kvp_attend; tasks are counted through.
struct Batch {
    std::vector<Job> jobs;
    std::vector<int64_t> first; // task of each job
    const Table *table;
};

bool run_task(void *context, int64_t index) {
    const Batch &batch = *(const Batch *)context;
    size_t i = 0;
    if (batch.jobs.size() > 1)
        i = (size_t)(std::upper_bound(batch.first.begin(), batch.first.end(), index) - batch.first.begin()) - 1;
    return batch.table->task(batch.jobs[i], index - batch.first[i]);
}

struct Reading {
    const Table *table;
    const char *const *data;
    int64_t bytes;
    std::atomic<uint64_t> sum;
};

bool read_one(void *context, int64_t index) {
    Reading *reading = (Reading *)context;
    reading->sum += reading->table->read(reading->data[index], reading->bytes);
    return true;
}

int64_t row_bytes(const kvp_stream &s) { return (int64_t)s.bits * s.dim / 8; }

// Finds out which tokens any query of a call sees.
void see(Job &job, const kvp_attend_args &a) {
    job.args = &a;
    job.rows = a.groups * a.queries;
    job.k_width = whole(a.k.dim, TILE);
    job.v_width = whole(a.v.dim, TILE);
    // What is prefetched of wide slots would drive out what is read.
    job.block = row_bytes(a.k) + row_bytes(a.v) > 192 ? BLOCK / 2 : BLOCK;
    const int64_t total = a.held + a.fresh;
    job.begin = 0;
    if (a.window) job.begin = a.first - a.window + 1 > 0 ? a.first - a.window + 1 : 0;
    job.end = a.causal && a.first + a.queries < total ? a.first + a.queries : total;
    job.begin = job.begin / BLOCK * BLOCK;
    if (job.begin > job.end) job.begin = job.end;
}

// Cuts a call's heads and tokens, so that threads that begin late or go slowly leave the rest to
// others. Tokens are cut as little as may be: each part's sums have to be fetched from its thread.
void split(Job &job, int64_t threads, int64_t rows) {
    const int64_t tokens = job.end - job.begin, most = tokens / (4 * BLOCK);
    job.splits = 1;
    job.heads = job.args->heads;
    if (threads > 1) {
        job.splits = (threads + rows - 1) / rows;
        if (job.splits > most) job.splits = most > 1 ? most : 1;
        const int64_t parts = (TASKS * threads - 1) / (job.splits * rows) + 1;
        job.heads = (job.heads + parts - 1) / parts;
    }
    job.chunk = whole((tokens + job.splits - 1) / job.splits, BLOCK);
    if (job.chunk < BLOCK) job.chunk = BLOCK;
}

} // namespace

int kvp_attend(int level, const kvp_attend_args *args, int64_t count) {
    const Table *table = table_of(level);
    if (!table) return 1;
    static thread_local Batch batch;
    static thread_local Scratch scratch;
    try {
        batch.jobs.resize((size_t)count);
        batch.first.resize((size_t)count);
    } catch (...) {
        return 3;
    }
    batch.table = table;
    int64_t bytes = 0, rows = 0;
    for (int64_t i = 0; i < count; i++) {
        const kvp_attend_args &a = args[i];
        const kvp_stream &k = a.k, &v = a.v;
        if (k.dim < 1 || v.dim < 1 || k.dim > MOST_DIM || v.dim > MOST_DIM || k.bits < 1 || v.bits < 1) return 2;
        Job &job = batch.jobs[(size_t)i];
        see(job, a);
        job.whole_size = table->whole_query(job);
        bytes += (job.end - job.begin) * job.pairs() * (row_bytes(k) + row_bytes(v));
        rows += a.batch;
    }
    const int64_t threads = count < 1 || bytes < (256 << 10) ? 1 : args[0].threads;
    int64_t tasks = 0, floats = 0;
    for (int64_t i = 0; i < count; i++) {
        Job &job = batch.jobs[(size_t)i];
        split(job, threads, rows);
        batch.first[(size_t)i] = tasks;
        tasks += job.tasks();
        floats += job.floats();
    }
    float *memory = scratch.floats((size_t)floats);
    if (!memory) return 3;
    for (Job &job : batch.jobs) {
        job.q = memory;
        job.rotated = job.rotates() ? job.q + job.pairs() * job.q_size() : job.q;
        job.partial = job.rotated + job.pairs() * job.q_size();
        job.whole = job.partial + job.pairs() * job.splits * job.partial_size();
        memory += job.floats();
        batch.table->prepare(job);
    }
    if (!kvp_parallel(threads, tasks, run_task, &batch)) return 3;
    for (const Job &job : batch.jobs) batch.table->finish(job);
    return 0;
}

uint64_t kvp_read(int level, int64_t threads, int64_t count, const char *const *data, int64_t bytes) {
    const Table *table = table_of(level);
    if (!table) return 0;
    Reading reading{table, data, bytes, {0}};
    kvp_parallel(threads, count, read_one, &reading);
    return reading.sum;
}
