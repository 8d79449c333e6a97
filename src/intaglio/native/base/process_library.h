// What the sources of the library that each process loads once share: thread pool and kernels for quantizing.
#pragma once

#include "base/pool.h"

#define INTAGLIO_EXPORT extern "C" __attribute__((visibility("default")))

INTAGLIO_EXPORT void intaglio_parallel(IntaglioBody body, void* context, int threads);
