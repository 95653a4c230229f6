// What is found in the libraries that are loaded: ggml's functions, and OpenMP's threads.
#pragma once
#include "ggml/ggml_abi.h"
#include "pool.h"

struct Ggml {
    const char *(*version)(void) = nullptr;
    ggml_abi::BufferType *(*cpu_buffer_type)(void) = nullptr;
    int (*nodes)(void *graph) = nullptr;
    ggml_abi::Tensor *(*node)(void *graph, int) = nullptr;

    // That of the library in which `caller` lies, or else one of the process.
    explicit Ggml(const void *caller);
};
// The ggml that loaded this library: the one that the first call found.
const Ggml &ggml(const void *caller = nullptr);

// `kvp_parallel`, on the threads of the OpenMP library that ggml uses, which wait for it between operations.
bool on_threads(int64_t threads, int64_t count, kvp_work work, void *context);
