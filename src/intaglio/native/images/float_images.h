// Pooling and sampling of images of floats with any strides.

#pragma once

#include "base/image.h"
#include "base/library.h"

enum { FLOAT_AXES = 3 };  // depth, rows and columns; images and lines have axes of size 1 in front

// Elements of an image or a volume; strides are in elements.
struct FloatImage {
    float* base;
    int64_t image, channel, axis[FLOAT_AXES];
};

// Return the number of elements before an element.
static inline int64_t offset_of(const struct FloatImage* x, int64_t image, int64_t channel, int64_t depth, int64_t row,
                                int64_t column) {
    return image * x->image + channel * x->channel + depth * x->axis[0] + row * x->axis[1] + column * x->axis[2];
}

// Windows along one axis. Averages are divided by the number of elements, padding included with `include_pad`.
struct FloatPoolAxis {
    int64_t size, result, kernel, stride, before, dilation, include_pad, adaptive;
};

struct FloatPool {
    struct FloatImage in, out;
    int64_t images, channels;
    struct FloatPoolAxis axes[FLOAT_AXES];
    int64_t divisor;  // 0: the number of elements
    int maximum;
};

// Places between -1 and 1, one pair (column, row) for each pixel of the result.
struct GridSample {
    struct FloatImage in, out;
    const float* grid;
    int64_t grid_stride[4], images, channels, size[2], result[2];  // rows, columns
    int border, align;
};

// Compute this thread's part of the maxima or averages of windows.
LIBRARY void pool_f32(const struct FloatPool* p, int thread, int threads);
// Compute this thread's part of the bilinear interpolation at the places of a grid.
LIBRARY void grid_sample(const struct GridSample* g, int thread, int threads);
