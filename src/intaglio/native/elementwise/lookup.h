// Lookup tables of 256 entries.

#pragma once

#include "base/image.h"
#include "base/library.h"

// Whether kernels that look up levels run here.
static inline int has_vbmi(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512vbmi");
#else
    return 0;
#endif
}

// Quantized values of some channels of pixels `apart` from each other -> their entries of a table.
LIBRARY void look_up_pixels(const uint8_t* from, uint8_t* to, int64_t pixels, int64_t apart, int64_t channels,
                            const uint8_t* table);

// Levels of some channels of pixels `apart` from each other -> what the table has for them, in place.
static inline void look_up_here(uint8_t* at, int64_t pixels, int64_t apart, int64_t channels, const uint8_t* table) {
    if (channels == apart) channels *= pixels, pixels = 1;
    look_up_pixels(at, at, pixels, apart, channels, table);
}

LIBRARY void look_up(const struct Image* in, const struct Image* out, const uint8_t* table, int thread, int threads);
