// Calls of the thread pool by several threads at once. Built with the pool and ThreadSanitizer by
// test_thread_sanitizer.py. Prints the number of wrong results.

#include <pthread.h>
#include <stdio.h>

#include "base/pool.h"

extern "C" void intaglio_parallel(IntaglioBody body, void* context, int threads);
extern "C" void intaglio_parallel_shared(IntaglioBody body, void* context, int threads);

enum { CALLERS = 4, CALLS = 2000, MOST_THREADS = 4 };

struct Work {
    int64_t first[MOST_THREADS], second[MOST_THREADS];
    struct IntaglioBarrier barrier;
    int threads;
};

// Write a number, wait for all threads, then read the number of the next thread.
static void body(void* context, int thread, int threads) {
    Work* work = static_cast<Work*>(context);
    work->first[thread] = thread + 1;
    if (!thread) work->threads = threads;
    intaglio_barrier_wait(&work->barrier, threads);
    work->second[thread] = work->first[(thread + 1) % threads];
}

static void* call(void* argument) {
    const bool shared = reinterpret_cast<intptr_t>(argument) % 2;
    int64_t wrong = 0;
    for (int i = 0; i < CALLS; ++i) {
        Work work = {};
        (shared ? intaglio_parallel_shared : intaglio_parallel)(body, &work, 2 + i % (MOST_THREADS - 1));
        int64_t sum = 0;
        for (int thread = 0; thread < work.threads; ++thread) sum += work.second[thread];
        wrong += sum != work.threads * (work.threads + 1) / 2;
    }
    return reinterpret_cast<void*>(wrong);
}

int main() {
    pthread_t callers[CALLERS];
    int64_t wrong = 0;
    for (intptr_t i = 0; i < CALLERS; ++i) pthread_create(&callers[i], nullptr, call, reinterpret_cast<void*>(i));
    for (pthread_t caller : callers) {
        void* of_caller;
        pthread_join(caller, &of_caller);
        wrong += reinterpret_cast<intptr_t>(of_caller);
    }
    printf("%ld\n", long(wrong));
    return wrong != 0;
}
