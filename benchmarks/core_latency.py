"""Measure the latency between two cores: the time of a round trip of a cache line.

    python benchmarks/core_latency.py

A virtual machine may get two cores that share a third-level cache, or two that do not, and the host may change them
while it runs. Small networks, whose threads often wait for each other, are slower if the cores share no cache.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

from intaglio.native.compile import build, load
from intaglio.native.cpu import isas

BLOCKS, ROUND_TRIPS = 20, 2000
"""Blocks of which the fastest counts, and round trips of each."""
SOURCE = """
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <time.h>

struct Lines {
    alignas(256) uint64_t asked;
    alignas(256) uint64_t answered;
    uint64_t count;
    int core;
};

static void stay_on(int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);
}

static void* answer(void* given) {
    struct Lines* lines = (struct Lines*)given;
    stay_on(lines->core);
    for (uint64_t i = 1; i <= lines->count; ++i) {
        while (__atomic_load_n(&lines->asked, __ATOMIC_ACQUIRE) != i);
        __atomic_store_n(&lines->answered, i, __ATOMIC_RELEASE);
    }
    return 0;
}

struct Asking {
    struct Lines* lines;
    int core, blocks;
    uint64_t trips;
    double best;
};

static void* ask(void* given) {
    struct Asking* asking = (struct Asking*)given;
    struct Lines* lines = asking->lines;
    stay_on(asking->core);
    asking->best = 1e9;
    for (uint64_t block = 0, i = 1; block < (uint64_t)asking->blocks; ++block) {
        struct timespec begin, end;
        clock_gettime(CLOCK_MONOTONIC, &begin);
        for (uint64_t left = asking->trips; left; --left, ++i) {
            __atomic_store_n(&lines->asked, i, __ATOMIC_RELEASE);
            while (__atomic_load_n(&lines->answered, __ATOMIC_ACQUIRE) != i);
        }
        clock_gettime(CLOCK_MONOTONIC, &end);
        const double ns = 1e9 * (double)(end.tv_sec - begin.tv_sec) + (double)(end.tv_nsec - begin.tv_nsec);
        if (ns / (double)asking->trips < asking->best) asking->best = ns / (double)asking->trips;
    }
    return 0;
}

extern "C" __attribute__((visibility("default")))
double core_latency(int one, int other, int blocks, int64_t trips) {
    static struct Lines lines;
    lines = {};
    lines.count = (uint64_t)blocks * (uint64_t)trips, lines.core = other;
    struct Asking asking = {&lines, one, blocks, (uint64_t)trips, 0};
    pthread_t threads[2];
    if (pthread_create(&threads[0], 0, answer, &lines)) return 0;
    if (pthread_create(&threads[1], 0, ask, &asking)) return 0;
    for (pthread_t thread : threads) pthread_join(thread, 0);
    return asking.best;
}
"""


@cache
def _library() -> Any:
    library = load(build(SOURCE, name="core_latency", isa=isas()[0]))
    library.core_latency.restype = ctypes.c_double
    library.core_latency.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    return library


def nanoseconds() -> float | None:
    """Return the nanoseconds of a round trip between the first two cores of this process; ``None`` if it has one."""
    cores = sorted(os.sched_getaffinity(0))
    return round(_library().core_latency(*cores[:2], BLOCKS, ROUND_TRIPS), 1) if len(cores) > 1 else None


if __name__ == "__main__":
    print(f"{nanoseconds()} ns for a round trip between two cores")
