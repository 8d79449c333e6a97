// The thread pool: types of the call that runs a parallel region, which pool.cpp defines, and the barrier between the
// threads of a region, which is inline. Generated programs include this file and receive the address of
// intaglio_parallel.
#pragma once

#include <linux/futex.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

// A parallel region: the function that thread number `thread` of `threads` runs.
typedef void (*IntaglioBody)(void* context, int thread, int threads);
// intaglio_parallel of pool.cpp.
typedef void (*IntaglioParallel)(IntaglioBody body, void* context, int threads);

// Tell the processor that the thread is spinning.
static inline void intaglio_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Sleep while *word == seen. May return early, so callers check the word again.
static inline void intaglio_sleep(uint32_t* word, uint32_t seen) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

// Wake up to `sleepers` threads that sleep on *word.
static inline void intaglio_wake(uint32_t* word, int sleepers) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, sleepers, NULL, NULL, 0);
}

// Return the number of cores that the calling thread may use, or 1 if the system does not report it. The library counts
// them once.
static inline int intaglio_cores(void) {
    static int counted;
    int cores = __atomic_load_n(&counted, __ATOMIC_RELAXED);
    if (cores) return cores;
    unsigned long mask[128];  // 8192 processors; the system fills as many bytes as it has
    const long bytes = syscall(SYS_sched_getaffinity, 0, sizeof mask, mask);
    for (long i = 0; i < bytes / (long)sizeof mask[0]; ++i)
        for (unsigned long left = mask[i]; left; left &= left - 1) ++cores;
    if (!cores) cores = 1;
    __atomic_store_n(&counted, cores, __ATOMIC_RELAXED);
    return cores;
}

// A barrier; all zeros is its initial state. `arrived` and `phase` are written by different threads at different times,
// so each has a cache line of its own.
struct __attribute__((aligned(64))) IntaglioBarrier {
    uint32_t arrived;
    char line[60];
    uint32_t phase;
    uint32_t sleepers;
};

enum { INTAGLIO_BARRIER_SPINS = 2000 };

// Wait for the other threads of a barrier. Spin for some tens of microseconds at most, then sleep. Sleep at once if
// threads share cores: spinning would hold up the very thread that is waited for. Programs call it in many places, of
// which each would take a millisecond to compile.
static inline __attribute__((noinline)) void intaglio_wait_for_others(struct IntaglioBarrier* barrier, int threads) {
    uint32_t phase = __atomic_load_n(&barrier->phase, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&barrier->arrived, 1, __ATOMIC_ACQ_REL) == (uint32_t)threads) {
        __atomic_store_n(&barrier->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&barrier->phase, phase + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&barrier->sleepers, __ATOMIC_SEQ_CST)) intaglio_wake(&barrier->phase, INT32_MAX);
        return;
    }
    const int spins = threads <= intaglio_cores() ? INTAGLIO_BARRIER_SPINS : 0;
    for (int spin = 0; spin < spins; ++spin) {
        if (__atomic_load_n(&barrier->phase, __ATOMIC_ACQUIRE) != phase) return;
        intaglio_pause();
    }
    __atomic_fetch_add(&barrier->sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&barrier->phase, __ATOMIC_SEQ_CST) == phase) intaglio_sleep(&barrier->phase, phase);
    __atomic_fetch_sub(&barrier->sleepers, 1, __ATOMIC_RELAXED);
}

// Wait until `threads` threads have called the function.
static inline void intaglio_barrier_wait(struct IntaglioBarrier* barrier, int threads) {
    if (threads > 1) intaglio_wait_for_others(barrier, threads);
}
