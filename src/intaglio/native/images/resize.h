// Upsampling of quantized lines, images and volumes.

#pragma once

#include "base/image.h"
#include "base/library.h"
#include "images/grid.h"
#include "products/tile.h"

// Bilinear upsampling: weighted means of two rows by two columns.
struct Blend {
    struct Image in, out;
    struct Grid row, column;
    const float* factor;
    int32_t zero_in;
    const struct Limits* limits;
};

// Compute this thread's part of nearest upsampling. The images of volumes are their depths, `depth_in` and `depth_out`
// per volume.
LIBRARY void upsample_nearest(const struct Image* in, const struct Image* out, int64_t depth_in, int64_t depth_out,
                              const struct Grid* depth, const struct Grid* row, const struct Grid* column, int thread,
                              int threads);
// Compute this thread's part of bilinear upsampling.
LIBRARY void upsample_linear(const struct Blend* b, int thread, int threads);
