// Steps and sub-batches that threads share, some of them slow. Built with the pool and ThreadSanitizer by
// test_thread_sanitizer.py. Prints the number of items that were not computed once, and how many pieces threads took
// from others.

#include <stdio.h>
#include <time.h>

#include "base/pool.h"
#include "base/run.h"
#include "base/sharing.h"

extern "C" void intaglio_parallel(IntaglioBody body, void* context, int threads);

enum { CALLS = 40, STEPS = 24, ITEMS = 1000, MOST_THREADS = 5, LONG = 1 << 30 };

struct Work {
    struct Share shares[MOST_THREADS];
    struct IntaglioBarrier barrier;
    uint32_t computed[STEPS][ITEMS];
    uint32_t alone, taken;
    int call;
};

static void compute(Work* work, int step, struct Sharing* s, int slow) {
    while (next_piece(s)) {
        if (slow && !s->piece) {
            const struct timespec delay = {0, 200000};
            nanosleep(&delay, nullptr);
        }
        if (s->owner != s->thread) __atomic_add_fetch(&work->taken, 1, __ATOMIC_RELAXED);
        if (step % 2) {  // a part of items that begins in the middle of a whole
            const int64_t first = 7 + (ITEMS - 7) * s->owner / s->threads,
                          last = 7 + (ITEMS - 7) * (s->owner + 1) / s->threads;
            for (int64_t i = piece_begin(s, first, last, 10); i < piece_end(s, first, last, 10); ++i)
                __atomic_add_fetch(&work->computed[step][i], 1, __ATOMIC_RELAXED);
        } else {
            for (int64_t i = first_item(s, ITEMS, 0); i < first_item(s, ITEMS, 1); ++i)
                __atomic_add_fetch(&work->computed[step][i], 1, __ATOMIC_RELAXED);
        }
    }
}

// Run the steps. The first thread runs some alone, some are too small to be shared, and not all have a barrier between
// them.
static void body(void* context, int thread, int threads) {
    Work* work = static_cast<Work*>(context);
    for (int step = 0; step < STEPS; ++step) {
        const int64_t nanoseconds = step % 5 == 4 ? SHORTEST_NS : step % 3 ? LONG : 4 * SHORTEST_NS * threads;
        if (step % 7 == 3 && !thread) {
            struct Sharing s = enter_step(work->shares, LONG, 0, 1);
            while (next_piece(&s)) ++work->alone;
        }
        struct Sharing s = enter_step(work->shares, nanoseconds, thread, threads);
        compute(work, step, &s, (step + work->call) % MOST_THREADS == thread);
        if (step % 4 == 3) intaglio_barrier_wait(&work->barrier, threads);
    }
}

enum { IMAGES = 29, SLOT_BYTES = 64 };

// The images of a batch, counted as often as they are computed, and the memory of each thread's sub-batches. `arena` of
// the `Run` is the batch.
struct Batch {
    uint32_t computed[IMAGES];
    uint8_t slots[MOST_THREADS][SLOT_BYTES];
    uint32_t begun[MOST_THREADS];
};

// Compute a sub-batch, alone in its slot or with all threads. The first one of the first thread takes long.
static void compute_images(const struct Run* r, const struct SubBatch* images, int thread, int threads) {
    Batch* batch = reinterpret_cast<Batch*>(r->arena);
    if (threads == 1) {
        batch->slots[images->slot][0]++;
        const struct timespec delay = {0, images->slot || batch->begun[images->slot]++ ? 20000 : 3000000};
        nanosleep(&delay, nullptr);
    }
    if (thread) return;
    for (int64_t i = images->first; i < images->first + images->count; ++i)
        __atomic_add_fetch(&batch->computed[i], 1, __ATOMIC_RELAXED);
}

static void batch_body(void* context, int thread, int threads) {
    const struct Run* run = static_cast<const struct Run*>(context);
    run_batch_tiles(run, compute_images, run->dims[0], run->dims[1], thread, threads);
}

// Return the number of images that were not computed once, plus 1 if the first thread was relieved in no batch.
static int64_t share_batches() {
    int64_t wrong = 0, relieved = intaglio_cores() < 2;
    for (int64_t each = 1; each < 4; ++each)
        for (int64_t images = 1; images <= IMAGES; images += 4) {
            static Batch batch;
            static struct Share shares[MOST_THREADS];
            struct IntaglioBarrier barrier = {};
            const int64_t dims[2] = {images, each};
            const int threads = intaglio_cores() < 2 ? 1 : 2;
            batch = {};
            struct Run run = {};
            run.dims = dims, run.arena = reinterpret_cast<uint8_t*>(&batch), run.barrier = &barrier;
            run.shares = clear_shares(shares, threads);
            intaglio_parallel(batch_body, &run, threads);
            for (int64_t i = 0; i < IMAGES; ++i) wrong += batch.computed[i] != (i < images);
            relieved += batch.slots[0][0] < batch.slots[1][0];
        }
    return wrong + !relieved;
}

int main() {
    static Work work;
    int64_t wrong = share_batches(), taken = 0;
    for (int call = 0; call < CALLS; ++call) {
        const int threads = 2 + call % (MOST_THREADS - 1);
        work = {};
        work.call = call;
        if (!clear_shares(work.shares, threads)) ++wrong;
        intaglio_parallel(body, &work, threads);
        for (int step = 0; step < STEPS; ++step)
            for (int item = step % 2 ? 7 : 0; item < ITEMS; ++item) wrong += work.computed[step][item] != 1;
        wrong += work.alone != 3;
        taken += work.taken;
    }
    if (clear_shares(work.shares, 1) || clear_shares(work.shares, SHARERS + 1)) ++wrong;
    printf("%ld %d\n", long(wrong), taken > 0);
    return wrong != 0;
}
