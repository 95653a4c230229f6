#include "scratch.h"

#include <atomic>
#if defined(_WIN32)
#include <malloc.h>
#include <string.h>
#else
#include <sys/mman.h>
#endif

#include "abi.h"

namespace {

#if defined(_WIN32)
void *pages(size_t bytes) {
    void *data = _aligned_malloc(bytes, 4096);
    return data ? memset(data, 0, bytes) : nullptr;
}
void release(void *data, size_t) { _aligned_free(data); }
#else
// Not from malloc: a thread's heap stays when the thread has ended, and with it what was the thread's.
void *pages(size_t bytes) {
    void *data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return data == MAP_FAILED ? nullptr : data;
}
void release(void *data, size_t bytes) {
    if (data) munmap(data, bytes);
}
#endif

std::atomic<int64_t> all{0};
thread_local int64_t own = 0;

void count(int64_t bytes) {
    all += bytes;
    own += bytes;
}

} // namespace

Scratch::~Scratch() {
    release(data, size);
    count(-(int64_t)size);
}

void *Scratch::get(size_t bytes) {
    if (bytes <= size) return data;
    release(data, size);
    count(-(int64_t)size);
    size = 0;
    bytes = (bytes + 4095) / 4096 * 4096;
    data = pages(bytes);
    if (!data) return nullptr;
    size = bytes;
    count((int64_t)size);
    return data;
}

int64_t kvp_scratch(int64_t *of_all) {
    if (of_all) *of_all = all;
    return own;
}
