// Compiles where our declarations of ggml's structures agree with its headers: -I<llama.cpp>/ggml/include
// -I<llama.cpp>/ggml/src -Isrc/kvpact/kernels/cpu/native -fsyntax-only.
#include <stddef.h>

#include "ggml-backend-impl.h"
#include "ggml.h"

#include "ggml/ggml_abi.h"

namespace ours = ggml_abi;

#define VALUE(name, theirs) static_assert((int)ours::name == (int)theirs, #name);
#define TYPE(name) VALUE(name, GGML_TYPE_##name)
#define OP(name) VALUE(name, GGML_OP_##name)
#define SIZE(type, theirs) static_assert(sizeof(ours::type) == sizeof(theirs), #type);
#define AS(type, member, theirs, their_member)                                                              \
    static_assert(offsetof(ours::type, member) == offsetof(theirs, their_member), #type " " #member);       \
    static_assert(sizeof(ours::type::member) == sizeof(theirs::their_member), #type " " #member);

VALUE(API_VERSION, GGML_BACKEND_API_VERSION)
TYPE(F32) TYPE(F16) TYPE(BF16) TYPE(Q4_0) TYPE(Q4_1) TYPE(Q5_0) TYPE(Q5_1) TYPE(Q8_0) TYPE(IQ4_NL)
OP(NONE) OP(RESHAPE) OP(VIEW) OP(PERMUTE) OP(TRANSPOSE) OP(FLASH_ATTN_EXT)
VALUE(COMPUTE, GGML_TENSOR_FLAG_COMPUTE)
VALUE(ALLOC_FAILED, GGML_STATUS_ALLOC_FAILED) VALUE(SUCCESS, GGML_STATUS_SUCCESS)
VALUE(ACCEL, GGML_BACKEND_DEVICE_TYPE_ACCEL)

#define TENSOR(member) AS(Tensor, member, ggml_tensor, member)
SIZE(Tensor, ggml_tensor)
TENSOR(type) TENSOR(ne) TENSOR(nb) TENSOR(op) TENSOR(flags) TENSOR(src) TENSOR(view_src) TENSOR(data)
AS(Tensor, params, ggml_tensor, op_params)

SIZE(BufferType, ggml_backend_buffer_type)
AS(BufferType, is_host, ggml_backend_buffer_type, iface.is_host)

#define BACKEND(member, theirs) AS(Backend, member, ggml_backend, theirs)
SIZE(Backend, ggml_backend)
BACKEND(guid, guid) BACKEND(name, iface.get_name) BACKEND(free, iface.free) BACKEND(compute, iface.graph_compute)
BACKEND(device, device) BACKEND(context, context)

#define PROPERTY(member, theirs) AS(Properties, member, ggml_backend_dev_props, theirs)
SIZE(Properties, ggml_backend_dev_props)
PROPERTY(name, name) PROPERTY(description, description) PROPERTY(free, memory_free) PROPERTY(total, memory_total)
PROPERTY(type, type) PROPERTY(id, device_id) PROPERTY(async, caps.async) PROPERTY(mapped, caps.mmap_support)

#define DEVICE(member, theirs) AS(Device, member, ggml_backend_device, theirs)
SIZE(Device, ggml_backend_device)
DEVICE(name, iface.get_name) DEVICE(description, iface.get_description) DEVICE(memory, iface.get_memory)
DEVICE(type, iface.get_type) DEVICE(properties, iface.get_props) DEVICE(start, iface.init_backend)
DEVICE(buffer_type, iface.get_buffer_type) DEVICE(supports_op, iface.supports_op)
DEVICE(supports_buffer, iface.supports_buft) DEVICE(registry, reg) DEVICE(context, context)

#define REGISTRY(member, theirs) AS(Registry, member, ggml_backend_reg, theirs)
SIZE(Registry, ggml_backend_reg)
REGISTRY(api_version, api_version) REGISTRY(name, iface.get_name) REGISTRY(count, iface.get_device_count)
REGISTRY(device, iface.get_device) REGISTRY(address, iface.get_proc_address) REGISTRY(context, context)
