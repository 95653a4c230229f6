// An out-of-tree backend of ggml: a device beside the CPU that takes attention over quantised caches.
#include <new>
#include <stdio.h>
#include <string.h>

#include "ggml/loaded.h"
#include "ggml/operation.h"

using namespace ggml_abi;

namespace {

constexpr uint8_t GUID[16] = {0x6b, 0x76, 0x70, 0x61, 0x63, 0x74, 0x2d, 0x67, 0x67, 0x6d, 0x6c, 0x2d, 0x30, 0x30, 0x30, 0x31};

struct Context {
    int threads = 4; // until ggml says how many
    Parts parts;
};

int compute(Backend *backend, void *graph) {
    Context &context = *(Context *)backend->context;
    for (int i = 0; i < ggml().nodes(graph); i++) {
        Tensor &node = *ggml().node(graph, i);
        if (node.op != FLASH_ATTN_EXT || !(node.flags & COMPUTE)) continue;
        if (!attend(node, context.threads, context.parts)) return ALLOC_FAILED;
    }
    return SUCCESS;
}

void release(Backend *backend) {
    delete (Context *)backend->context;
    delete backend;
}

Backend *start(Device *device, const char *) {
    Backend *backend = new (std::nothrow) Backend{};
    Context *context = new (std::nothrow) Context;
    if (!backend || !context) {
        delete backend;
        delete context;
        return nullptr;
    }
    backend->guid = GUID;
    backend->name = [](Backend *) { return "kvpact"; };
    backend->free = release;
    backend->compute = compute;
    backend->device = device;
    backend->context = context;
    return backend;
}

const char *device_name(Device *) { return "KVPACT"; }
const char *description(Device *) { return "attention over quantised KV caches"; }
int kind(Device *) { return ACCEL; }
void memory(Device *, size_t *free, size_t *total) { *free = *total = 0; }

void properties(Device *device, Properties *to) {
    *to = {};
    to->name = device_name(device);
    to->description = description(device);
    to->type = ACCEL;
}

bool supports(Device *, const Tensor *op) {
    switch (op->op) {
    case NONE:
    case RESHAPE:
    case VIEW:
    case PERMUTE:
    case TRANSPOSE: return true;
    case FLASH_ATTN_EXT: return covers(*op) && worthwhile(*op);
    default: return false;
    }
}

Device *device(Registry *registry, size_t) {
    static Device own = [] {
        Device d{};
        d.name = device_name;
        d.description = description;
        d.memory = memory;
        d.type = kind;
        d.properties = properties;
        d.start = start;
        d.buffer_type = [](Device *) { return ggml().cpu_buffer_type(); };
        d.supports_op = supports;
        d.supports_buffer = [](Device *, BufferType *type) { return type->is_host && type->is_host(type); };
        return d;
    }();
    own.registry = registry;
    return &own;
}

void set_threads(Backend *backend, int threads) { ((Context *)backend->context)->threads = threads; }

void *address(Registry *, const char *name) {
    return strcmp(name, "ggml_backend_set_n_threads") == 0 ? (void *)set_threads : nullptr;
}

// NULL; or one line: why the ggml that calls is refused.
const char *refused(const Ggml &found) {
    static thread_local char line[256];
    if (!kernels()) return "KVPACT_GGML_SIMD is not one of none, neon, avx2, avx512, avx512vbmi";
    if (!found.version && !found.cpu_buffer_type) return "no ggml that shows its functions is loaded in this process";
    if (!found.version || !found.cpu_buffer_type || !found.nodes || !found.node)
        return "the ggml of this process lacks functions that kvpact needs: it is another version than those tried";
    for (const char *version : TRIED)
        if (strcmp(version, found.version()) == 0) return nullptr;
    int at = snprintf(line, sizeof line, "ggml %.32s was not tried with this version of kvpact, only", found.version());
    for (const char *version : TRIED) at += snprintf(line + at, sizeof line - (size_t)at, " %s", version);
    return line;
}

} // namespace

extern "C" {
#define EXPORT __attribute__((visibility("default")))

// NULL; or one line: why a ggml of this process is refused.
EXPORT const char *kvpact_ggml_refused(void) { return refused(Ggml(__builtin_return_address(0))); }

EXPORT int ggml_backend_score(void) {
    const char *why = refused(Ggml(__builtin_return_address(0)));
    if (why) fprintf(stderr, "kvpact: %s\n", why);
    return why ? 0 : 1;
}

EXPORT Registry *ggml_backend_init(void) {
    const void *caller = __builtin_return_address(0);
    const Ggml found(caller);
    if (refused(found)) return nullptr;
    if (found.node != ggml(caller).node) {
        fprintf(stderr, "kvpact: another ggml of this process has loaded this library\n");
        return nullptr;
    }
    static Registry registry = {API_VERSION,
                                [](Registry *) { return "kvpact"; },
                                [](Registry *) -> size_t { return 1; },
                                device,
                                address,
                                nullptr};
    return &registry;
}
}
