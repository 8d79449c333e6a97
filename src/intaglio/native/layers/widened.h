// Products whose input is widened to 16 bits in memory, before all panels of weights are multiplied by it.

#pragma once

#include "layers/matmul.h"

// Return whether the kernels for widened input can compute a layer: there are such kernels and at least as many pixels
// as a tile has, sizes of the input are multiples of 4 bytes, and the lines that a tile reads are small enough.
LIBRARY int can_widen(const struct Matmul* m);

// Compute this thread's part of such a layer.
LIBRARY void matmul_widened(const struct Matmul* m, int thread, int threads);
