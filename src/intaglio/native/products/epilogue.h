// Epilogues of matrix products: what is computed from the results while they are in the L1 cache.

#pragma once

#include "base/run.h"
#include "products/tile.h"

// A function f of results in float32, and quantization: clamp(rne((f(x) * gain) * inverse) + zero_point, low, high).
struct Activation {
    // Computes `channels` channels of `pixels` pixels, which are `from_pixel` floats apart in `from` and `to_pixel`
    // bytes apart in `to`. Reads floats up to a multiple of 16 channels.
    void (*run)(const struct Activation* a, const float* from, int64_t from_pixel, int64_t pixels, uint8_t* to,
                int64_t to_pixel, int64_t channels);
    float inverse, slope;  // 1 / scale of the result; slope of leaky_relu
    const struct Limits* limits;
    const float* gain;  // multiplier of each channel; null if all are 1
};

// A lookup table of the results, unless kernels look them up. `look_up` is look_up_in_place of elementwise/lookup.h; a
// program without tables has null here and is not linked with that function.
struct ResultTable {
    void (*look_up)(uint8_t* at, int64_t pixels, int64_t stride, int64_t channels, const uint8_t* entries);
    const uint8_t* entries;
};

// A fused loop over the results, float32 or quantized, while they are in the L1 cache. `take` reads `channels` channels
// from number `channel` on, of `pixels` pixels from number `pixel` on, counted through all images; in `tile` the pixels
// are `stride` bytes from each other. `take` has the addresses of its own results.
struct Epilogue {
    void (*take)(const struct Run* r, const uint8_t* tile, int64_t stride, int64_t pixel, int64_t pixels,
                 int64_t channel, int64_t channels);
    const struct Run* run;
    int64_t bytes;  // bytes of an element of `tile`
};
