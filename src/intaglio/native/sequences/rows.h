// Rows whose scale is made while the program runs: row_peaks and quantize_rows of numerics.py, bit for bit.

#pragma once

#include "base/image.h"
#include "base/library.h"

// Strides in elements: images, channels, rows, columns. `alike` rows, one after the other, have the scale that the
// largest magnitude of all of them gives.
LIBRARY void quantize_rows(const float* from, const int64_t* strides, const struct Image* out, float* scales,
                           int64_t alike, int thread, int threads);
