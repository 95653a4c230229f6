// What the kernels know of ggml: the numbers of its types, which files hold, and tensors as host.cpp reads them.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace ggml_abi {

enum Type { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, IQ4_NL = 20, BF16 = 30 };

struct Tensor {
    int32_t type;
    int64_t ne[4]; // numbers along each dimension
    size_t nb[4];  // bytes from one to the next; of dimension 0, those of a block
    void *data;
};

struct Attention {
    Tensor out, q, k, v, mask, sinks; // of the last two, only those that it has
    bool has_mask, has_sinks;
    float scale, bias, softcap;
};
} // namespace ggml_abi
