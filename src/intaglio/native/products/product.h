// Products of two activations: the second operand is packed while the program runs, then the kernels of constant
// weights multiply.
#pragma once

#include "products/heads.h"
#include "base/library.h"

// [outer, inner, rows, depth] times [outer, inner, depth, columns]; strides in bytes, 0 where an operand broadcasts.
struct Product {
    struct Heads a, out;  // batches and heads are the outer axes
    const uint8_t* b;
    int64_t b_batch, b_head, depth_apart, column_apart;
    int64_t batch, heads, rows, depth, columns;
    int32_t zero_a;
    float factor;
    const struct Limits* limits;  // null: results stay in float
    const uint8_t* table;         // of results, or null
    struct FloatKernels kernels;
    uint8_t* scratch;
    int64_t scratch_bytes, sharers;
    struct Epilogue epilogue;  // `take` may be null; else nothing is written to `out`
};

LIBRARY void product(const struct Product* p, int thread, int threads);
