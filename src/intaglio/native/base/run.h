// One call of a generated program: its arguments, its clock, batch tiling, and the placement of buffers in the arena.

#pragma once

#include <string.h>
#include <time.h>

#include "base/pool.h"
#include "base/sharing.h"

// Arguments of one call of the program. `external` are the caller's tensors; each has five `strides`, in elements,
// outermost axis first (batch, channel, row and column of an image).
struct Run {
    const int64_t* dims;       // sizes of the free dimensions
    const int64_t* offsets;    // bytes from the start of the arena to each buffer
    uint8_t* arena;            // memory of the activations
    const uint8_t* constants;  // weights and other constants
    uint8_t* const* external;  // tensors of the caller
    const int64_t* strides;
    struct IntaglioBarrier* barrier;
    const uint8_t* bytes;  // 1 for each external tensor of uint8 if the program also takes float32
    int64_t* times;        // nanoseconds per step, then the last reading of the clock; null: not measured
    int32_t* outside;      // set to 1 if an id is not a row of its table
    int64_t* clipped;      // clipped values: the sum, then one count per checked range; null: not counted
    const uint8_t* grows;  // 1 for each external tensor with memory for new values behind it; null: none has
    struct Share* shares;  // of the threads; null: each computes its own part of every step
};

// A function with the body of several steps, of which the compiler must not make copies for each of them.
#if defined(__clang__)
#define SHARED __attribute__((noinline))
#else
#define SHARED __attribute__((noinline, noclone))
#endif

// Return the constant at an offset in bytes.
template <class T>
static inline const T* constant(const struct Run* r, int64_t offset) {
    return (const T*)(r->constants + offset);
}

// Return whether the caller has memory for new values behind a tensor.
static inline int grows(const struct Run* r, int64_t external) { return r->grows && r->grows[external]; }

// Add the time since the last reading to `step`, if times are measured: all threads wait for each other, then the first
// reads the clock. Step -1 starts the clock.
static inline __attribute__((noinline)) void read_clock(const struct Run* r, int64_t step, int64_t steps, int thread,
                                                        int threads) {
    struct timespec now;
    intaglio_barrier_wait(r->barrier, threads);
    if (thread) return;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const int64_t nanoseconds = now.tv_sec * 1000000000 + now.tv_nsec;
    if (step >= 0) r->times[step] += nanoseconds - r->times[steps];
    r->times[steps] = nanoseconds;
}
static inline void time_step(const struct Run* r, int64_t step, int64_t steps, int thread, int threads) {
    if (r->times) read_clock(r, step, steps, thread, threads);
}

// A sub-batch: images `first` to `first + count` of the batch. The arena has slots of equal size for the activations of
// the tiled steps; this sub-batch uses `widen_quarter` slots from number `slot` on.
struct SubBatch {
    int64_t first, count, slot, spread;
};

// Runs the tiled steps on one sub-batch.
typedef void (*RunBatchTile)(const struct Run*, const struct SubBatch*, int thread, int threads);

// Return the number of slots in the arena for sub-batches of `each` images: one per core, or fewer if the batch has
// fewer sub-batches.
static inline int64_t concurrent_batch_tiles(int64_t batch, int64_t each) {
    const int64_t tiles = (batch + each - 1) / each, cores = intaglio_cores();
    return tiles < cores ? tiles : cores;
}

// Batch tiling: run the tiled steps on all images. As long as there is a sub-batch for every thread, each thread runs
// its own sub-batches, and then those of threads that are behind; all threads run the remaining images together.
static inline void run_batch_tiles(const struct Run* r, RunBatchTile run_tile, int64_t batch, int64_t each, int thread,
                                   int threads) {
    const int64_t slots = concurrent_batch_tiles(batch, each), own = threads <= slots ? batch / (each * threads) : 0;
    struct Sharing s = enter_pieces(r->shares, own, thread, threads);
    while (own && next_piece(&s)) {
        const int64_t end = first_item(&s, threads * own, 1);
        for (int64_t i = first_item(&s, threads * own, 0); i < end; ++i) {
            const struct SubBatch sub_batch = {i * each, each, thread, 1};
            run_tile(r, &sub_batch, 0, 1);
        }
    }
    if (own) intaglio_barrier_wait(r->barrier, threads);
    for (int64_t first = threads * own * each; first < batch; first += slots * each) {
        const struct SubBatch sub_batch = {first, batch - first < slots * each ? batch - first : slots * each, 0,
                                           slots};
        run_tile(r, &sub_batch, thread, threads);
    }
}

// Return the first of `total` items that a thread works on; its last item precedes the first one of thread + 1.
static inline int64_t shard_begin(int64_t total, int thread, int threads) { return total * thread / threads; }

// Place buffers in order, each at the lowest offset where it does not overlap an earlier buffer with an overlapping
// lifetime, and return the bytes of the arena. Those of buffer i are `conflicts` from ends[i - 1], or 0, to ends[i].
// Offsets are multiples of 64, and at least 64 unused bytes follow each buffer.
static inline int64_t place_buffers(const int32_t* conflicts, const int32_t* ends, const int64_t* sizes, int count,
                                    int64_t* offsets) {
    int64_t arena = 0;
    for (int i = 0, first = 0; i < count; first = ends[i++]) {
        const int64_t size = (sizes[i] + 64 + 63) / 64 * 64;
        int64_t offset = 0;
        for (int moved = 1; moved;) {
            moved = 0;
            for (int k = first; k < ends[i]; ++k) {
                const int32_t j = conflicts[k];
                const int64_t end = offsets[j] + (sizes[j] + 64 + 63) / 64 * 64;
                if (offset < end && offsets[j] < offset + size) offset = end, moved = 1;
            }
        }
        offsets[i] = offset;
        if (offset + size > arena) arena = offset + size;
    }
    return arena;
}
