// Attention as an operation of ggml: what is covered, and its division into tasks.
#pragma once
#include <stddef.h>

#include "ggml/ggml_abi.h"

// The kernels for this processor, up to KVPACT_GGML_SIMD when it was loaded; NULL: there are none of that name.
const struct GgmlKernels *kernels();

// Whether the operation can be computed here, and whether that would be quicker.
bool covers(const ggml_abi::Tensor &op);
bool worthwhile(const ggml_abi::Tensor &op);

// Partial sums of an operation, kept for the next one.
class Parts {
    float *data = nullptr;
    size_t size = 0;

  public:
    Parts() = default;
    Parts(const Parts &) = delete;
    ~Parts();
    float *get(size_t count);
};

// False: there is no memory.
bool attend(ggml_abi::Tensor &op, int threads, Parts &parts);
