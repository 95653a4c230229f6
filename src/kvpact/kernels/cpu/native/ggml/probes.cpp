// Where ggml looks into its structs: an object of numbered functions is called through its public ones, and tensors with
// recognisable numbers are searched for them.
#include <algorithm>
#include <array>
#include <string.h>
#include <utility>
#include <vector>

#include "ggml/host.h"

namespace {

// ---- An object whose every word is a function that says which word it is.
thread_local int called, calls;
thread_local const void *first, *second;
alignas(64) char nothing[4096]; // what it returns may be looked into

template <int N> uintptr_t numbered(const void *a, const void *b) {
    calls++, called = N, first = a, second = b;
    return (uintptr_t)nothing;
}
using Numbered = std::array<void *, 64>;
template <int... N> Numbered all_numbered(std::integer_sequence<int, N...>) { return {(void *)numbered<N>...}; }
// All are there, and no two are the same.
bool distinct(std::vector<int> words, int lowest) {
    std::sort(words.begin(), words.end());
    return words[0] >= lowest && std::adjacent_find(words.begin(), words.end()) == words.end();
}

// ---- Bytes of a tensor.
// Where alone `wanted` holds, in steps of `step`; -1: nowhere, or twice.
template <class Wanted> int only(int size, int step, Wanted &&wanted) {
    int found = -1;
    for (int at = 0; at + step <= size; at += step)
        if (wanted(at)) {
            if (found >= 0) return -1;
            found = at;
        }
    return found;
}
template <class T, size_t N> int only(int size, const void *tensor, const T (&values)[N]) {
    return only(size, sizeof(T), [&](int at) {
        return at + (int)sizeof values <= size && memcmp((const char *)tensor + at, values, sizeof values) == 0;
    });
}
// The 4 bytes that alone `change` changes, or -1.
template <class Change> int changed(int size, const void *tensor, Change &&change) {
    const std::vector<char> before((const char *)tensor, (const char *)tensor + size);
    change();
    return only(size, 4, [&](int at) { return memcmp(before.data() + at, (const char *)tensor + at, 4) != 0; });
}

constexpr struct { int number; const char *name; size_t block; } TYPES[] = {
    {ggml_abi::F32, "f32", 4},    {ggml_abi::F16, "f16", 2},    {ggml_abi::BF16, "bf16", 2},
    {ggml_abi::Q4_0, "q4_0", 18}, {ggml_abi::Q4_1, "q4_1", 20}, {ggml_abi::Q5_0, "q5_0", 22},
    {ggml_abi::Q5_1, "q5_1", 24}, {ggml_abi::Q8_0, "q8_0", 34}, {ggml_abi::IQ4_NL, "iq4_nl", 18}};
constexpr const char *NAMES[] = {"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "FLASH_ATTN_EXT"};

} // namespace

bool Host::probe() { return find_slots() && find_tensors(); }

bool Host::find_slots() {
    const Owned context(ggml.init({ggml.tensor_overhead() * 4 + ggml.graph_overhead() + 4096, nullptr, true}), ggml.free);
    if (!context) return refuse("it has no memory");
    void *tensor = ggml.new_tensor_4d(context.get(), ggml_abi::F32, 4, 1, 1, 1), *graph = ggml.new_graph(context.get());
    Numbered fake = all_numbered(std::make_integer_sequence<int, 64>());
    size_t some, more;
    alignas(16) char bytes[1024];
    memset(bytes, 0xee, sizeof bytes);
    const char *text = "kvpact";
    // The word that `use` calls, once, with the object as its first argument and `with`, if any, as its second.
    const auto word = [&](auto &&use, const void *with = nullptr) {
        calls = 0;
        use();
        return calls == 1 && first == &fake && (!with || second == with) ? called : -1;
    };
    const auto word_of = [&](const void *value) {
        const auto at = std::find(fake.begin(), fake.end(), value);
        return at == fake.end() ? -1 : (int)(at - fake.begin());
    };
    auto &r = slot.registry;
    r.name = word([&] { ggml.backend_reg_name(&fake); });
    r.count = word([&] { ggml.backend_reg_dev_count(&fake); });
    r.device = word([&] { ggml.backend_reg_dev_get(&fake, 0); });
    r.address = word([&] { ggml.backend_reg_get_proc_address(&fake, text); }, text);
    auto &d = slot.device;
    d.name = word([&] { ggml.backend_dev_name(&fake); });
    d.description = word([&] { ggml.backend_dev_description(&fake); });
    d.memory = word([&] { ggml.backend_dev_memory(&fake, &some, &more); }, &some);
    d.type = word([&] { ggml.backend_dev_type(&fake); });
    d.properties = word([&] { ggml.backend_dev_get_props(&fake, bytes); }, bytes);
    d.init = word([&] { ggml.backend_dev_init(&fake, text); }, text);
    d.buffer_type = word([&] { ggml.backend_dev_buffer_type(&fake); });
    d.supports_op = word([&] { ggml.backend_dev_supports_op(&fake, tensor); }, tensor);
    d.supports_buffer = word([&] { ggml.backend_dev_supports_buft(&fake, nothing); }, nothing);
    d.registry = word_of(ggml.backend_dev_backend_reg(&fake));
    auto &b = slot.backend;
    b.name = word([&] { ggml.backend_name(&fake); });
    b.free = word([&] { ggml.backend_free(&fake); });
    b.compute = word([&] { ggml.backend_graph_compute_async(&fake, graph); }, graph);
    b.guid = word_of(ggml.backend_guid(&fake)), b.device = word_of(ggml.backend_get_device(&fake));
    // A registry begins with the number of the interface.
    if (!distinct({r.name, r.count, r.device, r.address}, 1) || !distinct({b.name, b.free, b.compute, b.guid, b.device}, 0) ||
        !distinct({d.name, d.description, d.memory, d.type, d.properties, d.init, d.buffer_type, d.supports_op, d.supports_buffer, d.registry}, 0))
        return refuse("it does not call its backends as kvpact expects");
    // Properties were cleared before they were asked for, by which their size shows. Ours stay clear but for name,
    // description and type, whose places are public. Devices have an id since there is a type of integrated GPUs, which
    // comes before that of accelerators.
    const int size = (int)(std::find_if(bytes, bytes + sizeof bytes, [](char x) { return x != 0; }) - bytes);
    accelerator = size <= 40 ? 2 : 3;
    void *cpu = ggml.backend_dev_by_type(0);
    ggml.backend_dev_get_props(cpu, bytes);
    ggml.backend_dev_memory(cpu, &some, &more);
    return (size >= 40 && size <= 512 && value_at<const char *>(bytes, 0) == ggml.backend_dev_name(cpu) && value_at<int>(bytes, 32) == 0 &&
            value_at<const char *>(bytes, 8) == ggml.backend_dev_description(cpu) && value_at<size_t>(bytes, 24) == more) ||
           refuse("its devices' properties are not as kvpact expects");
}

bool Host::find_tensors() {
    for (const auto &type : TYPES)
        if (strcmp(ggml.type_name(type.number), type.name) != 0 || ggml.type_size(type.number) != type.block)
            return refuse("its type %d is not %s", type.number, type.name);
    const int size = (int)ggml.tensor_overhead();
    const Owned context(ggml.init({(size_t)size * 24 + ggml.graph_overhead() + 4096, nullptr, true}), ggml.free);
    const Owned memory(ggml.init({(size_t)size * 2 + 4096, nullptr, false}), ggml.free);
    if (!context || !memory || size < 200 || size > 1024) return refuse("its tensors have a size that kvpact does not expect");
    const auto tensor = [&](int type, int64_t a, int64_t b, int64_t c, int64_t d) {
        return ggml.new_tensor_4d(context.get(), type, a, b, c, d);
    };
    void *q8 = tensor(ggml_abi::Q8_0, 64, 3, 5, 7), *f16 = tensor(ggml_abi::F16, 64, 3, 5, 7);
    void *held = ggml.new_tensor_4d(memory.get(), ggml_abi::F32, 16, 1, 1, 1);
    // Its numbers may lie after its words, and look like one of them while nobody has written any.
    if (void *own = held ? ggml.get_data(held) : nullptr) memset(own, 0, 64);
    const int64_t ne[] = {64, 3, 5, 7};
    const size_t nb[] = {34, 68, 204, 1020};
    const void *data[] = {ggml.get_data(held)};
    at.ne = only(size, q8, ne), at.nb = only(size, q8, nb), at.data = data[0] ? only(size, held, data) : -1;
    void *bf16 = tensor(ggml_abi::BF16, 64, 3, 5, 7), *q4 = tensor(ggml_abi::Q4_0, 64, 3, 5, 7);
    at.type = only(size, 4, [&](int i) {
        return value_at<int>(q8, i) == ggml_abi::Q8_0 && value_at<int>(f16, i) == ggml_abi::F16 &&
               value_at<int>(bf16, i) == ggml_abi::BF16 && value_at<int>(q4, i) == ggml_abi::Q4_0;
    });
    if (at.ne < 0 || at.nb < 0 || at.data < 0 || at.type < 0) return refuse("its tensors do not show type, sizes and data");
    // 3 queries of 4 heads, 64 tokens of 2.
    void *q = tensor(ggml_abi::F32, 64, 3, 4, 1), *k = tensor(ggml_abi::Q8_0, 64, 64, 2, 1);
    void *v = tensor(ggml_abi::Q4_0, 32, 64, 2, 1), *mask = tensor(ggml_abi::F16, 64, 64, 1, 1);
    const float numbers[] = {.1171875f, .40625f, 3.25f};
    void *node = ggml.flash_attn_ext(context.get(), q, k, v, mask, numbers[0], numbers[1], numbers[2]);
    const void *sources[] = {q, k, v, mask};
    void *const view = ggml.view_4d(context.get(), q8, 32, 3, 5, 7, nb[1], nb[2], nb[3], 34);
    void *const reshaped = ggml.reshape_2d(context.get(), q8, 64, 105), *const transposed = ggml.transpose(context.get(), f16);
    void *const made[OPERATIONS] = {q8, view, reshaped, ggml.permute(context.get(), f16, 0, 2, 1, 3), transposed, node};
    at.sources = only(size, node, sources), at.numbers = only(size, node, numbers);
    // After the sources is what a view is of; after the numbers are the flags.
    const int viewed = only(size, 8, [&](int i) { return i != at.sources && value_at<void *>(view, i) == q8; });
    at.flags = changed(size, q8, [&] { ggml.set_output(q8); });
    at.source_count = (viewed - at.sources) / 8, at.number_count = (at.flags - at.numbers) / 4;
    if (at.sources < 0 || at.numbers < 0 || at.source_count < 5 || at.source_count > 64 || at.number_count < 4 || at.number_count > 32)
        return refuse("its operations do not show their sources and numbers");
    // The number of an operation stands where all of these differ, and have their names; functions of names check no bounds.
    at.operation = only(size, 4, [&](int i) {
        for (int o = 0; o < OPERATIONS; o++) operation[o] = value_at<int>(made[o], i);
        const std::vector<int> found(operation, operation + OPERATIONS);
        if (found[NONE] || *std::max_element(found.begin(), found.end()) > 255 || !distinct(found, 0)) return false;
        for (int o = 0; o < OPERATIONS; o++)
            if (strcmp(ggml.op_name(found[o]), NAMES[o]) != 0 || strcmp(ggml.op_desc(made[o]), NAMES[o]) != 0) return false;
        return true;
    });
    if (at.operation < 0) return refuse("its tensors do not show their operation");
    for (int o = 0; o < OPERATIONS; o++) operation[o] = operation_of(made[o]);
    return find_attention(context.get(), node, size);
}

bool Host::find_attention(void *context, void *node, int size) {
    void *const *sources = (void *const *)((const char *)node + at.sources);
    void *sinks = ggml.new_tensor_4d(context, ggml_abi::F32, 4, 1, 1, 1);
    void *bare = ggml.flash_attn_ext(context, sources[0], sources[1], sources[2], nullptr, .5f, 0, 0);
    at.known = 7;
    const auto may_be_ignored = [&](auto &&set) {
        const int place = changed(size, node, set);
        if (place >= at.numbers && place < at.flags) at.known |= 1u << (place - at.numbers) / 4;
    };
    if (ggml.flash_attn_ext_set_prec) may_be_ignored([&] { ggml.flash_attn_ext_set_prec(node, 10); });
    // A bound of what the mask says.
    if (ggml.flash_attn_ext_set_n_kv_max) may_be_ignored([&] { ggml.flash_attn_ext_set_n_kv_max(node, 0x1234); });
    if (ggml.flash_attn_ext_add_sinks) ggml.flash_attn_ext_add_sinks(node, sinks);
    at.sinks = sources[4] == sinks;
    void *graph = ggml.new_graph(context);
    const int32_t before = value_at<int32_t>(bare, at.flags);
    ggml.build_forward_expand(graph, bare);
    at.compute = value_at<int32_t>(bare, at.flags) & ~before;
    if (ggml.graph_n_nodes(graph) != 1 || ggml.graph_node(graph, 0) != bare) return refuse("its graphs do not show their nodes");
    ggml_abi::Attention full, less;
    if (!read(node, full) || !read(bare, less)) return refuse("its attention has numbers or sources that kvpact does not know");
    const int64_t out[] = {32, 4, 3, 1};
    return (full.q.type == ggml_abi::F32 && full.k.type == ggml_abi::Q8_0 && full.v.type == ggml_abi::Q4_0 &&
            memcmp(full.out.ne, out, sizeof out) == 0 && full.has_mask && full.has_sinks == at.sinks && full.scale == .1171875f &&
            full.bias == .40625f && full.softcap == 3.25f && !less.has_mask && !less.has_sinks && less.scale == .5f) ||
           refuse("its attention is not read as kvpact expects");
}
