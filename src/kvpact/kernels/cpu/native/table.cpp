#include "table.h"

#if defined(KVP_X86)
#include "processor.h"
#endif

namespace {

enum { BASE = 1, AVX2 = 2, AVX512 = 4, NEON = 8, VBMI = 16 };

bool tiles = false; // whether the processor has AMX, and the process may use it

// The levels that this processor supports, of those that were compiled in.
int supported() {
    int found = 0;
#if defined(KVP_BASE)
    found |= BASE;
#endif
#if defined(KVP_X86)
    const Processor processor;
#if defined(KVP_AVX2_TOO)
    if (processor.avx2) found |= AVX2;
#endif
#if defined(KVP_AVX512_TOO)
    if (processor.avx512) found |= AVX512;
#endif
#if defined(KVP_VBMI)
    if (processor.vbmi) found |= VBMI;
#endif
    tiles = processor.tiles;
#elif defined(KVP_ARM)
    found |= NEON; // part of every AArch64
#endif
    return found;
}

#define KVP_FILLED(name) KVP_FILLED_BY(name, name)
#define KVP_FILLED_BY(one, name)    \
    [] {                            \
        Table table{};              \
        one::fill_attend(table);    \
        name::fill_rows(table);     \
        name::fill_encode(table);   \
        name::fill_learn(table);    \
        name::fill_decode(table);   \
        name::fill_scan(table);     \
        return table;               \
    }

} // namespace

const Table *table_of(int level) {
    static const int levels = supported();
    if (!(levels & level)) return nullptr;
#if defined(KVP_VBMI)
    static const Table vbmi = [] {
        Table table = KVP_FILLED_BY(kvp_avx512vbmi, kvp_avx512)();
#if defined(KVP_TILES)
        if (tiles) kvp_amx::fill_scan(table);
#endif
        return table;
    }();
    if (level == VBMI) return &vbmi;
#endif
#if defined(KVP_AVX512_TOO)
    static const Table avx512 = KVP_FILLED(kvp_avx512)();
    if (level == AVX512) return &avx512;
#endif
#if defined(KVP_AVX2_TOO)
    static const Table avx2 = KVP_FILLED(kvp_avx2)();
    if (level == AVX2) return &avx2;
#endif
#if defined(KVP_ARM)
    static const Table neon = KVP_FILLED(kvp_neon)();
    if (level == NEON) return &neon;
#endif
#if defined(KVP_BASE)
    static const Table base = KVP_FILLED(kvp_base)();
    if (level == BASE) return &base;
#endif
    return nullptr;
}

int kvp_abi(void) { return KVP_ABI; }

int kvp_levels(void) { return supported(); }
