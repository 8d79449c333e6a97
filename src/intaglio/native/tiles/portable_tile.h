// Products of microkernels in plain C++ for any processor, for all heights of tiles.
#pragma once

#include "tiles/tile_results.h"

// Return the dot product of four activations and four weights.
static inline int32_t dot4(const uint8_t* a, const int8_t* b) {
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3];
}

// Set acc[row][channel] to the bias plus the products of all taps.
static inline void portable_products(const struct Tile* t, int rows, int32_t (*acc)[16]) {
    const int8_t* b = t->b;
    for (int i = 0; i < rows; ++i) memcpy(acc[i], t->bias, sizeof acc[i]);
    for (int64_t ky = 0; ky < t->tap_rows; ++ky)
        for (int64_t kx = 0; kx < t->taps; ++kx)
            for (int64_t k = 0; k < t->run; ++k, b += 64)
                for (int i = 0; i < rows; ++i) {
                    const uint8_t* a = t->a + i * t->a_pixel + ky * t->a_row + kx * t->a_tap + 4 * k;
                    for (int c = 0; c < 16; ++c)
                        acc[i][c] = (int32_t)((uint32_t)acc[i][c] + (uint32_t)dot4(a, b + 4 * c));
                }
}
