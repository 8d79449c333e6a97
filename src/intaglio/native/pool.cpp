// The thread pool. Workers are made when first needed, spin briefly for the next job, then sleep on a futex; each has
// its own ticket, so a job wakes only the workers it uses. Jobs of several callers run one after another.
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

namespace {

constexpr int kMaxWorkers = 1023;
constexpr int64_t kSpinNanoseconds = 100000;
constexpr size_t kStackBytes = 8 << 20;
constexpr unsigned kDefaultFloatMode = 0x1f80;  // round to nearest even, denormals kept, no traps

struct alignas(64) Worker {
    uint32_t ticket;  // number of the last job given to this worker
    uint32_t asleep;
};

struct Job {
    IntaglioBody body;
    void* context;
    int threads;
};

pthread_mutex_t callers = PTHREAD_MUTEX_INITIALIZER;  // held by the caller whose job runs
Worker workers[kMaxWorkers];
int worker_count;
int cores;
Job job;
alignas(64) uint32_t pending;  // workers that have not finished the job
uint32_t caller_asleep;
thread_local bool inside;

// The float mode is the caller's business (torch.set_flush_denormal); results here must not depend on it.
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

// Waits until done(*word): spins first if no thread of the job has to share a core, then sleeps.
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
    // Either this thread sees the new value, or the one that wrote it sees `asleep`: both orders are total.
    __atomic_store_n(asleep, 1, __ATOMIC_SEQ_CST);
    for (uint32_t value; !done(value = __atomic_load_n(word, __ATOMIC_SEQ_CST));) intaglio_sleep(word, value);
    __atomic_store_n(asleep, 0, __ATOMIC_RELAXED);
}

void* work(void* argument) {
    int index = int(intptr_t(argument));
    Worker& self = workers[index];
    uint32_t seen = 0;
    bool may_spin = true;
    swap_float_mode(kDefaultFloatMode);
    inside = true;
    for (;;) {
        wait(&self.ticket, &self.asleep, may_spin, [&](uint32_t ticket) { return ticket != seen; });
        ++seen;
        may_spin = job.threads <= cores;
        job.body(job.context, index + 1, job.threads);
        if (__atomic_sub_fetch(&pending, 1, __ATOMIC_SEQ_CST) == 0 && __atomic_load_n(&caller_asleep, __ATOMIC_SEQ_CST))
            intaglio_wake(&pending, 1);
    }
}

int available_cores() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

// Grows the pool towards `wanted` workers; returns how many there are for this job.
int ensure_workers(int wanted) {
    if (wanted > kMaxWorkers) wanted = kMaxWorkers;
    if (worker_count >= wanted) return wanted;
    cores = available_cores();
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals stay with the threads of Python
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, kStackBytes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (worker_count < wanted) {
        pthread_t thread;
        workers[worker_count] = Worker{};
        if (pthread_create(&thread, &attributes, work, reinterpret_cast<void*>(intptr_t(worker_count))) != 0) break;
        ++worker_count;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return worker_count < wanted ? worker_count : wanted;
}

void run(IntaglioBody body, void* context, int threads) {
    int helpers = ensure_workers(threads - 1);
    job = Job{body, context, helpers + 1};
    __atomic_store_n(&pending, uint32_t(helpers), __ATOMIC_RELEASE);
    for (int i = 0; i < helpers; ++i) {
        __atomic_add_fetch(&workers[i].ticket, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&workers[i].asleep, __ATOMIC_SEQ_CST)) intaglio_wake(&workers[i].ticket, 1);
    }
    body(context, 0, helpers + 1);
    wait(&pending, &caller_asleep, helpers < cores, [](uint32_t left) { return left == 0; });
}

// A child of fork has no workers, and the mutex may have been held by a thread it does not have.
void forget_workers() {
    pthread_mutex_init(&callers, nullptr);
    if (inside) pthread_mutex_lock(&callers);  // forked from a body: intaglio_parallel will unlock it
    worker_count = 0;
    pending = caller_asleep = 0;
}

__attribute__((constructor)) void watch_fork() { pthread_atfork(nullptr, nullptr, forget_workers); }

}  // namespace

// Runs body(context, t, n) for t in 0..n-1, t = 0 on the calling thread, and returns when all are done. n is `threads`,
// or less when the system gives no more threads, or 1 when called from inside a body.
extern "C" __attribute__((visibility("default"))) void intaglio_parallel(IntaglioBody body, void* context, int threads) {
    unsigned before = swap_float_mode(kDefaultFloatMode);
    if (inside || threads <= 1) {
        body(context, 0, 1);
    } else {
        pthread_mutex_lock(&callers);
        inside = true;
        run(body, context, threads);
        inside = false;
        pthread_mutex_unlock(&callers);
    }
    swap_float_mode(before);
}
