// Attention of each kind that kvpact takes, through ggml's own scheduler, next to the result of ggml's CPU backend.
#include <algorithm>
#include <random>
#include <vector>

#include "ggml/host.h"

namespace {

constexpr int64_t WIDE = 64, TOKENS = 256, HEADS = 2, GROUPS = 2;
constexpr int64_t MASK_ROWS = 64;   // older versions want a multiple of this
constexpr double MOST_ERROR = 5e-4; // that of ggml's test-backend-ops

struct Case {
    const char *name;
    int type, high; // of the cache; the high byte of its scales, or of its numbers but for some bits
    int64_t queries, streams;
    bool within, sinks; // values are the first half of keys
    float bias, softcap;
};
constexpr Case CASES[] = {{"a token over q8_0", ggml_abi::Q8_0, 0x21, 1, 1, false, true, 0, 0},
                          {"two streams over q4_0", ggml_abi::Q4_0, 0x2d, 24, 2, false, false, 4, 5},
                          {"values within keys", ggml_abi::Q8_0, 0x21, 3, 1, true, false, 0, 0},
                          {"f16", ggml_abi::F16, 0x30, 2, 1, false, false, 0, 0}};

// Computes a case by some backends, of which the CPU's is the last. NULL, or what was wrong.
const char *compute(const Host &host, const Case &c, std::vector<void *> backends, std::vector<float> &result) {
    const Functions &ggml = host.ggml;
    const size_t overhead = ggml.tensor_overhead();
    const Owned inputs(ggml.init({overhead * 8 + 4096, nullptr, true}), ggml.free);
    const Owned context(ggml.init({overhead * 64 + ggml.graph_overhead() + 65536, nullptr, true}), ggml.free);
    if (!inputs || !context) return "no memory";
    const int64_t wide = c.within ? 2 * WIDE : WIDE, heads = HEADS * GROUPS;
    const auto tensor = [&](int type, int64_t a, int64_t b, int64_t t, int64_t s) {
        return ggml.new_tensor_4d(inputs.get(), type, a, b, t, s);
    };
    // A token's heads side by side, as llama.cpp has them.
    void *q = tensor(ggml_abi::F32, wide, c.queries, heads, c.streams), *keys = tensor(c.type, wide, HEADS, TOKENS, c.streams);
    void *values = c.within ? nullptr : tensor(c.type, WIDE, HEADS, TOKENS, c.streams);
    const int64_t masks = host.api > 1 ? c.streams : 1; // once they had no streams
    void *mask = tensor(ggml_abi::F16, TOKENS, MASK_ROWS, 1, masks), *sinks = tensor(ggml_abi::F32, heads, 1, 1, 1);
    const Owned buffer(ggml.backend_alloc_ctx_tensors_from_buft(inputs.get(), ggml.backend_cpu_buffer_type()), ggml.backend_buffer_free);
    if (!buffer) return "no memory";
    const auto fill = [&](void *to, const auto &with, size_t count) { ggml.backend_tensor_set(to, with.data(), 0, count * sizeof with[0]); };
    std::minstd_rand noise(7);
    const auto byte = [&] { return (uint8_t)(noise() >> 9); };
    std::vector<float> numbers((size_t)(wide * c.queries * heads * c.streams));
    for (float &x : numbers) x = (float)byte() / 64 - 2;
    fill(q, numbers, numbers.size()), fill(sinks, numbers, (size_t)heads);
    const size_t block = ggml.type_size(c.type), row = block * (size_t)wide / (c.type == ggml_abi::F16 ? 1 : 32);
    std::vector<uint8_t> bytes(row * (size_t)(HEADS * TOKENS * c.streams));
    for (void *to : {keys, values}) {
        for (size_t i = 0; i < bytes.size(); i++)
            bytes[i] = i % block != 1 ? byte() : (uint8_t)(c.high | (c.type == ggml_abi::F16 ? byte() & 0x8b : 0));
        if (to) fill(to, bytes, bytes.size());
    }
    std::vector<uint16_t> seen;
    for (int64_t s = 0; s < masks; s++)
        for (int64_t i = 0; i < MASK_ROWS; i++)
            for (int64_t t = 0; t < TOKENS; t++) seen.push_back(t > TOKENS - 50 + i - 9 * s ? 0xfc00 : (t + s) % 5 ? 0 : 0xbc00);
    fill(mask, seen, seen.size());
    if (c.within)
        values = ggml.view_4d(context.get(), keys, WIDE, HEADS, TOKENS, c.streams, row, row * HEADS, row * HEADS * TOKENS, 0);
    void *k = ggml.permute(context.get(), keys, 0, 2, 1, 3), *v = ggml.permute(context.get(), values, 0, 2, 1, 3);
    void *node = ggml.flash_attn_ext(context.get(), q, k, v, mask, .125f, c.bias, c.softcap), *graph = ggml.new_graph(context.get());
    if (host.at.sinks && c.sinks) ggml.flash_attn_ext_add_sinks(node, sinks);
    ggml.set_output(node);
    ggml.build_forward_expand(graph, node);
    const Owned scheduler(ggml.backend_sched_new(backends.data(), nullptr, (int)backends.size(), 2048, false, false), ggml.backend_sched_free);
    if (!scheduler || ggml.backend_sched_graph_compute(scheduler.get(), graph) != 0) return "it was not computed";
    result.resize((size_t)(WIDE * c.queries * heads * c.streams));
    ggml.backend_tensor_get(node, result.data(), 0, result.size() * sizeof result[0]);
    return nullptr;
}
} // namespace

bool Host::trial(void *device, bool copy) {
    void *const devices[] = {device, ggml.backend_dev_by_type(0)};
    const Owned ours(ggml.backend_dev_init(devices[0], nullptr), ggml.backend_free);
    const Owned cpu(ggml.backend_dev_init(devices[1], nullptr), ggml.backend_free);
    if (!ours || !cpu) return refuse("a trial of attention had no backends");
    for (int i = 0; i < 2; i++) { // in a copy of a process OpenMP's threads are gone
        void *set = ggml.backend_reg_get_proc_address(ggml.backend_dev_backend_reg(devices[i]), "ggml_backend_set_n_threads");
        if (set) ((void (*)(void *, int))set)(i ? cpu.get() : ours.get(), 1);
    }
    trying = true;
    for (const Case &c : CASES) {
        std::vector<float> result, expected;
        tried = 0;
        const char *wrong = compute(*this, c, {ours.get(), cpu.get()}, result);
        if (!wrong && tried != 1) wrong = "ggml did not give it to kvpact";
        if (!wrong) wrong = compute(*this, c, {cpu.get()}, expected);
        double difference = 0, all = 0;
        for (size_t i = 0; !wrong && i < expected.size(); i++) {
            difference += ((double)result[i] - expected[i]) * ((double)result[i] - expected[i]);
            all += (double)expected[i] * expected[i];
        }
        error = std::max(error, difference / all);
        if (!wrong && !(difference < MOST_ERROR * all)) wrong = "the result is not ggml's";
        if (wrong) return refuse("a trial of attention (%s) failed: %s", c.name, wrong);
    }
    trying = false;
    // Where there is a GPU, it would be taken, and does not work in a copy of a process.
    const bool gpu = ggml.backend_dev_by_type(1) || (accelerator > 2 && ggml.backend_dev_by_type(2));
    if (!copy || gpu || !ggml.backend_device_register || !ggml.backend_init_best) return true;
    ggml.backend_device_register(device);
    const Owned best(ggml.backend_init_best(), ggml.backend_free);
    return !best || ggml.backend_get_device(best.get()) != device || refuse("it takes kvpact's device for a GPU");
}
