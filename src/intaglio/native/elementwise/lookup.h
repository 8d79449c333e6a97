// Lookup tables of 256 entries.

#pragma once

#include "base/image.h"
#include "base/library.h"

#if defined(__x86_64__)
#include <cpuid.h>

// Return whether the processor has AVX512-VBMI and the system saves its registers, for `has_vbmi`.
static inline int detect_vbmi(void) {
    enum { OSXSAVE = 1 << 27, AVX512_STATE = 0xe6, VBMI = 1 << 1 };
    unsigned a, b, c, d, saved, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return 0;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    return (saved & AVX512_STATE) == AVX512_STATE && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & VBMI);
}

// Return whether the processor has AVX512-VBMI, which kernels that look up their results need. The compiler's own test,
// __builtin_cpu_supports, needs a library of the compiler, which not every compiler brings.
static inline int has_vbmi(void) {
    static int answer;  // 0 before the first call, then 1 or 2: the instruction takes as long as a small step
    int known = __atomic_load_n(&answer, __ATOMIC_RELAXED);
    if (known == 0) __atomic_store_n(&answer, known = 1 + detect_vbmi(), __ATOMIC_RELAXED);
    return known == 2;
}
#else
static inline int has_vbmi(void) { return 0; }
#endif

// Look up `channels` values of each of `pixels` pixels, which are `stride` bytes from each other in both tensors.
LIBRARY void look_up_pixels(const uint8_t* from, uint8_t* to, int64_t pixels, int64_t stride, int64_t channels,
                            const uint8_t* table);

// Look up values as look_up_pixels does, in place.
LIBRARY void look_up_in_place(uint8_t* at, int64_t pixels, int64_t stride, int64_t channels, const uint8_t* table);

// Look up all values of an image.
LIBRARY void look_up(const struct Image* in, const struct Image* out, const uint8_t* table, int thread, int threads);
