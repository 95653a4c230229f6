#include "ggml/loaded.h"

#include <string.h>
#include <string>
#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#if !defined(__APPLE__)
#include <link.h>
#endif
#endif

#include "abi.h"

#if defined(_WIN32)
Libraries::Libraries(const void *caller) {
    HMODULE module = nullptr;
    constexpr DWORD HOW = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    if (GetModuleHandleExA(HOW, (LPCSTR)caller, &module) && module) all.push_back((void *)module);
}
Libraries::~Libraries() = default;

// A DLL shows its own functions alone: those of the registry are in ggml.dll, all others in ggml-base.dll.
void *Libraries::find(void *library, const char *function) {
    const HMODULE base = GetModuleHandleA("ggml-base.dll");
    void *found = (void *)GetProcAddress((HMODULE)library, function);
    return found || !base ? found : (void *)GetProcAddress(base, function);
}
#else
Libraries::Libraries(const void *caller) {
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
Libraries::~Libraries() {
    for (void *library : all) dlclose(library);
}
void *Libraries::find(void *library, const char *function) { return dlsym(library, function); }
#endif

void *Libraries::with(const char *function) const {
    for (void *library : all)
        if (find(library, function)) return library;
    return nullptr;
}

namespace {
const void *threads_of = nullptr;
}

void use_threads_of(const void *ggml) {
    if (!threads_of) threads_of = ggml;
}

bool on_threads(int64_t threads, int64_t count, kvp_work work, void *context) {
    if (threads > 1) { // not sooner: the library that brings OpenMP may be loaded after this one
        static const int found = [] {
            const Libraries libraries(threads_of);
            void *one = libraries.with("GOMP_parallel");
            return one ? kvp_openmp(Libraries::find(one, "GOMP_parallel"), nullptr, nullptr, nullptr) : 0;
        }();
        (void)found;
    }
    return kvp_parallel(threads, count, work, context);
}
