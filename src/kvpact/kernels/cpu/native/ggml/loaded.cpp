#include "ggml/loaded.h"

#include <atomic>
#include <dlfcn.h>
#include <string.h>
#if !defined(__APPLE__)
#include <link.h>
#endif

#include "pool.h"

namespace {

// Python loads ggml for itself, so that it is no part of the program's scope: look in the libraries of ggml, and in
// those that they are linked with.
void *find(const char *name) {
    void *found = nullptr;
#if !defined(__APPLE__)
    struct Search {
        const char *name;
        void *found;
    } search = {name, nullptr};
    dl_iterate_phdr(
        [](dl_phdr_info *info, size_t, void *data) -> int {
            Search &s = *(Search *)data;
            const char *file = info->dlpi_name ? strrchr(info->dlpi_name, '/') : nullptr;
            if (!file || strncmp(file, "/libggml", 8) != 0) return 0;
            void *library = dlopen(info->dlpi_name, RTLD_NOW | RTLD_NOLOAD);
            if (!library) return 0;
            s.found = dlsym(library, s.name);
            dlclose(library);
            return s.found != nullptr;
        },
        &search);
    found = search.found;
#endif
    return found ? found : dlsym(RTLD_DEFAULT, name);
}

template <class F> void find(F &function, const char *name) { function = (F)find(name); }

struct Share {
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    int64_t count;
    bool (*work)(void *, int64_t);
    void *context;
};

} // namespace

Ggml::Ggml() {
    find(version, "ggml_version");
    find(cpu_buffer_type, "ggml_backend_cpu_buffer_type");
    find(nodes, "ggml_graph_n_nodes");
    find(node, "ggml_graph_node");
}

const Ggml &ggml() {
    static const Ggml found;
    return found;
}

bool on_threads(int64_t threads, int64_t count, bool (*work)(void *, int64_t), void *context) {
    typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
    static const Parallel parallel = (Parallel)find("GOMP_parallel");
    if (threads > count) threads = count;
    if (threads <= 1 || !parallel) return kvp_parallel(threads, count, work, context);
    Share share;
    share.count = count;
    share.work = work;
    share.context = context;
    parallel(
        [](void *data) {
            Share &s = *(Share *)data;
            for (int64_t i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.count;)
                if (!s.work(s.context, i)) s.failed.store(true, std::memory_order_relaxed);
        },
        &share, (unsigned)threads, 0);
    return !share.failed;
}
