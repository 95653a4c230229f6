#include "ggml/loaded.h"

#include <dlfcn.h>
#include <string.h>
#include <string>
#include <vector>
#if !defined(__APPLE__)
#include <link.h>
#endif

#include "abi.h"
#include "pool.h"

namespace {

const void *loader = nullptr; // an address in the ggml that loads us

// Where ggml's functions are looked for: in the library that calls us, then in those of ggml's name, which Python loads
// for itself, so that they are no part of the program's scope; and in those that these are linked with.
class Libraries {
    std::vector<void *> all;

  public:
    explicit Libraries(const void *caller) {
        std::vector<std::string> files;
        Dl_info info;
        if (dladdr(caller, &info) && info.dli_fname) files.push_back(info.dli_fname);
#if !defined(__APPLE__)
        // Opened afterwards: the loader may be locked by then in the other order, by a thread that opens another one.
        dl_iterate_phdr(
            [](dl_phdr_info *one, size_t, void *data) -> int {
                const char *file = one->dlpi_name ? strrchr(one->dlpi_name, '/') : nullptr;
                if (file && strncmp(file, "/libggml", 8) == 0) ((std::vector<std::string> *)data)->push_back(one->dlpi_name);
                return 0;
            },
            &files);
#endif
        for (size_t i = 0; i < files.size(); i++) {
            void *library = dlopen(files[i].c_str(), RTLD_NOW | RTLD_NOLOAD);
            if (!library && i == 0) library = dlopen(nullptr, RTLD_NOW); // the program itself
            if (library) all.push_back(library);
        }
    }
    Libraries(const Libraries &) = delete;
    ~Libraries() {
        for (void *library : all) dlclose(library);
    }
    void *find(const char *name) const {
        for (void *library : all)
            if (void *found = dlsym(library, name)) return found;
        return nullptr;
    }
    template <class F> void find(F &function, const char *name) const { function = (F)find(name); }
};

} // namespace

Ggml::Ggml(const void *caller) {
    const Libraries libraries(caller);
    libraries.find(version, "ggml_version");
    libraries.find(cpu_buffer_type, "ggml_backend_cpu_buffer_type");
    libraries.find(nodes, "ggml_graph_n_nodes");
    libraries.find(node, "ggml_graph_node");
}

const Ggml &ggml(const void *caller) {
    static const Ggml found = [&] {
        loader = caller;
        return Ggml(caller);
    }();
    return found;
}

bool on_threads(int64_t threads, int64_t count, kvp_work work, void *context) {
    // Not sooner: the library that brings it may be loaded after this one.
    static const int found = kvp_openmp(Libraries(loader).find("GOMP_parallel"), nullptr, nullptr, nullptr);
    (void)found;
    return kvp_parallel(threads, count, work, context);
}
