// A few threads of our own, shared by all calls of the process.
#pragma once
#include <stdint.h>

// Returns false where it could not be done, for want of memory.
typedef bool (*kvp_work)(void *context, int64_t index);

// Calls work(context, i) for 0 <= i < count on the caller and at most `threads` - 1 others. Where
// the others are busy for somebody else, the caller does it all: no two calls share cores. False if any of
// them returned false.
bool kvp_parallel(int64_t threads, int64_t count, kvp_work work, void *context);
// The threads for so many numbers to encode or to decode: one, where it takes longer to wake another one. Those of
// OpenMP are awake.
int64_t kvp_threads(int64_t threads, int64_t numbers);
