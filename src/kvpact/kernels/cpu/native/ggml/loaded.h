// What is found in the libraries that are loaded: ggml's functions, and OpenMP's threads.
#pragma once
#include "pool.h"

// The library that `caller` is in, or one of ggml's name, which Python loads for itself, so that it is no part of the
// program's scope: the first that has a function, by itself or where it is linked with another. It stays open.
void *library_with(const char *function, const void *caller);
void *function_of(void *library, const char *name);

// `kvp_parallel`, on the threads of the OpenMP library that ggml uses, which wait for it between operations. `ggml` is
// an address in it.
void use_threads_of(const void *ggml);
bool on_threads(int64_t threads, int64_t count, kvp_work work, void *context);
