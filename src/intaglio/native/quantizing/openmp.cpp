// Threads for kernels that run between operators of PyTorch: those of its OpenMP library. After an operator they wait
// for the next one by reading memory for about a millisecond, so threads of another pool would share cores with them.
#include "base/process_library.h"

namespace {

using Region = void (*)(void* job);
void (*parallel_region)(Region region, void* job, unsigned threads, unsigned flags);  // GOMP_parallel
int (*thread_number)();                                                               // omp_get_thread_num
int (*team_size)();                                                                   // omp_get_num_threads

struct OpenmpJob {
    IntaglioBody body;
    void* context;
};

void openmp_region(void* job) {
    const OpenmpJob& found = *static_cast<const OpenmpJob*>(job);
    found.body(found.context, thread_number(), team_size());
}

}  // namespace

// Use these functions of an OpenMP library from now on.
INTAGLIO_EXPORT void intaglio_use_openmp(void* parallel, void* number, void* size) {
    thread_number = reinterpret_cast<int (*)()>(number);
    team_size = reinterpret_cast<int (*)()>(size);
    parallel_region = reinterpret_cast<void (*)(Region, void*, unsigned, unsigned)>(parallel);
}

void parallel_between_operators(IntaglioBody body, void* context, int threads) {
    if (!parallel_region || threads < 2) {
        intaglio_parallel(body, context, threads);
        return;
    }
    OpenmpJob job{body, context};
    parallel_region(openmp_region, &job, unsigned(threads), 0);
}
