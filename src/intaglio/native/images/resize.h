// Upsampling.

#pragma once

#include "base/image.h"
#include "base/library.h"
#include "products/tile.h"

// What outputs read along one axis: tables, or the sizes of a call and the inputs between neighbouring outputs (0:
// those of the sizes), from which the same numbers come as from ops/resize.py.
struct Grid {
    const int32_t* index;
    const float* weight;
    int64_t size, result;
    float step;
    int images, align;
};

// Means of two rows by two columns.
struct Blend {
    struct Image in, out;
    struct Grid row, column;
    const float* factor;
    int32_t zero_in;
    const struct Limits* limits;
};

LIBRARY void upsample_nearest(const struct Image* in, const struct Image* out, int64_t depth_in, int64_t depth_out,
                              const struct Grid* depth, const struct Grid* row, const struct Grid* column, int thread,
                              int threads);
LIBRARY void upsample_linear(const struct Blend* b, int thread, int threads);
