// What products of two activations share: heads in memory, kernels with results in float.
#pragma once

#include "products/epilogue.h"

enum {
    QUERIES = 24,
    PANEL = 64,
    WIDEST_HEAD = 256
};  // rows at once, as in plan/scratch_memory.py; columns; values, as in ops/attention.py

// Kernels with results in float: `table[blocks][height]`, panels of up to `blocks` times 16 columns.
struct FloatKernels {
    const TileKernel* const* table;
    int64_t blocks, rows;
};

// Levels [batch, head, row, value], values side by side. Strides in bytes.
struct Heads {
    uint8_t* base;
    int64_t batch, head, row;
};

static inline uint8_t* head_of(const struct Heads* h, int64_t image, int64_t head) {
    return h->base + image * h->batch + head * h->head;
}
