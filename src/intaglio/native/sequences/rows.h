// Dynamic per-token quantization, bit for bit quantize_rows of numerics/row_quantization.py.

#pragma once

#include "base/image.h"
#include "base/library.h"
#include "base/sharing.h"

// Quantize each row with a scale from its largest magnitude; `alike` consecutive rows have the same scale, from the
// largest magnitude of all of them. Strides are in elements: batch, channel, row, column. `shares` of the threads
// may be null.
LIBRARY void quantize_rows(const float* from, const int64_t* strides, const struct Image* out, float* scales,
                           int64_t alike, struct Share* shares, int thread, int threads);
