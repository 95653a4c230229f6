#include <atomic>
#include <stdlib.h>
#include <string.h>

#include "job.h"
#include "pool.h"

namespace {

enum { BASE = 1, AVX2 = 2, AVX512 = 4, NEON = 8 };

// Scratch memory of a thread, kept for its next call.
struct Scratch {
    void *data = nullptr;
    size_t size = 0;
    ~Scratch() { free(data); }
    float *get(size_t floats) {
        const size_t bytes = (floats * sizeof(float) + 4095) / 4096 * 4096;
        if (bytes > size) {
            free(data);
            data = aligned_alloc(4096, bytes);
            size = data ? bytes : 0;
        }
        return (float *)data;
    }
};

struct Level {
    void (*prepare)(const Job &);
    void (*task)(const Job &, int64_t);
    void (*finish)(const Job &);
    uint64_t (*read)(const char *, int64_t);
};

Level level_of(int level) {
#if defined(KVP_X86)
    if (level == AVX512) return {kvp_avx512::prepare, kvp_avx512::task, kvp_avx512::finish, kvp_avx512::read};
    if (level == AVX2) return {kvp_avx2::prepare, kvp_avx2::task, kvp_avx2::finish, kvp_avx2::read};
#elif defined(KVP_ARM)
    if (level == NEON) return {kvp_neon::prepare, kvp_neon::task, kvp_neon::finish, kvp_neon::read};
#endif
    return {kvp_base::prepare, kvp_base::task, kvp_base::finish, kvp_base::read};
}

struct Call {
    const Job *job;
    Level level;
};

void run_task(void *context, int64_t index) {
    const Call *call = (const Call *)context;
    call->level.task(*call->job, index);
}

struct Reading {
    Level level;
    const char *const *data;
    int64_t bytes;
    std::atomic<uint64_t> sum;
};

void read_one(void *context, int64_t index) {
    Reading *reading = (Reading *)context;
    reading->sum += reading->level.read(reading->data[index], reading->bytes);
}

int64_t row_bytes(const kvp_stream &s) { return (int64_t)s.bits * s.dim / 8; }

} // namespace

int kvp_abi(void) { return KVP_ABI; }

int kvp_levels(void) {
    int found = BASE;
#if defined(KVP_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        found |= AVX2;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512vnni"))
            found |= AVX512;
    }
#elif defined(KVP_ARM)
    found |= NEON; // part of every AArch64
#endif
    return found;
}

int kvp_attend(int level, const kvp_attend_args *args) {
    const kvp_attend_args &a = *args;
    const kvp_stream &k = a.k, &v = a.v;
    if (!(kvp_levels() & level)) return 1;
    if (k.dim < 1 || v.dim < 1 || k.dim > 1024 || v.dim > 1024 || k.bits < 1 || v.bits < 1) return 2;
    Job job;
    job.args = args;
    job.rows = a.groups * a.queries;
    job.k_width = (k.dim + 31) / 32 * 32;
    job.v_width = (v.dim + 31) / 32 * 32;
    const int64_t total = a.held + a.fresh;
    job.begin = 0;
    if (a.window) job.begin = a.first - a.window + 1 > 0 ? a.first - a.window + 1 : 0;
    job.end = a.causal && a.first + a.queries < total ? a.first + a.queries : total;
    job.begin = job.begin / BLOCK * BLOCK;
    if (job.begin > job.end) job.begin = job.end;
    const int64_t tokens = job.end - job.begin, pairs = a.batch * a.heads;
    const int64_t bytes = tokens * pairs * (row_bytes(k) + row_bytes(v));
    int64_t threads = bytes < (256 << 10) ? 1 : a.threads;
    job.splits = 1;
    if (threads > 1 && pairs % threads) {
        job.splits = (4 * threads + pairs - 1) / pairs;
        const int64_t most = tokens / (4 * BLOCK);
        if (job.splits > most) job.splits = most > 1 ? most : 1;
    }
    job.chunk = ((tokens + job.splits - 1) / job.splits + BLOCK - 1) / BLOCK * BLOCK;
    if (job.chunk < BLOCK) job.chunk = BLOCK;
    const int64_t q_size = pairs * job.q_size();
    const int64_t rotated = k.signs ? q_size : 0;
    const int64_t partial = pairs * job.splits * job.partial_task();
    static thread_local Scratch scratch;
    job.q = scratch.get((size_t)(q_size + rotated + partial));
    if (!job.q) return 3;
    job.rotated = job.q + rotated;
    job.partial = job.q + q_size + rotated;
    Call call{&job, level_of(level)};
    call.level.prepare(job);
    kvp_parallel(threads, pairs * job.splits, run_task, &call);
    call.level.finish(job);
    return 0;
}

uint64_t kvp_read(int level, int64_t threads, int64_t count, const char *const *data, int64_t bytes) {
    Reading reading{level_of(level), data, bytes, {0}};
    kvp_parallel(threads, count, read_one, &reading);
    return reading.sum;
}
