// Channel shuffle of two groups.

#pragma once

#include "base/image.h"
#include "base/library.h"

// Interleave the two halves of the n channels: channel 2 * i + g of the result is channel g * n / 2 + i of the input.
LIBRARY void interleave_channel_groups(const struct Image* in, const struct Image* out, int thread, int threads);
