#include "ggml/host.h"

#include <stdarg.h>
#include <stdio.h>

#include "ggml/loaded.h"

bool Host::refuse(const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(why, sizeof why, format, values);
    va_end(values);
    return false;
}

Host::Host(const void *caller) {
    if (find_functions(caller)) find_api();
}

// All of one library and those it is linked with: another ggml of this process may have some that this one lacks.
bool Host::find_functions(const void *caller) {
    void *home = library_with("ggml_backend_reg_get", caller);
    if (!home) return refuse("no ggml that shows its functions is loaded in this process");
#define F(result, name, arguments) ggml.name = (decltype(ggml.name))function_of(home, "ggml_" #name);
    KVP_GGML_NEEDED(F)
    KVP_GGML_SOMETIMES(F)
#undef F
#define F(result, name, arguments)                                                                                    \
    if (!ggml.name) return refuse("it has no function ggml_" #name);
    KVP_GGML_NEEDED(F)
#undef F
    return true;
}

// The number of the interface is the first word of each registry.
bool Host::find_api() {
    const size_t count = ggml.backend_reg_count();
    if (!count || !ggml.backend_dev_by_type(0)) return refuse("its CPU backend has to be loaded before kvpact's");
    api = value_at<int32_t>(ggml.backend_reg_get(0), 0);
    for (size_t i = 0; i < count; i++)
        if (api < 1 || api > 9999 || value_at<int32_t>(ggml.backend_reg_get(i), 0) != api)
            return refuse("its backends do not begin with the number of its interface");
    return true;
}

bool Host::read(const void *node, ggml_abi::Attention &to) const {
    const auto read_tensor = [&](const void *from, ggml_abi::Tensor &tensor) {
        tensor.type = value_at<int32_t>(from, at.type);
        memcpy(tensor.ne, (const char *)from + at.ne, sizeof tensor.ne);
        memcpy(tensor.nb, (const char *)from + at.nb, sizeof tensor.nb);
        tensor.data = value_at<void *>(from, at.data);
    };
    for (int i = 0; i < at.number_count; i++)
        if (!(at.known >> i & 1) && value_at<int32_t>(node, at.numbers + i * 4)) return false;
    ggml_abi::Tensor *const parts[] = {&to.q, &to.k, &to.v, &to.mask, &to.sinks};
    bool has[5] = {};
    for (int i = 0; i < at.source_count; i++) {
        const void *source = value_at<const void *>(node, at.sources + i * 8);
        if (source && i >= (at.sinks ? 5 : 4)) return false;
        if (source) read_tensor(source, *parts[i]), has[i] = true;
    }
    read_tensor(node, to.out);
    to.has_mask = has[3], to.has_sinks = has[4];
    to.scale = value_at<float>(node, at.numbers), to.bias = value_at<float>(node, at.numbers + 4);
    to.softcap = value_at<float>(node, at.numbers + 8);
    return has[0] && has[1] && has[2];
}
