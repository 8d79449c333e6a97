// The thread pool. Workers are created when they are first needed, spin briefly for the next job, then sleep on a
// futex. Each worker has its own ticket, so a job wakes only the workers it uses. Callers take idle workers for their
// jobs, so jobs of several callers run at the same time.
#include "base/process_library.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>

#if defined(INTAGLIO_SHARED_LIBC)
extern "C" int __register_atfork(void (*before)(), void (*parent)(), void (*child)(), void* library);
#endif

namespace {

constexpr int kMaxWorkers = 1023;
constexpr int64_t kSpinNanoseconds = 100000;
constexpr size_t kStackBytes = 8 << 20;
constexpr unsigned kDefaultFloatMode = 0x1f80;  // MXCSR: round to nearest even, keep denormals, no traps

struct Job {
    IntaglioBody body;
    void* context;
    int threads;
    alignas(64) uint32_t pending;  // workers that have not finished the job
    uint32_t caller_asleep;
};

struct alignas(64) Worker {
    uint32_t ticket;  // number of the last job given to this worker
    uint32_t asleep;
    int thread;    // its number among the threads of that job
    Job* job;      // in the first of the job's workers; never freed, so that a late access is valid
    Worker* next;  // in the list of idle workers, or of those of one job
    Job own;
};

pthread_mutex_t pool = PTHREAD_MUTEX_INITIALIZER;  // held while workers are taken and given back
Worker workers[kMaxWorkers];
Worker* idle;  // most recently used first: they may still be spinning
int worker_count;
uint32_t callers;  // number of threads inside intaglio_parallel_shared
thread_local Worker* hired;
thread_local bool inside;
thread_local uint32_t sharing;  // nesting of intaglio_parallel_shared in this thread

// Set the float mode and return the previous one. The caller may have set another mode (torch.set_flush_denormal), and
// results must not depend on it.
unsigned swap_float_mode(unsigned mode) {
#if defined(__x86_64__)
    unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(mode);
    return before;
#else
    return mode;
#endif
}

int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * int64_t(1000000000) + t.tv_nsec;
}

// Wait until done(*word). Spin first if no two threads of the job share a core, then sleep.
template <typename Done>
void wait(uint32_t* word, uint32_t* asleep, bool may_spin, Done done) {
    if (may_spin) {
        int64_t end = now() + kSpinNanoseconds;
        do {
            for (int spin = 0; spin < 64; ++spin) {
                if (done(__atomic_load_n(word, __ATOMIC_ACQUIRE))) return;
                intaglio_pause();
            }
        } while (now() < end);
    }
    // Sequential consistency guarantees that this thread sees the new value, or the thread that wrote it sees `asleep`.
    __atomic_store_n(asleep, 1, __ATOMIC_SEQ_CST);
    for (uint32_t value; !done(value = __atomic_load_n(word, __ATOMIC_SEQ_CST));) intaglio_sleep(word, value);
    __atomic_store_n(asleep, 0, __ATOMIC_RELAXED);
}

// Run jobs forever: the function of a worker's thread.
void* work(void* argument) {
    Worker& self = *static_cast<Worker*>(argument);
    uint32_t seen = 0;
    bool may_spin = true;
    swap_float_mode(kDefaultFloatMode);
    inside = true;
    for (;;) {
        wait(&self.ticket, &self.asleep, may_spin, [&](uint32_t ticket) { return ticket != seen; });
        ++seen;
        Job& job = *self.job;
        may_spin = job.threads <= intaglio_cores();
        job.body(job.context, self.thread, job.threads);
        if (__atomic_sub_fetch(&job.pending, 1, __ATOMIC_SEQ_CST) == 0 &&
            __atomic_load_n(&job.caller_asleep, __ATOMIC_SEQ_CST))
            intaglio_wake(&job.pending, 1);
    }
}

