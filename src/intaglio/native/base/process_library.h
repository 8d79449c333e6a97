// What the sources of the library that each process loads once share: thread pool and kernels for quantizing.
#pragma once

#include "base/pool.h"

#define INTAGLIO_EXPORT extern "C" __attribute__((visibility("default")))

constexpr double kInteger = 6755399441055744.0;  // 1.5 * 2^52: sums with it are rounded to integers, ties to even

INTAGLIO_EXPORT void intaglio_parallel(IntaglioBody body, void* context, int threads);
INTAGLIO_EXPORT void intaglio_parallel_shared(IntaglioBody body, void* context, int threads);

// Run a program as intaglio_parallel_shared does, or in the threads of PyTorch's OpenMP library while these run, unless
// the calling thread runs short programs only. The second function is for short programs between operators, too.
INTAGLIO_EXPORT void intaglio_parallel_program(IntaglioBody body, void* context, int threads);
INTAGLIO_EXPORT void intaglio_parallel_between_islands(IntaglioBody body, void* context, int threads);

// Run a body as intaglio_parallel does, in threads of PyTorch's OpenMP library if it is known. The body may get fewer
// threads.
void parallel_between_operators(IntaglioBody body, void* context, int threads);
