// What is done to results of a product while they lie in the first-level cache.

#pragma once

#include "base/run.h"
#include "products/tile.h"

// A function of results in float, before they become levels: clamp(rne((f(x) * gain) * inverse) + zero_point, low,
// high).
struct Activation {
    // Channels of pixels that lie `from_pixel` floats and `to_pixel` bytes apart; floats up to a multiple of 16 are
    // read.
    void (*levels)(const struct Activation* a, const float* from, int64_t from_pixel, int64_t pixels, uint8_t* to,
                   int64_t to_pixel, int64_t channels);
    float inverse, slope;
    const struct Limits* limits;
    const float* gain;  // of each channel; null when all are 1
};

// float32(acc) * scale of the row * scale of the column + bias. `alike`: all rows have the first scale.
struct ByRow {
    const float *scales, *columns, *bias;
    int64_t alike;
};

// What reads results while they lie in the first-level cache, floats or levels: some channels of pixels `apart` bytes
// from each other. Pixels are counted through all images; where the results of this lie it knows itself.
struct Epilogue {
    void (*take)(const struct Run* r, const uint8_t* tile, int64_t apart, int64_t pixel, int64_t pixels,
                 int64_t channel, int64_t channels);
    const struct Run* run;
    int64_t bytes;  // of an element it reads
};
