// Sums and products of two quantized operands.

#pragma once

#include "base/image.h"
#include "base/library.h"
#include "products/tile.h"

// Two operands with their zero points and factors; a product has one factor, the first. `each`: the second is one for
// every channel, and goes on with the first channels.
struct Pair {
    struct Image a, b, out;
    int32_t zero_a, each;
    const float *factor_a, *factor_b;
    const struct Limits* limits;
};

// `sum`: a + b, else a * b.
LIBRARY void pair_levels(const struct Pair* p, int sum, int thread, int threads);

// Some pixels of an image times one pixel for it, dense; they are counted through all images.
LIBRARY void weigh_pixels(const struct Pair* p, int64_t first, int64_t count, uint8_t* to);
