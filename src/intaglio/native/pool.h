// One parallel region at a time: the call that runs it (pool.cpp) and the barrier inside it (here, inline).
// Generated programs include this file and are handed the address of intaglio_parallel.
#pragma once

#include <linux/futex.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef void (*IntaglioBody)(void* context, int thread, int threads);
typedef void (*IntaglioParallel)(IntaglioBody body, void* context, int threads);

static inline void intaglio_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Sleeps while *word == seen; may return early, so callers look again.
static inline void intaglio_sleep(uint32_t* word, uint32_t seen) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static inline void intaglio_wake(uint32_t* word, int sleepers) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, sleepers, NULL, NULL, 0);
}

// Ready when zeroed. `arrived` and `phase` are written by different threads at different times, hence a line each.
struct __attribute__((aligned(64))) IntaglioBarrier {
    uint32_t arrived;
    char line[60];
    uint32_t phase;
    uint32_t sleepers;
};

enum { INTAGLIO_BARRIER_SPINS = 2000 };

// Returns when `threads` threads have called it. Spins for some tens of microseconds at most, then sleeps, so a
// thread that shares its core with the one it waits for does not hold it up.
static inline void intaglio_barrier_wait(struct IntaglioBarrier* barrier, int threads) {
    if (threads <= 1) return;
    uint32_t phase = __atomic_load_n(&barrier->phase, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&barrier->arrived, 1, __ATOMIC_ACQ_REL) == (uint32_t)threads) {
        __atomic_store_n(&barrier->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&barrier->phase, phase + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&barrier->sleepers, __ATOMIC_SEQ_CST)) intaglio_wake(&barrier->phase, INT32_MAX);
        return;
    }
    for (int spin = 0; spin < INTAGLIO_BARRIER_SPINS; ++spin) {
        if (__atomic_load_n(&barrier->phase, __ATOMIC_ACQUIRE) != phase) return;
        intaglio_pause();
    }
    __atomic_fetch_add(&barrier->sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&barrier->phase, __ATOMIC_SEQ_CST) == phase) intaglio_sleep(&barrier->phase, phase);
    __atomic_fetch_sub(&barrier->sleepers, 1, __ATOMIC_RELAXED);
}
