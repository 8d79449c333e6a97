// Operators of one quantized operand, value by value or pixel by pixel.

#pragma once

#include "base/image.h"
#include "base/library.h"
#include "products/tile.h"

LIBRARY void affine_levels(const struct Image* in, const struct Image* out, int32_t zero, const float* factor,
                           const float* offset, const struct Limits* q, int thread, int threads);
LIBRARY void prelu_levels(const struct Image* in, const struct Image* out, int32_t zero, const float* rise,
                          const float* fall, const struct Limits* q, int thread, int threads);
LIBRARY void layer_norm_levels(const struct Image* in, const struct Image* out, int32_t zero, const float* factor,
                               const float* offset, float eps, const struct Limits* q, int thread, int threads);
LIBRARY void clamp_levels(const struct Image* in, const struct Image* out, const struct Limits* q, int thread,
                          int threads);
