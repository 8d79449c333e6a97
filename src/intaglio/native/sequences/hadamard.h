// Products with Hadamard matrices, bit for bit hadamard of numerics/hadamard.py.

#pragma once

#include "base/functions.h"
#include "base/library.h"
#include "sequences/indexing.h"

enum { LARGEST_HADAMARD = 1024 };

// Multiply each block of `size` elements of each line by the Hadamard matrix of 1 and -1, and by `scale`.
LIBRARY void hadamard_lines(const struct Lines* l, int64_t size, float scale, int thread, int threads);
