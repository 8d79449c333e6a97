// Dynamic per-token quantization, bit for bit the functions of numerics/row_quantization.py.

#pragma once

#include "base/image.h"
#include "base/library.h"
#include "products/epilogue.h"

// Quantize each row with a scale from its largest magnitude; `alike` consecutive rows have the same scale, from the
// largest magnitude of all of them. Strides are in elements: batch, channel, row, column.
LIBRARY void quantize_rows(const float* from, const int64_t* strides, const struct Image* out, float* scales,
                           int64_t alike, int thread, int threads);

// Dequantize accumulators, given as floats, in place. Rows are `stride` floats from each other; `row` is the number of
// the first row, `channel` that of the first of `channels` channels.
LIBRARY void dequantize_rows(const struct ByRow* r, float* at, int64_t stride, int64_t row, int64_t rows,
                             int64_t channel, int64_t channels);
