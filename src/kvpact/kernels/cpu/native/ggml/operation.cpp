#include "ggml/operation.h"

#include <initializer_list>
#include <new>
#include <stdlib.h>
#include <string.h>

#include "ggml/job.h"
#include "ggml/loaded.h"
#if defined(KVP_X86)
#include "processor.h"
#endif

namespace kvp_base { GgmlKernels ggml_kernels(); }
#if defined(KVP_X86)
namespace kvp_avx2 { GgmlKernels ggml_kernels(); }   // perhaps not compiled
namespace kvp_avx512 { GgmlKernels ggml_kernels(); }
#elif defined(KVP_ARM)
namespace kvp_neon { GgmlKernels ggml_kernels(); }
#endif

using ggml_abi::Attention;

namespace {

constexpr int64_t FEW_ROWS = 32;         // of a KV head: parts of tokens, not of rows, are shared out
constexpr int64_t LEAST_TOKENS = 512;    // fewer are not worth the change of backends
constexpr int64_t LEAST_PART = 256;      // tokens
constexpr int64_t LEAST_WORK = 1 << 17;  // products that are worth more than one thread
constexpr std::align_val_t ALIGNMENT{64};

bool asked(const char *name) {
    const char *value = getenv(name);
    return value && strcmp(value, "1") == 0;
}

int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t parts_of(int64_t all, int64_t size) { return (all + size - 1) / size; }

Job job_of(const Attention &op) {
    Job job;
    job.q = &op.q, job.k = &op.k, job.v = &op.v, job.out = &op.out;
    job.mask = op.has_mask ? &op.mask : nullptr, job.sinks = op.has_sinks ? &op.sinks : nullptr;
    job.k_dim = job.k->ne[0], job.v_dim = job.v->ne[0], job.queries = job.q->ne[1], job.heads = job.k->ne[2];
    job.groups = job.q->ne[2] / job.heads, job.tokens = job.k->ne[1], job.streams = job.q->ne[3];
    job.shared = job.q->ne[3] / job.k->ne[3];
    job.scale = op.scale, job.bias = op.bias, job.softcap = op.softcap;
    if (job.softcap != 0) job.scale /= job.softcap;
    job.sloped = 1;
    while (job.sloped * 2 <= job.q->ne[2]) job.sloped *= 2;
    job.slopes = powf(2, -job.bias / (float)job.sloped);
    job.more_slopes = powf(2, -job.bias / 2 / (float)job.sloped);
    return job;
}

// Tokens of each head in parts, one task each.
struct Few {
    const Job &job;
    int64_t parts, length, rows, size;
    float *memory;

    Sums sums(int64_t i) const {
        float *p = memory + i * size;
        return {p, p + rows, p + (2 * rows + 15) / 16 * 16};
    }
};

bool few(const Job &job, const GgmlKernels &use, int64_t threads, Parts &memory) {
    const int64_t rows = job.queries * job.groups, width = padded(job.v_dim);
    if (job.tokens * job.heads * (job.k_dim + job.v_dim) * rows < LEAST_WORK) threads = 1;
    const int64_t wanted = threads == 1 ? 1 : lesser(greater(1, job.tokens / LEAST_PART), parts_of(4 * threads, job.streams));
    const int64_t length = parts_of(parts_of(job.tokens, wanted), TOKENS) * TOKENS, parts = parts_of(job.tokens, length);
    Few all = {job, parts, length, job.heads * rows, 0, nullptr};
    all.size = (2 * all.rows + 15) / 16 * 16 + all.rows * width;
    all.memory = memory.get((size_t)(job.streams * parts * all.size));
    if (!all.memory) return false;
    struct Call {
        const Few &all;
        const GgmlKernels &use;
    } call = {all, use};
    const auto work = [](void *data, int64_t i) {
        const Few &a = ((Call *)data)->all;
        const int64_t from = i % a.parts * a.length;
        return ((Call *)data)->use.part(a.job, i / a.parts, from, lesser(from + a.length, a.job.tokens), a.sums(i));
    };
    if (!on_threads(threads, job.streams * parts, work, &call)) return false;
    for (int64_t s = 0; s < job.streams; s++)
        for (int64_t r = 0; r < all.rows; r++) {
            Sums first = all.sums(s * parts);
            first.peak += r, first.total += r, first.acc += r * width;
            use.merge(job, s, r / rows, r % rows, parts, all.size, first);
        }
    return true;
}

bool many(const Job &job, const GgmlKernels &use, int64_t threads) {
    struct Call {
        const Job &job;
        const GgmlKernels &use;
        int64_t rows, chunks;
    } call = {job, use, job.queries * job.groups, parts_of(job.queries * job.groups, MOST_ROWS)};
    const auto work = [](void *data, int64_t i) {
        const Call &c = *(Call *)data;
        const int64_t first = (c.chunks - 1 - i % c.chunks) * MOST_ROWS; // the last ones see most
        return c.use.rows(c.job, {i / c.chunks / c.job.heads, i / c.chunks % c.job.heads, first, lesser(MOST_ROWS, c.rows - first)});
    };
    return on_threads(threads, job.streams * job.heads * call.chunks, work, &call);
}

} // namespace

