// What is found in the libraries that are loaded: ggml's functions, and OpenMP's threads.
#pragma once
#include <vector>

#include "pool.h"

// Where ggml's functions are looked for: the library that calls us, then those of ggml's name, which Python loads for
// itself, so that they are no part of the program's scope.
class Libraries {
    std::vector<void *> all;

  public:
    explicit Libraries(const void *caller);
    Libraries(const Libraries &) = delete;
    ~Libraries();
    // The first one with a function; NULL: none has it.
    void *with(const char *function) const;
    // A function of a library or of those that it is linked with.
    static void *find(void *library, const char *function);
};

// `kvp_parallel`, on the threads of the OpenMP library that ggml uses, which wait for it between operations. `ggml` is
// an address in it.
void use_threads_of(const void *ggml);
bool on_threads(int64_t threads, int64_t count, kvp_work work, void *context);
