// Settings of glibc's malloc while prompts are stored. Other allocators are left alone.
#include <mutex>
#include <stdlib.h>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "abi.h"

namespace {

#if defined(__GLIBC__)
// glibc begins with `low`, and raises it to the largest block that was freed, `high` at most, and to twice that what
// it keeps free at the end of each thread's heap; once set, it raises neither any more.
const int low = 128 << 10, high = 32 << 20, kept = 2 * high;
#endif
std::mutex lock;
int64_t holders = 0;

} // namespace

int64_t kvp_heap_hold(int change) {
    std::lock_guard<std::mutex> guard(lock);
    holders += change;
#if defined(__GLIBC__)
    if (holders == (change > 0)) {
        // In this order: where `high` is refused, `low` would stay.
        if (mallopt(M_MMAP_THRESHOLD, high) && mallopt(M_TRIM_THRESHOLD, kept) && holders)
            mallopt(M_MMAP_THRESHOLD, low);
    }
#endif
    return holders;
}

int kvp_heap_trim(void) {
#if defined(__GLIBC__)
    // malloc_trim leaves the ends of threads' heaps as they are. That of the calling thread goes with the next block
    // that is freed, of 64 KiB or more, if it is longer than glibc is set to keep.
    std::lock_guard<std::mutex> guard(lock);
    if (mallopt(M_TRIM_THRESHOLD, low)) {
        void *volatile block = malloc(low / 2 + low / 4);
        free(block);
        mallopt(M_TRIM_THRESHOLD, kept);
        if (!holders) mallopt(M_MMAP_THRESHOLD, high);
    }
    return malloc_trim(0);
#else
    return 0;
#endif
}
