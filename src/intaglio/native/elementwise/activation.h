// Activation functions of float32 results, which quantize what they return: the values of `Activation.run`.

#pragma once

#include "products/epilogue.h"
#include "base/library.h"

#define ACTIVATION(name)                                                                                             \
    LIBRARY void name##_quantized(const struct Activation* a, const float* from, int64_t from_pixel, int64_t pixels, \
                                  uint8_t* to, int64_t to_pixel, int64_t channels)
ACTIVATION(leaky_relu);
ACTIVATION(hardsigmoid);
ACTIVATION(hardswish);
ACTIVATION(sigmoid);
ACTIVATION(silu);
ACTIVATION(tanh);
ACTIVATION(gelu);
ACTIVATION(gelu_tanh);
#undef ACTIVATION
