// Data movement: copies between strides, and reshapes.

#pragma once

#include "base/image.h"
#include "base/library.h"

enum { RUNS = 8, AXES = 7 };

// A copy as RUNS nested loops with a size and two strides in bytes each; the last loop is the innermost. The innermost
// loop copies elements of 1, 2, 4 or 8 bytes.
struct Copy {
    const uint8_t* in;
    uint8_t* out;
    int64_t element, size[RUNS], from[RUNS], to[RUNS];
};

// Compute this thread's part of a copy.
LIBRARY void copy_strided(const struct Copy* c, int thread, int threads);

// A tensor with any strides in bytes, by its logical axes; missing leading axes have size 1.
struct Side {
    uint8_t* base;
    int64_t size[AXES], stride[AXES];
};

// Compute this thread's part of a reshape: copy elements of 1, 2, 4 or 8 bytes in logical order, between tensors of
// different strides.
LIBRARY void copy_in_logical_order(const struct Side* in, const struct Side* out, int64_t element, int thread,
                                   int threads);
