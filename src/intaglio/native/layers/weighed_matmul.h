// A 1x1 convolution whose input channels are scaled first, as after squeeze-and-excitation.

#pragma once

#include "layers/matmul.h"
#include "elementwise/pair.h"

// Compute this thread's part of a convolution whose input is the product `weighed`. No step computes that product: each
// thread scales the pixels that it needs. Threads that share panels each scale all pixels; threads that share pixels
// scale their own, a few tiles at a time.

LIBRARY void matmul_weighed(struct Matmul* m, const struct Pair* weighed, int thread, int threads);
