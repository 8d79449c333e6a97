// Matrix products of two activations. The second operand is packed at run time and then multiplied by the microkernels
// that multiply by constant weights.
#pragma once

#include "products/heads.h"
#include "base/library.h"

// [batch, heads, rows, depth] @ [batch, heads, depth, columns]. Strides are in bytes, and 0 where an operand
// broadcasts.
struct Product {
    struct Heads a, out;  // batches and heads are the outer axes
    const uint8_t* b;
    int64_t b_batch, b_head, depth_stride, column_stride;
    int64_t batch, heads, rows, depth, columns;
    int32_t zero_a;               // zero point of the first operand
    float factor;                 // multiplier of the accumulators
    const struct Limits* limits;  // null: results are float32
    struct ResultTable table;     // lookup table of the results; `look_up` may be null
    struct FloatKernels kernels;
    uint8_t* scratch;
    int64_t scratch_bytes, sharers;  // bytes per thread; number of threads that have scratch memory
    struct Epilogue epilogue;        // `take` may be null; otherwise `out` is not written
    struct Share* shares;            // of the threads; null: each computes its own part
};

// Compute this thread's part of the product.
LIBRARY void product(const struct Product* p, int thread, int threads);
