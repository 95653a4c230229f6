// ggml's interface to backends, as far as it is needed, without its headers. Layouts are those of the versions in
// TRIED; tests/kernels/ggml_abi.cpp compares them with ggml's own headers.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace ggml_abi {

constexpr const char *TRIED[] = {"0.25.3"};
constexpr int API_VERSION = 2;

enum Type { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, IQ4_NL = 20, BF16 = 30 };
enum Op { NONE = 0, RESHAPE = 36, VIEW = 37, PERMUTE = 38, TRANSPOSE = 39, FLASH_ATTN_EXT = 74 };
enum Flag { COMPUTE = 16 };
enum Status { ALLOC_FAILED = -2, SUCCESS = 0 };
enum DeviceType { ACCEL = 3 };

struct Tensor {
    int32_t type;
    void *buffer;
    int64_t ne[4]; // numbers along each dimension
    size_t nb[4];  // bytes from one to the next; of dimension 0, those of a block
    int32_t op, params[16], flags;
    Tensor *src[10], *view_src;
    size_t view_offset;
    void *data;
    char name[64];
    void *extra;
    char padding[8];
};

struct BufferType {
    void *unused[5];
    bool (*is_host)(BufferType *);
    void *device, *context;
};

struct Device;
struct Registry;

struct Backend {
    const uint8_t *guid;
    const char *(*name)(Backend *);
    void (*free)(Backend *);
    void *unused[10];
    int (*compute)(Backend *, void *graph);
    void *events[2], *optimize;
    Device *device;
    void *context;
};

struct Properties {
    const char *name, *description;
    size_t free, total;
    int32_t type;
    const char *id;
    bool async, host_buffer, from_pointer, events, mapped;
};

struct Device {
    const char *(*name)(Device *);
    const char *(*description)(Device *);
    void (*memory)(Device *, size_t *free, size_t *total);
    int (*type)(Device *);
    void (*properties)(Device *, Properties *);
    Backend *(*start)(Device *, const char *);
    BufferType *(*buffer_type)(Device *);
    void *unused[2];
    bool (*supports_op)(Device *, const Tensor *);
    bool (*supports_buffer)(Device *, BufferType *);
    void *offload, *events[3];
    Registry *registry;
    void *context;
};

struct Registry {
    int32_t api_version;
    const char *(*name)(Registry *);
    size_t (*count)(Registry *);
    Device *(*device)(Registry *, size_t);
    void *(*address)(Registry *, const char *);
    void *context;
};
} // namespace ggml_abi
