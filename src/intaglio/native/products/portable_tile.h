// Microkernels in plain C++ for any processor: one function per kind of result, for all heights of tiles.
#pragma once

#include "base/numerics.h"
#include "products/tile.h"

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

// Advance all pointers past a tile.
static inline void portable_next(struct Tile* t, int rows) {
    t->a += rows * t->a_pixel, t->out += rows * t->out_pixel, t->residual += rows * t->residual_pixel;
    t->remainder += rows * t->remainder_pixel, t->residual_remainder += rows * t->residual_remainder_pixel;
}

// Store a quantized value, or with `remainder` a 16-bit value as its quotient and remainder.
static inline void portable_put(const struct Tile* t, int remainder, int i, int c, int32_t quantized) {
    t->out[i * t->out_pixel + c] = (uint8_t)(remainder ? quantized / STEPS : quantized);
    if (remainder) t->remainder[i * t->remainder_pixel + c] = (uint8_t)(quantized % STEPS);
}

// Compute a tile and requantize it.
static inline void portable_u8(const struct Tile* t, int rows, int remainder) {
    int32_t acc[16][16];
    const struct Limits* q = t->limits;
    portable_products(t, rows, acc);
    for (int i = 0; i < rows; ++i)
        for (int c = 0; c < 16; ++c)
            if (t->mask >> c & 1)
                portable_put(t, remainder, i, c, requantize(acc[i][c], t->factor[c], q->zero_point, q->low, q->high));
}

// Compute a tile, add a residual operand and requantize.
static inline void portable_add(const struct Tile* t, int rows, int remainder, int residual_remainder) {
    int32_t acc[16][16];
    const struct Limits* q = t->limits;
    portable_products(t, rows, acc);
    for (int i = 0; i < rows; ++i)
        for (int c = 0; c < 16; ++c)
            if (t->mask >> c & 1) {
                const int32_t quantized = t->residual[i * t->residual_pixel + c];
                const int32_t other =
                    residual_remainder ? STEPS * quantized + t->residual_remainder[i * t->residual_remainder_pixel + c]
                                       : quantized;
                portable_put(t, remainder, i, c,
                             add_requantize(acc[i][c], t->factor[c], other - q->other_zero_point, t->residual_factor[c],
                                            q->zero_point, q->low, q->high));
            }
}

// Compute a tile and dequantize it.
static inline void portable_f32(const struct Tile* t, int rows) {
    int32_t acc[16][16];
    portable_products(t, rows, acc);
    for (int i = 0; i < rows; ++i)
        for (int c = 0; c < 16; ++c)
            if (t->mask >> c & 1) ((float*)(t->out + i * t->out_pixel))[c] = (float)acc[i][c] * t->factor[c];
}
