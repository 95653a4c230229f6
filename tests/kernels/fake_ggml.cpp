// A small ggml for tests of the backend: the functions that it calls, a scheduler and naive attention, over structs of
// which macros choose the layout: that of 0.25.3, OLD, or SHUFFLED, which no version has. More macros make it wrong;
// SCALE and SLOPE are 1 and Q8_NUMBER is 8 where it is right.
#include <dlfcn.h>
#include <errno.h>
#include <math.h>
#include <new>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#if defined(SHUFFLED)
enum { API = 6, SOURCES = 12, PROPERTIES = 72, COMPUTE = 64, SHIFT = 1 };
enum { R_ADDRESS = 1, R_DEVICE = 3, R_NAME, R_COUNT = 6 };
enum { D_OP, D_REGISTRY, D_TYPE = 4, D_NAME, D_INIT, D_PROPERTIES, D_BUFFER, D_DESCRIPTION = 12, D_MEMORY, D_BUFFER_TYPE = 20 };
enum { B_DEVICE, B_COMPUTE = 3, B_GUID = 5, B_FREE, B_SYNCHRONIZE = 8, B_NAME = 19 };
#else
#if defined(OLD)
enum { API = 1, PROPERTIES = 40, COMPUTE = 0, SHIFT = -5, B_COMPUTE = 11, B_DEVICE = 14 };
#else
enum { API = 2, PROPERTIES = 56, COMPUTE = 16, SHIFT = 0, B_COMPUTE = 13, B_DEVICE = 17 };
#endif
enum { SOURCES = 10, B_GUID = 0, B_NAME, B_FREE, B_SYNCHRONIZE = 6, R_NAME = 1, R_COUNT, R_DEVICE, R_ADDRESS };
enum { D_NAME, D_DESCRIPTION, D_MEMORY, D_TYPE, D_PROPERTIES, D_INIT, D_BUFFER_TYPE, D_OP = 9, D_BUFFER, D_REGISTRY = 15 };
#endif
enum { F32 = 0, F16 = 1, Q4_0 = 2, Q8_0 = Q8_NUMBER };
enum { NONE = 0, RESHAPE = 36 + SHIFT, VIEW, PERMUTE, TRANSPOSE, ATTENTION = 74 + SHIFT };
struct Tensor {
    int32_t type;
    void *buffer;
    int64_t ne[4];
    size_t nb[4];
#if defined(SHUFFLED)
    char more[16];
#endif
    int32_t op, params[16], flags;
    Tensor *src[SOURCES], *view;
    size_t view_at;
    char *data, name[64];
    void *more_of_it[2];
};
struct Graph { int count; Tensor *node[64]; };
struct Params { size_t size; void *memory; bool no_alloc; };
struct Context { Params params; size_t used; std::vector<Tensor *> tensors; };
struct Scheduler { std::vector<void *> backends, memory; };
struct Object { void *word[24]; }; // a struct whose layout varies
template <class R, class... A> R call(const void *object, int word, A... more) {
    return ((R(*)(const void *, A...))((const Object *)object)->word[word])(object, more...);
}
static const struct Type { int number; const char *name; size_t size, block; } TYPES[] = {
    {0, "f32", 4, 1},      {1, "f16", 2, 1},       {2, "q4_0", 18, 32},    {3, "q4_1", 20, 32}, {6, "q5_0", 22, 32},
    {7, "q5_1", 24, 32},   {Q8_0, "q8_0", 34, 32}, {20, "iq4_nl", 18, 32}, {30, "bf16", 2, 1},  {-1, "none", 0, 1}};
static const Type &type_of(int number) {
    const Type *type = TYPES;
    while (type->number != number && type->number >= 0) type++;
    return *type;
}
static std::vector<void *> registries;

