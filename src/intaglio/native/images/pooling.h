// Max and average pooling of lines, images and volumes.

#pragma once

#include "base/image.h"
#include "base/library.h"
#include "products/tile.h"

struct PoolAxis {
    int64_t kernel, stride, before, dilation;
};

// Images of volumes are their depths; an image or a line has one depth.
struct Pool {
    struct Image in, out;
    int64_t depth_in, depth_out;
    struct PoolAxis z, y, x;
    int64_t include_pad, fixed_divisor, adaptive;
    int32_t zero_in;
    const float*
        factors;   // by divisor, from 1; only one when the divisor is fixed; null where windows grow with a free size
    double ratio;  // then this, divided by the divisor
    const struct Limits* limits;
    int32_t* sums;  // by thread, up to `shares`, and channel; null unless the window is the image
    int64_t shares;
};

LIBRARY void max_pool(const struct Pool* p, int thread, int threads);
LIBRARY void avg_pool(const struct Pool* p, struct IntaglioBarrier* barrier, int thread, int threads);
