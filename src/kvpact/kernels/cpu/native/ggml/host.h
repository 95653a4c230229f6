// The ggml that loads this library: its functions, and what calling them tells of its structs. Nothing is taken from a
// version of its internal headers: words and bytes are found by asking, and then tried.
#pragma once
#include <memory>
#include <string.h>

#include "ggml/ggml_abi.h"

struct InitParams { // of ggml_init
    size_t size;
    void *memory;
    bool no_alloc;
};

// Public functions without the `ggml_` of their names: those that are needed, and those that some versions lack.
#define KVP_GGML_NEEDED(F)                                                                                            \
    F(void *, init, (InitParams)) F(void, free, (void *)) F(size_t, tensor_overhead, ()) F(size_t, graph_overhead, ()) \
    F(void *, new_tensor_4d, (void *, int, int64_t, int64_t, int64_t, int64_t))                                       \
    F(void *, view_4d, (void *, void *, int64_t, int64_t, int64_t, int64_t, size_t, size_t, size_t, size_t))          \
    F(void *, reshape_2d, (void *, void *, int64_t, int64_t)) F(void *, transpose, (void *, void *))                  \
    F(void *, permute, (void *, void *, int, int, int, int)) F(void, set_output, (void *))                            \
    F(void *, flash_attn_ext, (void *, void *, void *, void *, void *, float, float, float))                          \
    F(void *, get_data, (const void *)) F(const char *, type_name, (int)) F(size_t, type_size, (int))                 \
    F(const char *, op_name, (int)) F(const char *, op_desc, (const void *))                                          \
    F(void *, new_graph, (void *)) F(void, build_forward_expand, (void *, void *))                                    \
    F(int, graph_n_nodes, (void *)) F(void *, graph_node, (void *, int))                                              \
    F(size_t, backend_reg_count, ()) F(void *, backend_reg_get, (size_t)) F(const char *, backend_reg_name, (void *)) \
    F(size_t, backend_reg_dev_count, (void *)) F(void *, backend_reg_dev_get, (void *, size_t))                       \
    F(void *, backend_reg_get_proc_address, (void *, const char *))                                                   \
    F(void *, backend_dev_by_type, (int)) F(const char *, backend_dev_name, (void *))                                 \
    F(const char *, backend_dev_description, (void *)) F(void, backend_dev_memory, (void *, size_t *, size_t *))      \
    F(int, backend_dev_type, (void *)) F(void, backend_dev_get_props, (void *, void *))                               \
    F(void *, backend_dev_backend_reg, (void *)) F(void *, backend_dev_init, (void *, const char *))                  \
    F(void *, backend_dev_buffer_type, (void *)) F(bool, backend_dev_supports_op, (void *, const void *))             \
    F(bool, backend_dev_supports_buft, (void *, void *)) F(const char *, backend_name, (void *))                      \
    F(void, backend_free, (void *)) F(void *, backend_guid, (void *)) F(void *, backend_get_device, (void *))         \
    F(int, backend_graph_compute_async, (void *, void *)) F(bool, backend_buft_is_host, (void *))                     \
    F(void *, backend_cpu_buffer_type, ()) F(void *, backend_alloc_ctx_tensors_from_buft, (void *, void *))           \
    F(void, backend_buffer_free, (void *)) F(void, backend_tensor_set, (void *, const void *, size_t, size_t))        \
    F(void, backend_tensor_get, (const void *, void *, size_t, size_t)) F(void, backend_sched_free, (void *))         \
    F(void *, backend_sched_new, (void **, void **, int, size_t, bool, bool))                                         \
    F(int, backend_sched_graph_compute, (void *, void *))
#define KVP_GGML_SOMETIMES(F)                                                                                         \
    F(const char *, version, ()) F(void, log_set, (void (*)(int, const char *, void *), void *))                      \
    F(void, flash_attn_ext_add_sinks, (void *, void *)) F(void, flash_attn_ext_set_prec, (void *, int))               \
    F(void, flash_attn_ext_set_n_kv_max, (void *, int32_t))                                                           \
    F(void, backend_device_register, (void *)) F(void *, backend_init_best, ())

struct Functions {
#define F(result, name, arguments) result(*name) arguments = nullptr;
    KVP_GGML_NEEDED(F)
    KVP_GGML_SOMETIMES(F)
#undef F
};
using Owned = std::unique_ptr<void, void (*)(void *)>;

template <class T> T value_at(const void *from, int at) {
    T value;
    memcpy(&value, (const char *)from + at, sizeof value);
    return value;
}

enum Operation { NONE, VIEW, RESHAPE, PERMUTE, TRANSPOSE, ATTENTION, OPERATIONS };

// Which words of its structs ggml calls or reads.
struct Slots {
    struct { int name, count, device, address; } registry;
    struct { int name, description, memory, type, properties, init, buffer_type, supports_op, supports_buffer, registry; } device;
    struct { int guid, name, free, compute, device; } backend;
};

// Bytes from the beginning of a tensor.
struct Offsets {
    int type, ne, nb, operation, numbers, flags, sources, data;
    int source_count, number_count;
    uint32_t known;  // bits: numbers of attention that are understood, or may be ignored
    bool sinks;      // are the fifth source
    int32_t compute; // bit of flags: to be computed; 0: this ggml has none
};

struct Host {
    Functions ggml;
    int api = 0;         // the number of its interface
    int accelerator = 3; // type of device
    Slots slot{};
    Offsets at{};
    int operation[OPERATIONS] = {};
    char why[256] = "";  // it is refused; empty: it is not, so far
    double error = 0;    // of the trial: the greatest mean square, over that of the result
    bool trying = false; // attention of any kind is taken, and counted here
    long tried = 0;

    // Finds the functions of the ggml in whose library `caller` lies, or else of one in this process.
    explicit Host(const void *caller);
    const char *version() const { return ggml.version ? ggml.version() : "without a version"; }
    // False: `why` it is refused. Either may crash where ggml is very different.
    bool probe();
    // Attention over ggml's scheduler, by our device and by the CPU's. `copy`: this process is one that ends afterwards,
    // so that our device may be registered to see whether ggml takes it for a GPU.
    bool trial(void *device, bool copy);

    int operation_of(const void *tensor) const { return value_at<int32_t>(tensor, at.operation); }
    bool to_compute(const void *tensor) const { return !at.compute || value_at<int32_t>(tensor, at.flags) & at.compute; }
    // False: it has numbers or sources that the probes did not explain.
    bool read(const void *node, ggml_abi::Attention &) const;
    // False, and `why`.
    bool refuse(const char *format, ...) __attribute__((format(printf, 2, 3)));

  private:
    bool find_functions(const void *caller);
    bool find_api();
    bool find_slots();
    bool find_tensors();
    bool find_attention(void *context, void *node, int size);
};
