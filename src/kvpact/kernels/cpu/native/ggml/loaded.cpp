#include "ggml/loaded.h"

#include <string.h>
#include <string>
#include <vector>
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
void *library_with(const char *function, const void *caller) {
    HMODULE module = nullptr;
    constexpr DWORD HOW = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    GetModuleHandleExA(HOW, (LPCSTR)caller, &module);
    return module && function_of((void *)module, function) ? (void *)module : nullptr;
}
// A DLL shows its own functions alone: those of the registry are in ggml.dll, all others in ggml-base.dll.
void *function_of(void *library, const char *name) {
    const HMODULE base = GetModuleHandleA("ggml-base.dll");
    void *found = (void *)GetProcAddress((HMODULE)library, name);
    return found || !base ? found : (void *)GetProcAddress(base, name);
}
#else
void *library_with(const char *function, const void *caller) {
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
        if (library && dlsym(library, function)) return library;
        if (library) dlclose(library);
    }
    return nullptr;
}
void *function_of(void *library, const char *name) { return dlsym(library, name); }
#endif

static const void *threads_of = nullptr;
void use_threads_of(const void *ggml) {
    if (!threads_of) threads_of = ggml;
}

bool on_threads(int64_t threads, int64_t count, kvp_work work, void *context) {
    if (threads > 1) { // not sooner: the library that brings OpenMP may be loaded after this one
        static void *const library = library_with("GOMP_parallel", threads_of);
        static const int found = library ? kvp_openmp(function_of(library, "GOMP_parallel"), nullptr, nullptr, nullptr) : 0;
        (void)found;
    }
    return kvp_parallel(threads, count, work, context);
}
