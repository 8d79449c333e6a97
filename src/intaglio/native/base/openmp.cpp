// Regions in the threads of PyTorch's OpenMP library. After an operator these threads spin for milliseconds, to begin
// the next operator at once, and threads of another pool share cores with them: a step of a decoder that takes 5 ms
// takes 12 ms after an argmax of its logits. So programs run in these threads too while they spin, unless the programs
// are short.
#include "base/process_library.h"

namespace {

using Region = void (*)(void* job);
void (*parallel_region)(Region region, void* job, unsigned threads, unsigned flags);  // GOMP_parallel
int (*thread_number)();                                                               // omp_get_thread_num
int (*team_size)();                                                                   // omp_get_num_threads
int (*largest_team)();                                                                // omp_get_max_threads
int (*end_team)(int kind);                                                            // omp_pause_resource_all
constexpr int kPauseSoft = 1;  // omp_pause_soft: end the threads of this thread's team; the next region starts others

// Time for which the threads of a team spin after a region, at most.
constexpr int64_t kTeamSpinNanoseconds = 10000000;
// A thread that has called this many short programs in a row runs further ones in threads of the pool, where a region
// takes 1.5 us less.
constexpr int kManyShort = 64;
constexpr int64_t kShortNanoseconds = 200000;
// Time for which programs run in threads of the pool once several threads have called them: each caller has a team of
// its own, and the team of another caller may spin.
constexpr int64_t kSeveralCallersNanoseconds = 1000000000;

int64_t team_spins_until;  // the last team may spin until then
pthread_t team_owner;      // the thread that called it
pthread_t last_caller;     // the thread that ran a program last
int64_t several_callers_until;
bool team_in_fork;                // it could not be ended before a fork
thread_local int short_in_a_row;  // programs that this thread has called since the last long one
thread_local bool only_short;     // it has called many of them, and one long program at most

thread_local clockid_t team_clock;  // processor time of the second thread of this thread's team; 0: not known yet

struct OpenmpJob {
    IntaglioBody body;
    void* context;
    int threads;
    clockid_t clock;
};

// Return the clock that Linux gives to the processor time of the calling thread, for use in other threads.
clockid_t own_clock() { return clockid_t(~unsigned(syscall(SYS_gettid)) << 3 | 6); }

// Return the time of a clock in nanoseconds, or -1 if its thread has ended.
int64_t time_on(clockid_t clock) {
    timespec t;
    return clock_gettime(clock, &t) ? -1 : t.tv_sec * int64_t(1000000000) + t.tv_nsec;
}

void openmp_region(void* job) {
    OpenmpJob& found = *static_cast<OpenmpJob*>(job);
    const int thread = thread_number(), team = team_size(), threads = found.threads < team ? found.threads : team;
    if (thread == 1) found.clock = own_clock();
    if (thread >= threads) return;
    const unsigned before = swap_float_mode(kDefaultFloatMode);
    inside = true;
    found.body(found.context, thread, threads);
    inside = false;
    swap_float_mode(before);
}

// Run a body in the first threads of the team. The region has all of them, because OpenMP ends those that a region
// leaves out.
void run_in_team(IntaglioBody body, void* context, int threads) {
    OpenmpJob job{body, context, threads, 0};
    parallel_region(openmp_region, &job, unsigned(largest_team()), 0);
    team_clock = job.clock;
}

// Return whether the threads of this thread's team are running now, after an operator or a program, or are not known.
bool team_may_run() {
    if (!team_clock) return true;
    const int64_t before = time_on(team_clock);
    if (before < 0) team_clock = 0;  // PyTorch may have started others
    return before < 0 || time_on(team_clock) > before;
}

// Return whether a region runs in the team of this thread: this thread was the last caller, no other one is a caller
// now, the region is between float islands or is not one of many short ones, and the team has enough threads, which run
// or are not known.
bool suits_team(int threads, bool between_islands, int64_t begin) {
    const pthread_t caller = pthread_self(), last = __atomic_exchange_n(&last_caller, caller, __ATOMIC_RELAXED);
    const bool spins = begin < __atomic_load_n(&team_spins_until, __ATOMIC_ACQUIRE);
    if (__atomic_load_n(&callers, __ATOMIC_RELAXED) || (spins && !pthread_equal(team_owner, caller))) {
        __atomic_store_n(&several_callers_until, begin + kSeveralCallersNanoseconds, __ATOMIC_RELAXED);
        return false;
    }
    if (begin < __atomic_load_n(&several_callers_until, __ATOMIC_RELAXED) || !pthread_equal(last, caller)) return false;
    if ((only_short && !between_islands) || threads > largest_team()) return false;
    return team_may_run();
}

// Note how long a program took. One long program among many short ones was interrupted, or will not come again soon.
void note_duration(int64_t nanoseconds) {
    if (nanoseconds < kShortNanoseconds) {
        if (short_in_a_row < kManyShort)
            ++short_in_a_row;
        else
            only_short = true;
    } else {
        if (short_in_a_row < kManyShort) only_short = false;
        short_in_a_row = 0;
    }
}

void run_program(IntaglioBody body, void* context, int threads, bool between_islands) {
    if (threads < 2 || inside || !parallel_region) return intaglio_parallel_shared(body, context, threads);
    const int64_t begin = now();
    uint32_t none = 0;
    if (suits_team(threads, between_islands, begin) &&
        __atomic_compare_exchange_n(&callers, &none, 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        ++sharing;
        run_in_team(body, context, threads);
        --sharing;
        __atomic_fetch_sub(&callers, 1, __ATOMIC_RELAXED);
        team_owner = pthread_self();
        __atomic_store_n(&team_spins_until, now() + kTeamSpinNanoseconds, __ATOMIC_RELEASE);
    } else {
        intaglio_parallel_shared(body, context, threads);
    }
    note_duration(now() - begin);
}

// Before a fork: end the team, because its threads are not in the child, which would wait for them.
void end_team_before_fork() {
    team_in_fork = parallel_region && end_team(kPauseSoft) != 0;
    team_clock = 0;
}

// In the child of a fork inside of a region: use the team no more.
void forget_team() {
    if (team_in_fork) parallel_region = nullptr;
}

}  // namespace

// Use these functions of an OpenMP library from now on.
INTAGLIO_EXPORT void intaglio_use_openmp(void* parallel, void* number, void* size, void* largest, void* end) {
    end_team = reinterpret_cast<int (*)(int)>(end);
    thread_number = reinterpret_cast<int (*)()>(number);
    team_size = reinterpret_cast<int (*)()>(size);
    largest_team = reinterpret_cast<int (*)()>(largest);
    if (!parallel_region) watch_fork(end_team_before_fork, forget_team);
    parallel_region = reinterpret_cast<void (*)(Region, void*, unsigned, unsigned)>(parallel);
}

INTAGLIO_EXPORT void intaglio_parallel_program(IntaglioBody body, void* context, int threads) {
    run_program(body, context, threads, false);
}

INTAGLIO_EXPORT void intaglio_parallel_between_islands(IntaglioBody body, void* context, int threads) {
    run_program(body, context, threads, true);
}

void parallel_between_operators(IntaglioBody body, void* context, int threads) {
    if (!parallel_region || threads < 2 || threads > largest_team()) {
        intaglio_parallel(body, context, threads);
        return;
    }
    run_in_team(body, context, threads);
}
