// Compiles where our declarations of ggml's structures agree with its headers: -I<llama.cpp>/ggml/include
// -I<llama.cpp>/ggml/src -Isrc/kvpact/kernels/cpu/native -fsyntax-only.
#include <stddef.h>

#include "ggml-backend-impl.h"
#include "ggml.h"

#include "ggml/ggml_abi.h"

namespace ours = ggml_abi;

#define SAME_VALUE(name, theirs) static_assert((int)ours::name == (int)theirs, #name)
#define SAME_SIZE(type, theirs) static_assert(sizeof(ours::type) == sizeof(theirs), #type)
#define SAME(type, member, theirs, their_member)                                                             \
    static_assert(offsetof(ours::type, member) == offsetof(theirs, their_member), #type " " #member);       \
    static_assert(sizeof(ours::type::member) == sizeof(theirs::their_member), #type " " #member)

SAME_VALUE(API_VERSION, GGML_BACKEND_API_VERSION);
SAME_VALUE(F32, GGML_TYPE_F32);
SAME_VALUE(F16, GGML_TYPE_F16);
SAME_VALUE(BF16, GGML_TYPE_BF16);
SAME_VALUE(Q4_0, GGML_TYPE_Q4_0);
SAME_VALUE(Q4_1, GGML_TYPE_Q4_1);
SAME_VALUE(Q5_0, GGML_TYPE_Q5_0);
SAME_VALUE(Q5_1, GGML_TYPE_Q5_1);
SAME_VALUE(Q8_0, GGML_TYPE_Q8_0);
SAME_VALUE(IQ4_NL, GGML_TYPE_IQ4_NL);
SAME_VALUE(NONE, GGML_OP_NONE);
SAME_VALUE(RESHAPE, GGML_OP_RESHAPE);
SAME_VALUE(VIEW, GGML_OP_VIEW);
SAME_VALUE(PERMUTE, GGML_OP_PERMUTE);
SAME_VALUE(TRANSPOSE, GGML_OP_TRANSPOSE);
SAME_VALUE(FLASH_ATTN_EXT, GGML_OP_FLASH_ATTN_EXT);
SAME_VALUE(COMPUTE, GGML_TENSOR_FLAG_COMPUTE);
SAME_VALUE(ALLOC_FAILED, GGML_STATUS_ALLOC_FAILED);
SAME_VALUE(SUCCESS, GGML_STATUS_SUCCESS);
SAME_VALUE(ACCEL, GGML_BACKEND_DEVICE_TYPE_ACCEL);

SAME_SIZE(Tensor, ggml_tensor);
SAME(Tensor, type, ggml_tensor, type);
SAME(Tensor, ne, ggml_tensor, ne);
SAME(Tensor, nb, ggml_tensor, nb);
SAME(Tensor, op, ggml_tensor, op);
SAME(Tensor, params, ggml_tensor, op_params);
SAME(Tensor, flags, ggml_tensor, flags);
SAME(Tensor, src, ggml_tensor, src);
SAME(Tensor, view_src, ggml_tensor, view_src);
SAME(Tensor, data, ggml_tensor, data);

SAME_SIZE(BufferType, ggml_backend_buffer_type);
SAME(BufferType, is_host, ggml_backend_buffer_type, iface.is_host);

SAME_SIZE(Backend, ggml_backend);
SAME(Backend, guid, ggml_backend, guid);
SAME(Backend, name, ggml_backend, iface.get_name);
SAME(Backend, free, ggml_backend, iface.free);
SAME(Backend, compute, ggml_backend, iface.graph_compute);
SAME(Backend, device, ggml_backend, device);
SAME(Backend, context, ggml_backend, context);

SAME_SIZE(Properties, ggml_backend_dev_props);
SAME(Properties, name, ggml_backend_dev_props, name);
SAME(Properties, free, ggml_backend_dev_props, memory_free);
SAME(Properties, total, ggml_backend_dev_props, memory_total);
SAME(Properties, type, ggml_backend_dev_props, type);
SAME(Properties, id, ggml_backend_dev_props, device_id);
SAME(Properties, async, ggml_backend_dev_props, caps.async);
SAME(Properties, mapped, ggml_backend_dev_props, caps.mmap_support);

SAME_SIZE(Device, ggml_backend_device);
SAME(Device, name, ggml_backend_device, iface.get_name);
SAME(Device, description, ggml_backend_device, iface.get_description);
SAME(Device, memory, ggml_backend_device, iface.get_memory);
SAME(Device, type, ggml_backend_device, iface.get_type);
SAME(Device, properties, ggml_backend_device, iface.get_props);
SAME(Device, start, ggml_backend_device, iface.init_backend);
SAME(Device, buffer_type, ggml_backend_device, iface.get_buffer_type);
SAME(Device, supports_op, ggml_backend_device, iface.supports_op);
SAME(Device, supports_buffer, ggml_backend_device, iface.supports_buft);
SAME(Device, registry, ggml_backend_device, reg);
SAME(Device, context, ggml_backend_device, context);

SAME_SIZE(Registry, ggml_backend_reg);
SAME(Registry, api_version, ggml_backend_reg, api_version);
SAME(Registry, name, ggml_backend_reg, iface.get_name);
SAME(Registry, count, ggml_backend_reg, iface.get_device_count);
SAME(Registry, device, ggml_backend_reg, iface.get_device);
SAME(Registry, address, ggml_backend_reg, iface.get_proc_address);
SAME(Registry, context, ggml_backend_reg, context);
