// Steps that threads share, some of them slow. Built with the pool and ThreadSanitizer by test_thread_sanitizer.py.
// Prints the number of items that were not computed once, and how many pieces threads took from others.

#include <stdio.h>
#include <time.h>

#include "base/pool.h"
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

int main() {
    static Work work;
    int64_t wrong = 0, taken = 0;
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
