#include "scratch.h"

#include <atomic>
#if defined(_WIN32)
#include <malloc.h>
#endif
#include <stdlib.h>
#include <string.h>

#include "abi.h"

namespace {

#if defined(_WIN32)
void *pages(size_t bytes) { return _aligned_malloc(bytes, 4096); }
void release(void *data) { _aligned_free(data); }
#else
void *pages(size_t bytes) { return aligned_alloc(4096, bytes); }
void release(void *data) { free(data); }
#endif

std::atomic<int64_t> all{0};
thread_local int64_t own = 0;

void count(int64_t bytes) {
    all += bytes;
    own += bytes;
}

} // namespace

Scratch::~Scratch() {
    release(data);
    count(-(int64_t)size);
}

void *Scratch::get(size_t bytes) {
    if (bytes <= size) return data;
    release(data);
    count(-(int64_t)size);
    size = 0;
    bytes = (bytes + 4095) / 4096 * 4096;
    data = pages(bytes);
    if (!data) return nullptr;
    memset(data, 0, bytes);
    size = bytes;
    count((int64_t)size);
    return data;
}

int64_t kvp_scratch(int64_t *of_all) {
    if (of_all) *of_all = all;
    return own;
}
