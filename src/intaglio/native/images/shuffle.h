// Channel shuffles of two groups.

#pragma once

#include "base/image.h"
#include "base/library.h"

// Channel 2 * i + g of the result is channel g * each + i: two halves, one from each by turns.
LIBRARY void interleave_levels(const struct Image* in, const struct Image* out, int thread, int threads);
