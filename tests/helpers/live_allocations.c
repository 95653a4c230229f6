// Counts the blocks of malloc that are in use: loaded in front of glibc, asked by ctypes.
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t), __libc_free(void *);
static atomic_long live;

static void *counted(void *block) {
    live += block != NULL;
    return block;
}
long live_allocations(void) { return live; }
void *malloc(size_t size) { return counted(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return counted(__libc_calloc(count, size)); }
void *memalign(size_t step, size_t size) { return counted(__libc_memalign(step, size)); }
void *aligned_alloc(size_t step, size_t size) { return memalign(step, size); }
void free(void *block) {
    live -= block != NULL;
    __libc_free(block);
}
void *realloc(void *block, size_t size) {
    void *made = __libc_realloc(block, size);
    live += (made != NULL) - (block != NULL && (made != NULL || !size));
    return made;
}
int posix_memalign(void **made, size_t step, size_t size) {
    void *block = memalign(step, size);
    if (!block) return ENOMEM;
    *made = block;
    return 0;
}
