// Scratch memory of the threads: kept for their next call, and counted.
#pragma once
#include <stddef.h>

class Scratch {
    void *data = nullptr;
    size_t size = 0;

  public:
    ~Scratch();
    // At least `bytes` bytes, on a page of its own; zeros when it is new, else what was left there.
    // NULL: there is no memory.
    void *get(size_t bytes);
    float *floats(size_t count) { return (float *)get(count * sizeof(float)); }
};

// A T of the calling thread, kept for its next task; zeros at first.
template <class T> T *own_scratch() {
    static thread_local Scratch scratch;
    return (T *)scratch.get(sizeof(T));
}
