// An out-of-tree backend of ggml: a device beside the CPU that takes attention over quantised caches. Its structs are
// words at the places where the ggml that loads it looks for them (host.h).
#include <atomic>
#include <errno.h>
#include <mutex>
#include <new>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>
#if defined(__linux__)
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#include "abi.h"
#include "ggml/host.h"
#include "ggml/loaded.h"
#include "ggml/operation.h"

namespace {

constexpr int WORDS = 64; // of a struct, at most
alignas(16) const uint8_t GUID[16] = {0x6b, 0x76, 0x70, 0x61, 0x63, 0x74, 0x2d, 0x67, 0x67, 0x6d, 0x6c, 0x2d, 0x30, 0x30, 0x30, 0x31};
std::atomic<int64_t> computed{0};

// ggml's words, and behind them ours.
struct Object {
    void *word[WORDS];
    struct Plugin *plugin;
    template <class F> void set(int at, F *value) { word[at] = (void *)value; }
};
struct Backend : Object {
    int threads; // until ggml says how many
    Parts parts;
};
// One for each ggml of the process, which keeps addresses of it.
struct Plugin {
    Host host;
    bool good = false;
    Object registry{}, device{};
};
Host &host_of(const void *object) { return ((const Object *)object)->plugin->host; }

int compute(Backend *backend, void *graph) {
    constexpr int FAILED = -1, ALLOC_FAILED = -2;
    Host &host = host_of(backend);
    for (int i = 0; i < host.ggml.graph_n_nodes(graph); i++) {
        const void *node = host.ggml.graph_node(graph, i);
        if (host.operation_of(node) != host.operation[ATTENTION] || !host.to_compute(node)) continue;
        ggml_abi::Attention op;
        if (!host.read(node, op)) return FAILED;
        if (!attend(op, backend->threads, backend->parts)) return ALLOC_FAILED;
        if (host.trying) host.tried++;
        else computed.fetch_add(1, std::memory_order_relaxed);
    }
    return 0;
}

void *start(void *device, const char *) {
    Backend *backend = new (std::nothrow) Backend{};
    if (!backend) return nullptr;
    const auto &slot = host_of(device).slot.backend;
    backend->plugin = ((Object *)device)->plugin;
    backend->threads = 4;
    backend->set(slot.guid, GUID);
    backend->set(slot.name, +[](void *) { return "kvpact"; });
    backend->set(slot.free, +[](Backend *it) { delete it; });
    backend->set(slot.compute, compute);
    backend->word[slot.device] = device;
    return backend;
}

const char *device_name(void *) { return "KVPACT"; }
const char *description(void *) { return "attention over quantised KV caches"; }
int kind(void *device) { return host_of(device).accelerator; }
void memory(void *, size_t *free, size_t *total) { *free = *total = 0; }
void properties(void *device, char *to) {
    const char *const names[] = {device_name(device), description(device)};
    const int32_t type = kind(device);
    memcpy(to, names, sizeof names);
    memcpy(to + 32, &type, sizeof type);
}
void *buffer_type(void *device) { return host_of(device).ggml.backend_cpu_buffer_type(); }
bool supports_buffer(void *device, void *type) { return host_of(device).ggml.backend_buft_is_host(type); }
bool supports_op(void *device, const void *node) {
    const Host &host = host_of(device);
    const int operation = host.operation_of(node);
    for (int i = NONE; i < ATTENTION; i++)
        if (operation == host.operation[i]) return true;
    ggml_abi::Attention op;
    return operation == host.operation[ATTENTION] && host.read(node, op) && covers(op) && (host.trying || worthwhile(op));
}

void set_threads(Backend *backend, int threads) { backend->threads = threads; }
void *address(void *, const char *name) { return strcmp(name, "ggml_backend_set_n_threads") == 0 ? (void *)set_threads : nullptr; }

void build(Plugin &plugin) {
    Object &registry = plugin.registry = {}, &device = plugin.device = {};
    registry.plugin = device.plugin = &plugin;
    const auto &r = plugin.host.slot.registry;
    const int32_t api = plugin.host.api;
    memcpy(registry.word, &api, sizeof api);
    registry.set(r.name, +[](void *) { return "kvpact"; });
    registry.set(r.count, +[](void *) -> size_t { return 1; });
    registry.set(r.device, +[](Object *it, size_t) { return &it->plugin->device; });
    registry.set(r.address, address);
    const auto &d = plugin.host.slot.device;
    device.set(d.name, device_name);
    device.set(d.description, description);
    device.set(d.memory, memory);
    device.set(d.type, kind);
    device.set(d.properties, properties);
    device.set(d.init, start);
    device.set(d.buffer_type, buffer_type);
    device.set(d.supports_op, supports_op);
    device.set(d.supports_buffer, supports_buffer);
    device.word[d.registry] = &registry;
}

bool probe(Plugin &plugin) {
    if (!plugin.host.probe()) return false;
    build(plugin);
    return true;
}

#if defined(__linux__)
// Probes and trial in a copy of this process, which may crash in its place.
bool works(Plugin &plugin) {
    struct Answer {
        bool good;
        double error;
        char why[sizeof plugin.host.why];
    };
    Host &host = plugin.host;
    void *const shared = mmap(nullptr, sizeof(Answer), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    const pid_t child = shared == MAP_FAILED ? -1 : fork();
    if (child < 0) {
        snprintf(host.why, sizeof host.why, "no copy of the process can be made to try it: %s", strerror(errno));
        if (shared != MAP_FAILED) munmap(shared, sizeof(Answer));
        return false;
    }
    Answer &answer = *(Answer *)shared;
    if (child == 0) {
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, nullptr);
        for (int s : {SIGALRM, SIGSEGV, SIGABRT, SIGBUS, SIGILL, SIGFPE}) signal(s, SIG_DFL);
        prctl(PR_SET_DUMPABLE, 0);
        setenv("GGML_NO_BACKTRACE", "1", 1); // which would start a debugger
        alarm(20);
        if (host.ggml.log_set) host.ggml.log_set([](int, const char *, void *) {}, nullptr);
        answer.good = probe(plugin) && host.trial(&plugin.device, true);
        answer.error = host.error;
        memcpy(answer.why, host.why, sizeof host.why);
        _exit(0);
    }
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {} // others may have asked for its end: then it is unknown
    const bool good = answer.good;
    host.error = answer.error;
    if (!good && *answer.why) memcpy(host.why, answer.why, sizeof host.why);
    else if (!good) snprintf(host.why, sizeof host.why, "a copy of the process that tried it ended with signal %d", status & 127);
    munmap(shared, sizeof(Answer));
    return good && probe(plugin);
}
#else
// Copies of processes aren't there, or are not allowed to compute.
bool works(Plugin &plugin) { return probe(plugin) && plugin.host.trial(&plugin.device, false); }
#endif

bool is_loaded(const Functions &ggml) {
    for (size_t i = 0; i < ggml.backend_reg_count(); i++)
        if (strcmp(ggml.backend_reg_name(ggml.backend_reg_get(i)), "kvpact") == 0) return true;
    return false;
}

char refused[400] = "", found[128] = "";

// What the ggml at `caller` is to register; NULL: it is refused, or has it already.
void *registry_for(const void *caller) {
    static std::mutex lock;
    static std::vector<Plugin *> all;
    const std::lock_guard<std::mutex> held(lock);
    Host host(caller);
    Plugin *plugin = nullptr;
    for (Plugin *one : all)
        if (one->host.ggml.graph_node == host.ggml.graph_node) plugin = one;
    if (!kernels()) snprintf(host.why, sizeof host.why, "KVPACT_GGML_SIMD is not one of none, neon, avx2, avx512, avx512vbmi");
    if (!plugin && !*host.why) { // else what it lacks may come
        all.push_back(plugin = new Plugin{host});
        plugin->good = works(*plugin);
    }
    const Host &known = plugin ? plugin->host : host;
    *refused = 0;
    if (plugin && plugin->good) {
        use_threads_of(caller);
        snprintf(found, sizeof found, "ggml %.32s, interface %d, trial NMSE %.0e", known.version(), known.api, known.error);
        if (!is_loaded(known.ggml)) return &plugin->registry;
        fprintf(stderr, "kvpact: this ggml has loaded it already\n");
        return nullptr;
    }
    char api[24] = "";
    if (known.api) snprintf(api, sizeof api, ", interface %d,", known.api);
    if (!known.ggml.backend_reg_get) snprintf(refused, sizeof refused, "%s", known.why);
    else snprintf(refused, sizeof refused, "ggml %.32s%s is refused: %s", known.version(), api, known.why);
    fprintf(stderr, "kvpact: %s\n", refused);
    return nullptr;
}

} // namespace

extern "C" {
// Why the last load was refused, in one line; "": it was not.
KVP_EXPORT const char *kvpact_ggml_refused(void) { return refused; }
// The ggml that was accepted last, in one line; "": none was.
KVP_EXPORT const char *kvpact_ggml_found(void) { return found; }
// Attentions that ran here since this library was loaded.
KVP_EXPORT int64_t kvpact_ggml_computed(void) { return computed; }

KVP_EXPORT int ggml_backend_score(void) { return registry_for(__builtin_return_address(0)) ? 1 : 0; }
KVP_EXPORT void *ggml_backend_init(void) { return registry_for(__builtin_return_address(0)); }
}
