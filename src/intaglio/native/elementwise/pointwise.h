// Operators of one quantized tensor: affine and PReLU per channel, layer norm per pixel, clamp.

#pragma once

#include "base/image.h"
#include "base/library.h"
#include "products/tile.h"

// Compute (x - zero) * factor + offset with a factor and an offset per channel.
LIBRARY void affine_u8(const struct Image* in, const struct Image* out, int32_t zero, const float* factor,
                       const float* offset, const struct Limits* q, int thread, int threads);
// Compute PReLU: x - zero is multiplied by `rise` if it is not negative, else by the channel's `fall`.
LIBRARY void prelu_u8(const struct Image* in, const struct Image* out, int32_t zero, const float* rise,
                      const float* fall, const struct Limits* q, int thread, int threads);
// Normalize each pixel over its channels, see layer_norm of numerics/requantization.py.
LIBRARY void layer_norm_u8(const struct Image* in, const struct Image* out, int32_t zero, const float* factor,
                           const float* offset, float eps, const struct Limits* q, int thread, int threads);
// Clamp quantized values to the bounds of q.
LIBRARY void clamp_u8(const struct Image* in, const struct Image* out, const struct Limits* q, int thread, int threads);
