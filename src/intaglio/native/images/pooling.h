// Max and average pooling of lines, images and volumes.

#pragma once

#include "base/image.h"
#include "base/library.h"
#include "products/tile.h"

// Geometry of the window along one axis; `before` is the padding in front of the first position.
struct PoolAxis {
    int64_t kernel, stride, before, dilation;
};

// The images of volumes are their depths: `depth_in` and `depth_out` per volume. An image or a line has one depth.
struct Pool {
    struct Image in, out;
    int64_t depth_in, depth_out;
    struct PoolAxis z, y, x;
    int64_t include_pad, fixed_divisor, adaptive;  // flags of average pooling
    int32_t zero_in;
    // Multipliers by divisor, from 1 on, or a single one for a fixed divisor; null if windows grow with a free size.
    const float* factors;
    double ratio;  // if `factors` is null, the multiplier is `ratio` divided by the divisor
    const struct Limits* limits;
    int32_t* sums;   // i32[shares][channels] if the window is the whole image, else null
    int64_t shares;  // threads that `sums` has memory for
};

// Compute this thread's part of max pooling; padding is never the largest value.
LIBRARY void max_pool(const struct Pool* p, int thread, int threads);
// Compute this thread's part of average pooling.
LIBRARY void avg_pool(const struct Pool* p, struct IntaglioBarrier* barrier, int thread, int threads);
