// Resizing of images of floats with any strides.

#pragma once

#include "images/float_images.h"
#include "images/grid.h"

enum { RESIZE_NEAREST, RESIZE_LINEAR, RESIZE_CUBIC };

struct FloatResize {
    struct FloatImage in, out;
    int64_t images, channels;
    struct Grid axes[FLOAT_AXES];
    int mode, count;  // how to interpolate, and how many of the axes are resized: the last ones
};

// Compute this thread's part of a resized image.
LIBRARY void resize_f32(const struct FloatResize* r, int thread, int threads);