// Create workers until `wanted` are idle, as far as the system allows; `there` are idle already. Return how many are
// idle then, at most `wanted`.
int ensure_idle(int wanted, int there) {
    if (there >= wanted) return wanted;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // leaves signals to the threads of Python
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, kStackBytes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    for (; there < wanted && worker_count < kMaxWorkers; ++there) {
        pthread_t thread;
        Worker* made = &workers[worker_count];
        *made = Worker{};
        if (pthread_create(&thread, &attributes, work, made) != 0) break;
        ++worker_count;
        made->next = idle;
        idle = made;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return there;
}

// Move up to `wanted` idle workers to `hired` and return their number.
int hire(int wanted) {
    pthread_mutex_lock(&pool);
    int there = 0;
    for (Worker* worker = idle; worker && there < wanted; worker = worker->next) ++there;
    const int count = ensure_idle(wanted, there);
    Worker** end = &idle;
    for (int i = 0; i < count; ++i) end = &(*end)->next;
    hired = count ? idle : nullptr;
    idle = *end;
    *end = nullptr;
    pthread_mutex_unlock(&pool);
    return count;
}

// Move the workers of `hired` back to the idle ones.
void let_go() {
    if (!hired) return;
    pthread_mutex_lock(&pool);
    Worker* last = hired;
    while (last->next) last = last->next;
    last->next = idle;
    idle = hired;
    pthread_mutex_unlock(&pool);
    hired = nullptr;
}

// Run a job on this thread and on up to `threads` - 1 workers.
void run(IntaglioBody body, void* context, int threads) {
    const int helpers = hire(threads - 1);
    if (!helpers) return body(context, 0, 1);
    Job& job = hired->own;
    job.body = body, job.context = context, job.threads = helpers + 1;
    // The last worker of the job before may be about to read `caller_asleep`; then this caller is woken once too often.
    __atomic_store_n(&job.caller_asleep, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&job.pending, uint32_t(helpers), __ATOMIC_RELAXED);
    int thread = 0;
    for (Worker* worker = hired; worker; worker = worker->next) {
        worker->thread = ++thread;
        worker->job = &job;
        __atomic_add_fetch(&worker->ticket, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&worker->asleep, __ATOMIC_SEQ_CST)) intaglio_wake(&worker->ticket, 1);
    }
    body(context, 0, helpers + 1);
    wait(&job.pending, &job.caller_asleep, helpers < intaglio_cores(), [](uint32_t left) { return left == 0; });
    let_go();
}

// Reset the pool in a child of fork, which has no workers. A thread that the child does not have may have held the
// mutex.
void forget_workers() {
    pthread_mutex_init(&pool, nullptr);
    if (hired) hired->own.pending = 0;  // forked inside a body: no worker will finish the job
    hired = idle = nullptr;
    worker_count = 0;
    callers = sharing;
}

// Call functions before each fork, null for none, and in its child.
void watch_fork(void (*before)(), void (*child)()) {
#if defined(INTAGLIO_SHARED_LIBC)  // what pthread_atfork calls, which is in a static part of glibc
    __register_atfork(before, nullptr, child, nullptr);
#else
    pthread_atfork(before, nullptr, child);
#endif
}

__attribute__((constructor)) void watch_pool() { watch_fork(nullptr, forget_workers); }

}  // namespace

// Run body(context, t, n) for t = 0 to n - 1, with t = 0 on the calling thread, and return when all have finished. n is
// `threads`, or less if the system does not create that many threads, or 1 if the caller is itself inside a body.
// Several callers may run at the same time, each with its own workers.
INTAGLIO_EXPORT void intaglio_parallel(IntaglioBody body, void* context, int threads) {
    unsigned before = swap_float_mode(kDefaultFloatMode);
    if (inside || threads <= 1) {
        body(context, 0, 1);
    } else {
        inside = true;
        run(body, context, threads);
        inside = false;
    }
    swap_float_mode(before);
}

// Run a body as intaglio_parallel does, but divide the cores among callers that run at the same time: a thread without
// a core would hold up all threads that wait for it. A caller that runs alone gets `threads`.
INTAGLIO_EXPORT void intaglio_parallel_shared(IntaglioBody body, void* context, int threads) {
    const int others = int(__atomic_fetch_add(&callers, 1, __ATOMIC_RELAXED));
    const int part = others ? intaglio_cores() / (others + 1) : threads;
    ++sharing;
    intaglio_parallel(body, context, part < threads ? part : threads);
    --sharing;
    __atomic_fetch_sub(&callers, 1, __ATOMIC_RELAXED);
}
