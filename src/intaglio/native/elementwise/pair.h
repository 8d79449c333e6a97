// Sums and products of two quantized tensors.

#pragma once

#include "base/image.h"
#include "base/library.h"
#include "products/tile.h"

// Two operands with their zero points and factors. A product has one factor, `factor_a`. `each`: `factor_b` has a value
// per channel, and then repeats the first channels.
struct Pair {
    struct Image a, b, out;
    int32_t zero_a, each;  // zero point of a; that of b is `other_zero_point` of the limits
    const float *factor_a, *factor_b;
    const struct Limits* limits;
};

// Compute this thread's part of a + b if `sum`, else of a * b.
LIBRARY void add_or_mul_u8(const struct Pair* p, int sum, int thread, int threads);

// Multiply `count` pixels from number `first` on by the one pixel of their image, and store them densely. Pixels are
// counted through all images.
LIBRARY void weigh_pixels(const struct Pair* p, int64_t first, int64_t count, uint8_t* to);
