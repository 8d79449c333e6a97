// A product whose input is weighed by channel first: squeeze and excite in front of a 1x1 convolution.

#pragma once

#include "products/matmul.h"
#include "elementwise/pair.h"

// The same of a product that no step has made: pixels of one line, weighed as threads come to need them. Threads that
// share panels weigh all pixels each; those that share pixels weigh theirs, a few tiles at a time.

LIBRARY void matmul_weighed(struct Matmul* m, const struct Pair* weighed, int thread, int threads);
