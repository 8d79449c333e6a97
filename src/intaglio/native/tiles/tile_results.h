// Results of microkernels in C++: from the sums of a tile, acc[row][channel], to what is stored.
#pragma once

#include "base/numerics.h"
#include "products/tile.h"

// Advance all pointers past a tile.
static inline void next_tile(struct Tile* t, int rows) {
    t->a += rows * t->a_pixel, t->out += rows * t->out_pixel, t->residual += rows * t->residual_pixel;
    if (t->row_scale) t->row_scale += rows;
    t->remainder += rows * t->remainder_pixel, t->residual_remainder += rows * t->residual_remainder_pixel;
}

// Store a quantized value, or with `remainder` a 16-bit value as its quotient and remainder.
static inline void put_result(const struct Tile* t, int remainder, int i, int c, int32_t quantized) {
    t->out[i * t->out_pixel + c] = (uint8_t)(remainder ? quantized / STEPS : quantized);
    if (remainder) t->remainder[i * t->remainder_pixel + c] = (uint8_t)(quantized % STEPS);
}

// Requantize the sums of a tile.
static inline void finish_u8(const struct Tile* t, const int32_t (*acc)[16], int rows, int remainder) {
    const struct Limits* q = t->limits;
    for (int i = 0; i < rows; ++i)
        for (int c = 0; c < 16; ++c)
            if (t->mask >> c & 1)
                put_result(t, remainder, i, c, requantize(acc[i][c], t->factor[c], q->zero_point, q->low, q->high));
}

// Add a residual operand to the sums of a tile and requantize.
static inline void finish_add(const struct Tile* t, const int32_t (*acc)[16], int rows, int remainder,
                              int residual_remainder) {
    const struct Limits* q = t->limits;
    for (int i = 0; i < rows; ++i)
        for (int c = 0; c < 16; ++c)
            if (t->mask >> c & 1) {
                const int32_t quantized = t->residual[i * t->residual_pixel + c];
                const int32_t other =
                    residual_remainder ? STEPS * quantized + t->residual_remainder[i * t->residual_remainder_pixel + c]
                                       : quantized;
                put_result(t, remainder, i, c,
                           add_requantize(acc[i][c], t->factor[c], other - q->other_zero_point, t->residual_factor[c],
                                          q->zero_point, q->low, q->high));
            }
}

// Dequantize the sums of a tile.
static inline void finish_f32(const struct Tile* t, const int32_t (*acc)[16], int rows) {
    for (int i = 0; i < rows; ++i)
        for (int c = 0; c < 16; ++c)
            if (t->mask >> c & 1) ((float*)(t->out + i * t->out_pixel))[c] = (float)acc[i][c] * t->factor[c];
}

// Dequantize the sums of a tile with scales of rows and channels and a bias.
static inline void finish_rows(const struct Tile* t, const int32_t (*acc)[16], int rows) {
    for (int i = 0; i < rows; ++i)
        for (int c = 0; c < 16; ++c)
            if (t->mask >> c & 1)
                ((float*)(t->out + i * t->out_pixel))[c] =
                    (float)acc[i][c] * t->row_scale[i] * t->factor[c] + t->row_bias[c];
}
