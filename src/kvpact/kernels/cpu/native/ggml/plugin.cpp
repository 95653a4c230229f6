// An out-of-tree backend of ggml: a device next to the CPU that takes attention over quantised caches. Its structs are
// words at the places where the ggml that loads it looks for them (host.h).
#include <atomic>
#include <errno.h>
#include <mutex>
#include <new>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <vector>
#if defined(__linux__)
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#include "ggml/host.h"
#include "ggml/loaded.h"
#include "ggml/operation.h"

namespace {

constexpr int WORDS = 64; // of a struct, at most
alignas(16) const uint8_t GUID[16] = {0x6b, 0x76, 0x70, 0x61, 0x63, 0x74, 0x2d, 0x67, 0x67, 0x6d, 0x6c, 0x2d, 0x30, 0x30, 0x30, 0x31};
std::atomic<int64_t> computed{0};

// ggml's words, and after them ours.
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
    Object registry{}, device{};
};
Host &host_of(const void *object) { return ((const Object *)object)->plugin->host; }

int compute(Backend *backend, void *graph) {
    Host &host = host_of(backend);
    for (int i = 0; i < host.ggml.graph_n_nodes(graph); i++) {
        const void *node = host.ggml.graph_node(graph, i);
        if (host.operation_of(node) != host.operation[ATTENTION] || !host.to_compute(node)) continue;
        ggml_abi::Attention op;
        if (!host.read(node, op)) return -1;
        if (!attend(op, backend->threads, backend->parts)) return -2; // no memory
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
void properties(void *device, char *to) {
    const char *const names[] = {device_name(device), description(device)};
    memcpy(to, names, sizeof names);
    memcpy(to + 32, &host_of(device).accelerator, 4);
}
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

Object *build(Plugin &plugin) {
    Object &registry = plugin.registry = {}, &device = plugin.device = {};
    registry.plugin = device.plugin = &plugin;
    const auto &r = plugin.host.slot.registry;
    memcpy(registry.word, &plugin.host.api, 4);
    registry.set(r.name, +[](void *) { return "kvpact"; });
    registry.set(r.count, +[](void *) -> size_t { return 1; });
    registry.set(r.device, +[](Object *it, size_t) { return &it->plugin->device; });
    registry.set(r.address, address);
    const auto &d = plugin.host.slot.device;
    device.set(d.name, device_name);
    device.set(d.description, description);
    device.set(d.memory, +[](void *, size_t *free, size_t *total) { *free = *total = 0; });
    device.set(d.type, +[](void *it) { return host_of(it).accelerator; });
    device.set(d.properties, properties);
    device.set(d.init, start);
    device.set(d.buffer_type, +[](void *it) { return host_of(it).ggml.backend_cpu_buffer_type(); });
    device.set(d.supports_op, supports_op);
    device.set(d.supports_buffer, +[](void *it, void *type) { return host_of(it).ggml.backend_buft_is_host(type); });
    device.word[d.registry] = &registry;
    return &device;
}

// The probes, and a trial of what they found.
void examine(Plugin &plugin, bool copy) {
    if (plugin.host.probe()) plugin.host.trial(build(plugin), copy);
}

#if defined(__linux__)
// The same in a copy of this process, which may crash in its place. What it found is left in memory that both see.
void try_out(Plugin &plugin) {
    Host &host = plugin.host;
    void *const shared = mmap(nullptr, sizeof(Host), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    const pid_t child = shared == MAP_FAILED ? -1 : fork();
    if (child == 0) {
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, nullptr);
        for (int s : {SIGALRM, SIGSEGV, SIGABRT, SIGBUS, SIGILL, SIGFPE}) signal(s, SIG_DFL);
        alarm(20);
        prctl(PR_SET_DUMPABLE, 0);
        setenv("GGML_NO_BACKTRACE", "1", 1); // which would start a debugger
        if (host.ggml.log_set) host.ggml.log_set([](int, const char *, void *) {}, nullptr);
        examine(plugin, true);
        memcpy(shared, &host, sizeof host);
        _exit(0);
    }
    if (child < 0) host.refuse("no copy of the process can be made to try it: %s", strerror(errno));
    int status = 0; // unknown where somebody else asks for the end of all children
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    if (child > 0 && ((Host *)shared)->api) memcpy(&host, shared, sizeof host);
    else if (child > 0) host.refuse("a copy of the process that tried it ended with signal %d", status & 127);
    if (shared != MAP_FAILED) munmap(shared, sizeof(Host));
    if (!*host.why) build(plugin);
}
#else
// Copies of a process aren't there, or are not allowed to compute.
void try_out(Plugin &plugin) { examine(plugin, false); }
#endif

bool is_loaded(const Functions &ggml) {
    for (size_t i = 0; i < ggml.backend_reg_count(); i++)
        if (strcmp(ggml.backend_reg_name(ggml.backend_reg_get(i)), "kvpact") == 0) return true;
    return false;
}

char refused[400] = "", found[128] = "";

void tell_count() { fprintf(stderr, "kvpact: computed %lld attentions\n", (long long)computed); }

// What the ggml at `caller` is to register; NULL: it is refused, or has it already.
void *registry_for(const void *caller) {
    static std::mutex lock;
    static std::vector<Plugin *> all;
    const std::lock_guard<std::mutex> held(lock);
    Host host(caller);
    Plugin *plugin = nullptr;
    for (Plugin *one : all)
        if (one->host.ggml.graph_node == host.ggml.graph_node) plugin = one;
    if (!kernels()) host.refuse("KVPACT_GGML_SIMD is not one of none, neon, avx2, avx512, avx512vbmi");
    if (!plugin && !*host.why) { // else what it lacks may come
        all.push_back(plugin = new Plugin{host});
        try_out(*plugin);
    }
    const Host &known = plugin ? plugin->host : host;
    *refused = 0;
    if (!*known.why) {
        use_threads_of(caller);
        if (!*found && getenv("KVPACT_GGML_COUNT")) atexit(tell_count);
        snprintf(found, sizeof found, "ggml %.32s, interface %d, trial NMSE %.0e", known.version(), known.api, known.error);
        if (!is_loaded(host.ggml)) return &plugin->registry;
        fprintf(stderr, "kvpact: this ggml has loaded it already\n");
        return nullptr;
    }
    const std::string api = known.api ? ", interface " + std::to_string(known.api) + "," : "";
    if (!known.ggml.backend_reg_get) snprintf(refused, sizeof refused, "%s", known.why);
    else snprintf(refused, sizeof refused, "ggml %.32s%s is refused: %s", known.version(), api.c_str(), known.why);
    fprintf(stderr, "kvpact: %s\n", refused);
    return nullptr;
}

} // namespace

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif
// Why the last load was refused, in one line; "": it was not.
EXPORT const char *kvpact_ggml_refused(void) { return refused; }
// The ggml that was accepted last, in one line; "": none was.
EXPORT const char *kvpact_ggml_found(void) { return found; }
// Attentions that ran here since this library was loaded.
EXPORT int64_t kvpact_ggml_computed(void) { return computed; }

EXPORT int ggml_backend_score(void) { return registry_for(__builtin_return_address(0)) ? 1 : 0; }
EXPORT void *ggml_backend_init(void) { return registry_for(__builtin_return_address(0)); }