static const GgmlKernels *chosen(const char *cap) {
#if defined(KVP_X86)
    static const Processor processor;
    const bool most = strcmp(cap, "avx512") == 0 || strcmp(cap, "avx512vbmi") == 0;
#if defined(KVP_AVX512_TOO) || defined(KVP_VBMI)
    static const GgmlKernels avx512 = kvp_avx512::ggml_kernels();
    if (most && processor.avx512) return &avx512;
#endif
#if defined(KVP_AVX2_TOO)
    static const GgmlKernels avx2 = kvp_avx2::ggml_kernels();
    if ((most || strcmp(cap, "avx2") == 0) && processor.avx2) return &avx2;
#endif
    (void)most, (void)processor;
#elif defined(KVP_ARM)
    static const GgmlKernels neon = kvp_neon::ggml_kernels();
    if (strcmp(cap, "none") != 0) return &neon;
#endif
#if defined(KVP_BASE)
    static const GgmlKernels base = kvp_base::ggml_kernels();
    for (const char *level : {"none", "neon", "avx2", "avx512", "avx512vbmi"})
        if (strcmp(cap, level) == 0) return &base;
#endif
    return nullptr;
}

const GgmlKernels *kernels() {
    static const char *const named = getenv("KVPACT_GGML_SIMD");
    static const GgmlKernels *const use = chosen(named && *named ? named : "avx512");
    return use;
}

bool covers(const Attention &op) {
    const ggml_abi::Tensor *q = &op.q, *k = &op.k, *v = &op.v, &mask = op.mask;
    if (q->type != ggml_abi::F32 || op.out.type != ggml_abi::F32) return false;
    for (const ggml_abi::Tensor *x : {k, v}) {
        const size_t size = block_size(x->type);
        if (!size || x->ne[0] < 8 || x->ne[0] > MOST_WIDTH || x->ne[0] % (is_number(x->type) ? 8 : BLOCK)) return false;
        if (x->nb[0] != (is_number(x->type) ? size / BLOCK : size)) return false;
        if (x->ne[1] != k->ne[1] || x->ne[2] != k->ne[2] || x->ne[3] != k->ne[3]) return false;
        if (x->ne[1] < 1 || x->ne[2] < 1 || x->ne[3] < 1) return false;
    }
    if (q->nb[0] != 4 || op.out.nb[0] != 4 || q->ne[0] != k->ne[0] || op.out.ne[0] != v->ne[0]) return false;
    if (q->ne[2] % k->ne[2] || q->ne[3] % k->ne[3]) return false;
    if (op.out.ne[1] != q->ne[2] || op.out.ne[2] != q->ne[1] || op.out.ne[3] != q->ne[3]) return false;
    if (op.has_mask && (mask.type != ggml_abi::F16 || mask.nb[0] != 2 || mask.ne[0] < k->ne[1] || mask.ne[1] < q->ne[1])) return false;
    return !op.has_sinks || op.sinks.type == ggml_abi::F32;
}

bool worthwhile(const Attention &op) {
    static const bool all = asked("KVPACT_GGML_ALL"), numbers = asked("KVPACT_GGML_F16");
    if (all) return true;
    // llama.cpp switches flash attention off by itself where it finds it on another device, unless V is quantised.
    return op.k.ne[1] >= LEAST_TOKENS && (numbers || !is_number(op.v.type));
}

Parts::~Parts() { operator delete(data, ALIGNMENT); }

float *Parts::get(size_t count) {
    if (count <= size) return data;
    operator delete(data, ALIGNMENT);
    data = (float *)operator new(count * sizeof(float), ALIGNMENT, std::nothrow);
    size = data ? count : 0;
    return data;
}

bool attend(const Attention &op, int threads, Parts &parts) {
    const Job job = job_of(op);
    const GgmlKernels &use = *kernels();
    return job.queries * job.groups <= FEW_ROWS ? few(job, use, threads, parts) : many(job, use, threads);
}
