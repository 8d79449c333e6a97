// Lookup tables of 256 entries.

#pragma once

#include "base/image.h"
#include "base/library.h"

// Return whether the processor has AVX512-VBMI, which kernels that look up their results need.
static inline int has_vbmi(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512vbmi");
#else
    return 0;
#endif
}

// Look up `channels` values of each of `pixels` pixels, which are `stride` bytes from each other in both tensors.
LIBRARY void look_up_pixels(const uint8_t* from, uint8_t* to, int64_t pixels, int64_t stride, int64_t channels,
                            const uint8_t* table);

// Look up values as look_up_pixels does, in place.
LIBRARY void look_up_in_place(uint8_t* at, int64_t pixels, int64_t stride, int64_t channels, const uint8_t* table);

// Look up all values of an image.
LIBRARY void look_up(const struct Image* in, const struct Image* out, const uint8_t* table, int thread, int threads);