static float half(const char *at) {
    uint16_t x;
    memcpy(&x, at, 2);
    const int power = x >> 10 & 31;
    const float size = power == 31 ? INFINITY : power ? ldexpf(1024 + (x & 1023), power - 25) : ldexpf(x & 1023, -24);
    return x >> 15 ? -size : size;
}
static float number(const Tensor *t, int64_t i, int64_t row, int64_t head, int64_t stream) {
    const char *at = t->data + row * t->nb[1] + head * t->nb[2] + stream * t->nb[3];
    if (t->type == F32) return ((const float *)at)[i];
    if (t->type == F16) return half(at + 2 * i);
    at += i / 32 * t->nb[0], i %= 32;
    if (t->type == Q8_0) return half(at) * at[2 + i];
    return half(at) * ((at[2 + i % 16] >> (i < 16 ? 0 : 4) & 15) - 8);
}
static void attend(Tensor *out) {
    const Tensor *q = out->src[0], *k = out->src[1], *v = out->src[2], *mask = out->src[3], *sinks = out->src[4];
    float scale, bias, softcap;
    memcpy(&scale, out->params, 4), memcpy(&bias, out->params + 1, 4), memcpy(&softcap, out->params + 2, 4);
    std::vector<double> weight(k->ne[1]);
    for (int64_t s = 0; s < q->ne[3]; s++)
        for (int64_t h = 0; h < q->ne[2]; h++)
            for (int64_t i = 0; i < q->ne[1]; i++) {
                const int64_t own = h / (q->ne[2] / k->ne[2]);
                double total = sinks ? exp(number(sinks, h, 0, 0, 0)) : 0;
                for (int64_t t = 0; t < k->ne[1]; t++) {
                    double x = 0;
                    for (int64_t c = 0; c < q->ne[0]; c++) x += (double)number(q, c, i, h, s) * number(k, c, t, own, s);
                    x *= scale * SCALE;
                    if (softcap) x = softcap * tanh(x / softcap);
                    const double slope = pow(2, -bias * SLOPE * (h + 1) / q->ne[2]);
                    if (mask) x += slope * number(mask, t, i, 0, s % mask->ne[3]);
                    total += weight[t] = exp(x);
                }
                for (int64_t c = 0; c < v->ne[0]; c++) {
                    double sum = 0;
                    for (int64_t t = 0; t < k->ne[1]; t++) sum += weight[t] ? weight[t] * number(v, c, t, own, s) : 0;
                    ((float *)(out->data + h * out->nb[1] + i * out->nb[2] + s * out->nb[3]))[c] = (float)(sum / total);
                }
            }
}

