// Convolutions of 3x3 taps by Winograd's method (arXiv:1509.09308), with the same sums as all others.
//
// Four neighbouring results, 2 by 2, of an input and an output channel take 16 products instead of 36: of 16 sums of
// inputs (B^T d B) by 16 sums of weights (2G w (2G)^T). Sums of the products over all input channels then add up to
// four times the results. All are integers: those of inputs are within 1020, those of weights within 1152, and 32-bit
// sums of up to `MOST_INPUTS` input channels cannot overflow, so that the fourth part is exact.

#pragma once

#include "layers/matmul.h"

enum { MOST_INPUTS = 1024 };  // input channels

// Return whether this method can compute a layer: there are weights for it, and results.
LIBRARY int can_transform(const struct Matmul* m);

// Compute this thread's part of such a layer.
LIBRARY void matmul_transformed(const struct Matmul* m, int thread, int threads);
