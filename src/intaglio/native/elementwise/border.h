// Conversion between the caller's tensors and quantized images.

#pragma once

#include "base/image.h"
#include "base/library.h"

// Parameters of q = clamp(rne(x * inverse + offset) + zero_point, low, high).
struct Affine {
    float inverse, offset, scale;
    int32_t zero_point, low, high;
};

// Quantize float32 of any strides (in elements; batch, channel, row, column) to an image. Channel c has the parameters
// q[c * stride]; `stride` is 1, or 0 if all channels have the same. Clipped values are added to a count, see
// add_clipped.
LIBRARY void quantize_image(const float* from, const int64_t* strides, const struct Image* out, const struct Affine* q,
                            int64_t stride, int64_t* counts, int64_t range, int thread, int threads);

// Copy quantized values of any strides to an image, whose channels are last.
LIBRARY void copy_image(const uint8_t* from, const int64_t* strides, const struct Image* out, int thread, int threads);

// Dequantize an image to dense NHWC float32.
LIBRARY void dequantize_image(const struct Image* in, float* to, const struct Affine* q, int thread, int threads);
