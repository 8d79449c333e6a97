// A call of a generated program: its arguments, its clock, its batches in parts, and where its buffers lie.

#pragma once

#include <string.h>
#include <time.h>

#include "base/pool.h"

// One call of the program: free dimensions, where buffers lie, constants, the caller's tensors with their strides
// (in elements; batch, channel, row, column).
struct Run {
    const int64_t* dims;
    const int64_t* offsets;
    uint8_t* arena;
    const uint8_t* constants;
    uint8_t* const* external;
    const int64_t* strides;
    struct IntaglioBarrier* barrier;
    const uint8_t* bytes;  // which of them hold levels, where the program takes floats too
    int64_t* times;        // nanoseconds by step, then the last reading of the clock; null when nobody asks
    int32_t* outside;      // becomes 1 where an id is none of a table's rows
};

// A constant of the program by its offset.
template <class T>
static inline const T* constant(const struct Run* r, int64_t offset) {
    return (const T*)(r->constants + offset);
}

// After a step, when times are asked for: all threads meet, the first reads the clock. Step -1 starts it.
static inline void time_step(const struct Run* r, int64_t step, int64_t steps, int thread, int threads) {
    struct timespec now;
    if (!r->times) return;
    intaglio_barrier_wait(r->barrier, threads);
    if (thread) return;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const int64_t nanoseconds = now.tv_sec * 1000000000 + now.tv_nsec;
    if (step >= 0) r->times[step] += nanoseconds - r->times[steps];
    r->times[steps] = nanoseconds;
}

// Images `first` to `first + count` of a batch. What steps leave for each other in a turn lies in the `slot`-th of
// equal parts of memory, or with `spread` over so many of them.
struct Part {
    int64_t first, count, slot, spread;
};

typedef void (*TakeTurn)(const struct Run*, const struct Part*, int thread, int threads);

// Turns of `each` images whose memory the arena has: one for every core, if there are so many.
static inline int64_t turns_at_once(int64_t batch, int64_t each) {
    const int64_t turns = (batch + each - 1) / each, cores = intaglio_cores();
    return turns < cores ? turns : cores;
}

// Threads take turns of their own, and none waits, as long as there is one for all of them; the rest they take
// together.
static inline void take_turns(const struct Run* r, TakeTurn take, int64_t batch, int64_t each, int thread,
                              int threads) {
    const int64_t slots = turns_at_once(batch, each), own = threads <= slots ? batch / (each * threads) : 0;
    for (int64_t i = 0; i < own; ++i) {
        const struct Part part = {(thread * own + i) * each, each, thread, 1};
        take(r, &part, 0, 1);
    }
    if (own) intaglio_barrier_wait(r->barrier, threads);
    for (int64_t first = threads * own * each; first < batch; first += slots * each) {
        const struct Part part = {first, batch - first < slots * each ? batch - first : slots * each, 0, slots};
        take(r, &part, thread, threads);
    }
}

// First of `total` items that a thread takes.
static inline int64_t share(int64_t total, int thread, int threads) { return total * thread / threads; }

// Life of one buffer: the barrier groups in which it holds data.
struct Life {
    int32_t first, last;
};

// Lowest place for each buffer, in the order given, that overlaps no buffer alive at the same time; returns the bytes
// of the arena. Offsets are multiples of 64.
static inline int64_t place(const struct Life* lives, const int64_t* sizes, int count, int64_t* offsets) {
    int64_t arena = 0;
    for (int i = 0; i < count; ++i) {
        const int64_t size = (sizes[i] + 64 + 63) / 64 * 64;
        int64_t offset = 0;
        for (int moved = 1; moved;) {
            moved = 0;
            for (int j = 0; j < i; ++j) {
                if (lives[j].first > lives[i].last || lives[i].first > lives[j].last) continue;
                const int64_t end = offsets[j] + (sizes[j] + 64 + 63) / 64 * 64;
                if (offset < end && offsets[j] < offset + size) offset = end, moved = 1;
            }
        }
        offsets[i] = offset;
        if (offset + size > arena) arena = offset + size;
    }
    return arena;
}