extern "C" {
const char *ggml_type_name(int type) { return type_of(type).name; }
size_t ggml_type_size(int type) { return type_of(type).size; }
const char *ggml_op_name(int op) {
    if (op == ATTENTION) return "FLASH_ATTN_EXT";
    const char *const shapes[] = {"RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"};
    return op == NONE ? "NONE" : op >= RESHAPE && op <= TRANSPOSE ? shapes[op - RESHAPE] : "ANOTHER";
}
const char *ggml_op_desc(const Tensor *t) { return ggml_op_name(t->op); }

Context *ggml_init(Params params) {
    if (!params.memory) params.memory = calloc(1, params.size);
    return new Context{params, 0, {}};
}
void ggml_free(Context *c) {
    free(c->params.memory);
    delete c;
}
static void *take(Context *c, size_t size) {
    void *const taken = (char *)c->params.memory + c->used;
    c->used += (size + 15) / 16 * 16;
    return c->used <= c->params.size ? taken : (abort(), nullptr);
}
size_t ggml_tensor_overhead() { return sizeof(Tensor) + 32; }
size_t ggml_graph_overhead() { return sizeof(Graph) + 32; }
Tensor *ggml_new_tensor_4d(Context *c, int type, int64_t a, int64_t b, int64_t t, int64_t d) {
    Tensor *const made = new (take(c, ggml_tensor_overhead())) Tensor{};
    const Type &of = type_of(type);
    made->type = type;
    const int64_t ne[] = {a, b, t, d};
    memcpy(made->ne, ne, sizeof ne);
    made->nb[0] = of.size, made->nb[1] = of.size * a / of.block, made->nb[2] = made->nb[1] * b, made->nb[3] = made->nb[2] * t;
    if (!c->params.no_alloc) made->data = (char *)take(c, made->nb[3] * d);
    c->tensors.push_back(made);
    return made;
}
static Tensor *shaped(Context *c, Tensor *of, int op, const int64_t (&ne)[4], const size_t (&nb)[4], size_t at = 0) {
    Tensor *const made = new (take(c, ggml_tensor_overhead())) Tensor(*of);
    made->op = op, made->src[0] = made->view = of, made->view_at = at, made->data = of->data ? of->data + at : nullptr;
    memcpy(made->ne, ne, sizeof ne), memcpy(made->nb, nb, sizeof nb);
    return made;
}
Tensor *ggml_view_4d(Context *c, Tensor *t, int64_t w, int64_t x, int64_t y, int64_t z, size_t b, size_t d, size_t e, size_t at) {
    return shaped(c, t, VIEW, {w, x, y, z}, {t->nb[0], b, d, e}, at);
}
Tensor *ggml_reshape_2d(Context *c, Tensor *t, int64_t a, int64_t b) {
    const size_t row = t->nb[1] / t->ne[0] * a;
    return shaped(c, t, RESHAPE, {a, b, 1, 1}, {t->nb[0], row, row * b, row * b});
}
static Tensor *ordered(Context *c, Tensor *t, int op, const int (&to)[4]) {
    int64_t ne[4];
    size_t nb[4];
    for (int i = 0; i < 4; i++) ne[to[i]] = t->ne[i], nb[to[i]] = t->nb[i];
    return shaped(c, t, op, ne, nb);
}
Tensor *ggml_permute(Context *c, Tensor *t, int x, int y, int z, int w) { return ordered(c, t, PERMUTE, {x, y, z, w}); }
Tensor *ggml_transpose(Context *c, Tensor *t) { return ordered(c, t, TRANSPOSE, {1, 0, 2, 3}); }
Tensor *ggml_flash_attn_ext(Context *c, Tensor *q, Tensor *k, Tensor *v, Tensor *mask, float scale, float bias, float softcap) {
    Tensor *const made = ggml_new_tensor_4d(c, F32, v->ne[0], q->ne[2], q->ne[1], q->ne[3]), *const sources[] = {q, k, v, mask};
    const float numbers[] = {scale, bias, softcap};
    made->op = ATTENTION;
    memcpy(made->src, sources, sizeof sources), memcpy(made->params, numbers, sizeof numbers);
#if defined(ALWAYS)
    made->params[ALWAYS] = 1;
#endif
    return made;
}
void ggml_flash_attn_ext_set_prec(Tensor *t, int x) { t->params[3] = x; }
#if !defined(OLD)
const char *ggml_version() { return "0.25.3"; }
void ggml_flash_attn_ext_add_sinks(Tensor *t, Tensor *sinks) { t->src[4] = sinks; }
void ggml_flash_attn_ext_set_n_kv_max(Tensor *t, int x) { t->params[4] = x; }
#endif
void ggml_set_output(Tensor *t) { t->flags |= 2; }
void *ggml_get_data(const Tensor *t) { return t->data; }

Graph *ggml_new_graph(Context *c) { return new (take(c, sizeof(Graph))) Graph{}; }
void ggml_build_forward_expand(Graph *graph, Tensor *t) {
    for (int i = 0; i < graph->count; i++)
        if (graph->node[i] == t) return;
    for (Tensor *source : t->src)
        if (source) ggml_build_forward_expand(graph, source);
    if (t->op == NONE) return;
    t->flags |= COMPUTE;
    graph->node[graph->count++] = t;
}
int ggml_graph_n_nodes(Graph *graph) { return graph->count; }
Tensor *ggml_graph_node(Graph *graph, int i) { return graph->node[i]; }

size_t ggml_backend_reg_count() { return registries.size(); }
void *ggml_backend_reg_get(size_t i) { return registries[i]; }
#define CALLS(result, name, word) result ggml_backend_##name(void *it) { return call<result>(it, word); }
CALLS(const char *, reg_name, R_NAME) CALLS(size_t, reg_dev_count, R_COUNT) CALLS(const char *, dev_name, D_NAME)
CALLS(const char *, dev_description, D_DESCRIPTION) CALLS(int, dev_type, D_TYPE) CALLS(void *, dev_buffer_type, D_BUFFER_TYPE)
CALLS(const char *, name, B_NAME) CALLS(void, free, B_FREE)
void *ggml_backend_reg_dev_get(void *r, size_t i) { return call<void *>(r, R_DEVICE, i); }
void *ggml_backend_reg_get_proc_address(void *r, const char *name) { return call<void *>(r, R_ADDRESS, name); }
void ggml_backend_dev_memory(void *d, size_t *free, size_t *total) { call<void>(d, D_MEMORY, free, total); }
void ggml_backend_dev_get_props(void *d, char *to) {
#if !defined(NOT_CLEARED)
    memset(to, 0, PROPERTIES);
#endif
    call<void>(d, D_PROPERTIES, to);
}
void *ggml_backend_dev_backend_reg(Object *d) { return d->word[D_REGISTRY]; }
void *ggml_backend_dev_init(void *d, const char *text) { return call<void *>(d, D_INIT, text); }
bool ggml_backend_dev_supports_op(void *d, const Tensor *t) { return call<bool>(d, D_OP, t); }
bool ggml_backend_dev_supports_buft(void *d, void *type) { return call<bool>(d, D_BUFFER, type); }
void *ggml_backend_guid(Object *b) { return b->word[B_GUID]; }
void *ggml_backend_get_device(Object *b) { return b->word[B_DEVICE]; }
int ggml_backend_graph_compute_async(void *b, Graph *graph) { return call<int>(b, B_COMPUTE, graph); }
void *ggml_backend_dev_by_type(int type) {
    for (void *r : registries)
        if (void *d = ggml_backend_reg_dev_get(r, 0); ggml_backend_dev_type(d) == type) return d;
#if defined(HAS_A_GPU)
    if (static Object gpu; type == 1) return &gpu; // has no function that works
#endif
    return nullptr;
}
void *ggml_backend_init_best() {
    void *best = ggml_backend_dev_by_type(1);
#if defined(THREE_IS_A_GPU)
    best = ggml_backend_dev_by_type(3);
#endif
    return best ? ggml_backend_dev_init(best, nullptr) : nullptr;
}

static int cpu_memory; // its buffer type
void *ggml_backend_cpu_buffer_type() { return &cpu_memory; }
bool ggml_backend_buft_is_host(void *type) { return type == &cpu_memory; }
void *ggml_backend_alloc_ctx_tensors_from_buft(Context *c, void *) {
    size_t size = 0;
    for (Tensor *t : c->tensors) size += t->nb[3] * t->ne[3];
    char *const buffer = (char *)malloc(size), *at = buffer;
    for (Tensor *t : c->tensors) t->data = at, at += t->nb[3] * t->ne[3];
    return buffer;
}
void ggml_backend_buffer_free(void *buffer) { free(buffer); }
void ggml_backend_tensor_set(Tensor *t, const void *from, size_t at, size_t size) { memcpy(t->data + at, from, size); }
void ggml_backend_tensor_get(const Tensor *t, void *to, size_t at, size_t size) { memcpy(to, t->data + at, size); }

Scheduler *ggml_backend_sched_new(void **backends, void **, int count, size_t, bool, bool) {
    return new Scheduler{std::vector<void *>(backends, backends + count), {}};
}
void ggml_backend_sched_free(Scheduler *s) {
    for (void *one : s->memory) free(one);
    delete s;
}
int ggml_backend_sched_graph_compute(Scheduler *s, Graph *graph) {
    for (int i = 0; i < graph->count; i++) {
        Tensor *const t = graph->node[i];
        if (t->view) continue;
        s->memory.push_back(t->data = (char *)malloc(t->nb[3] * t->ne[3]));
        void *taker = nullptr;
        for (void *b : s->backends)
            if (void *d = ggml_backend_get_device((Object *)b); !taker && ggml_backend_dev_supports_op(d, t) && ggml_backend_dev_supports_buft(d, &cpu_memory))
                taker = b;
#if defined(SYNCHRONIZED)
        call<void>(taker, B_SYNCHRONIZE);
#endif
        Graph own = {1, {t}};
        if (!taker || ggml_backend_graph_compute_async(taker, &own) != 0) return -1;
    }
    return 0;
}

static Object registry, device, backend;
static int compute(void *, Graph *graph) {
    for (int i = 0; i < graph->count; i++) attend(graph->node[i]);
    return 0;
}
static void properties(void *, char *to) {
    const char *const names[] = {ggml_backend_dev_name(&device), ggml_backend_dev_description(&device)};
    const size_t memory[] = {1, 2, 0};
    memcpy(to, names, sizeof names), memcpy(to + 16, memory, PROPERTIES < 56 ? 20 : 24);
}
void ggml_backend_device_register(Object *d) { registries.push_back(ggml_backend_dev_backend_reg(d)); }
void ggml_backend_load_all() {
    backend.word[B_FREE] = backend.word[B_SYNCHRONIZE] = (void *)+[](void *) {};
    backend.word[B_COMPUTE] = (void *)compute, backend.word[B_DEVICE] = &device;
    registry.word[R_NAME] = device.word[D_NAME] = device.word[D_DESCRIPTION] = (void *)+[](void *) { return "CPU"; };
    registry.word[R_COUNT] = (void *)+[](void *) -> size_t { return 1; };
    registry.word[R_DEVICE] = (void *)+[](void *, size_t) { return &device; };
    registry.word[R_ADDRESS] = (void *)+[](void *, const char *) -> void * { return nullptr; };
    device.word[D_MEMORY] = (void *)+[](void *, size_t *free, size_t *total) { *free = 1, *total = 2; };
    device.word[D_TYPE] = (void *)+[](void *) { return 0; };
    device.word[D_PROPERTIES] = (void *)properties;
    device.word[D_INIT] = (void *)+[](void *, const char *) { return &backend; };
    device.word[D_OP] = device.word[D_BUFFER] = (void *)+[](void *, void *) { return true; };
    device.word[D_REGISTRY] = &registry;
    registry.word[0] = (void *)(uintptr_t)API;
    registries.push_back(&registry);
#if defined(DISAGREE)
    static Object other = registry;
    other.word[0] = (void *)(uintptr_t)(API + 1);
    registries.push_back(&other);
#endif
}
void *ggml_backend_load(const char *path) {
    void *const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const auto score = (int (*)())dlsym(library, "ggml_backend_score");
    void *const made = score() ? ((void *(*)())dlsym(library, "ggml_backend_init"))() : nullptr;
    if (!made || *(int *)made != API) return nullptr;
    registries.push_back(made);
    return made;
}
}
#if !defined(NO_BACKEND)
static const bool loaded = (ggml_backend_load_all(), true);
#endif
#if defined(NO_COPIES) // where this library is preloaded
extern "C" int fork() { return errno = EPERM, -1; }
#endif
