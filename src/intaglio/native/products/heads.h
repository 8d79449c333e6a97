// Products of two activations: heads in memory, and microkernels with results in float32.
#pragma once

#include "products/epilogue.h"

enum {
    QUERY_BLOCK = 32,     // rows of a block at most, as in ops/products/scratch_memory.py
    PANEL = 64,           // columns of a packed panel, at most
    MAX_HEAD_WIDTH = 256  // values of a head at most, as in ops/products/attention.py
};

// Microkernels with results in float32: `table[blocks][height]` is for panels of 16 * `blocks` columns. `blocks` is the
// largest number of blocks, `rows` the largest height.
struct FloatKernels {
    const TileKernel* const* table;
    int64_t blocks, rows;
};

// Return the most rows of a block: one tile of kernels for AMX, some tiles of others.
static inline int64_t rows_of_block(const struct FloatKernels* k) { return k->rows < QUERY_BLOCK ? 24 : QUERY_BLOCK; }

// A quantized tensor [batch, head, row, value] whose values are contiguous. The strides are in bytes.
struct Heads {
    uint8_t* base;
    int64_t batch, head, row;
};

// Return the address of the first row of a head.
static inline uint8_t* head_of(const struct Heads* h, int64_t image, int64_t head) {
    return h->base + image * h->batch + head * h->head;
}
