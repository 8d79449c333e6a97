// Float tensors of the caller to quantized images and back.

#pragma once

#include "base/image.h"
#include "base/library.h"

// level = clamp(rne(x * inverse + offset) + zero_point, low, high)
struct Affine {
    float inverse, offset, scale;
    int32_t zero_point, low, high;
};

// float, any strides (elements; batch, channel, row, column) -> levels. Channels are `apart` in q: 1, or 0 for all
// alike.
LIBRARY void quantize_image(const float* from, const int64_t* strides, const struct Image* out, const struct Affine* q,
                            int64_t apart, int thread, int threads);

// Levels in any strides -> the same levels, channels last.
LIBRARY void copy_image(const uint8_t* from, const int64_t* strides, const struct Image* out, int thread, int threads);

// Levels -> dense NHWC floats.
LIBRARY void dequantize_image(const struct Image* in, float* to, const struct Affine* q, int thread, int threads);
