// The functions of one instruction set. Each kernel source is compiled once per level, in a namespace
// of its own (see simd/level.h), and fills in its part of the level's table.
#pragma once
#include "attend/job.h"
#include "attend/rows.h"
#include "sizes.h"

struct Table {
    // attend/attend.cpp: few query rows per KV head.
    int64_t (*whole_query)(const Job &job); // numbers of memory that a head's queries need as whole numbers
    void (*prepare)(const Job &job);
    // False: there is no memory.
    bool (*task)(const Job &job, int64_t index);
    void (*finish)(const Job &job);
    uint64_t (*read)(const char *data, int64_t bytes);
    // attend/rows.cpp: many.
    void (*rows_task)(const RowsJob &job, int64_t index);
    void (*rows_finish)(const RowsJob &job, int64_t index);
    // encode/encode.cpp: tokens of one head; or one token of each of many heads, counted through.
    bool (*encode_span)(const kvp_encode_args &args, Span span);
    bool (*encode_few)(const kvp_encode_args &args, int64_t first, int64_t last);
    // The largest magnitude of `count` numbers, as its bits.
    uint32_t (*largest)(const void *numbers, int64_t count, int32_t dtype);
    // Rounds numbers to a dtype; what is beyond fp16 becomes its largest number.
    void (*narrow)(char *to, const float *from, int64_t count, int32_t dtype);
    // encode/learn.cpp: what keys of one head learn.
    bool (*learn_head)(const kvp_learn_args &args, int64_t head);
    // decode/decode.cpp: positions of one head.
    bool (*decode_span)(const kvp_decode_args &args, Span span);
    // scan/scan.cpp: tokens of a row, whole groups.
    bool (*scan_span)(const kvp_scan_args &args, Span span);
};

// The largest magnitude in a tensor; NaN or infinity where one number is.
float magnitude_of(const Table &table, const kvp_tensor &x, int64_t threads);

// The table of a level, one bit of kvp_levels; NULL where it is not compiled in or not supported.
const Table *table_of(int level);

#define KVP_LEVEL(name)                 \
    namespace name {                    \
    void fill_attend(Table &table);     \
    void fill_rows(Table &table);       \
    void fill_encode(Table &table);     \
    void fill_learn(Table &table);      \
    void fill_decode(Table &table);     \
    void fill_scan(Table &table);       \
    }
KVP_LEVEL(kvp_base)
KVP_LEVEL(kvp_neon)
KVP_LEVEL(kvp_avx2)
KVP_LEVEL(kvp_avx512)
// Attention with few query rows alone; all else is of the level below.
namespace kvp_avx512vbmi {
void fill_attend(Table &table);
}
// Scans alone, of the level above where the processor has tiles.
namespace kvp_amx {
void fill_scan(Table &table);
}
