// Linear layers whose weights have 4 bits: a value of -8..7 times a multiple of 1..15, which 32 neighbouring input
// channels of an output channel share. The products are those of int8.
//
// A panel consists of lines of 64 input channels: for each output channel, a byte with the multiples of the first (low
// half) and the second 32 input channels; then 8 steps of 64 bytes for each block of 16 output channels. A byte of a
// step has the values plus 8 of input channels k (low half) and k + 4.
#pragma once

#include "layers/matmul.h"

enum { INT4_GROUP = 32, INT4_CHANNELS = 64, INT4_MULTIPLES = 16 };

// How a layer reads its weights. `tile.b` and `panel_bytes` of its `struct Matmul` are those of 4-bit weights.
struct Int4Weights {
    const TileKernel *kernels, *last_kernels;  // kernels that read 4-bit weights
    int64_t rows;                              // height of their tallest tile
    int64_t expands;                           // with more rows than that, weights are expanded to int8 in memory
    uint8_t* scratch;                          // memory for an expanded panel of each thread
    int64_t scratch_bytes, sharers;            // bytes per thread; number of threads that have scratch memory
};

// Compute this thread's part of a layer. Weights are expanded in registers if there are few rows, and, where `expands`,
// to int8 in scratch memory, panel by panel, if there are more. A panel is expanded once, for all rows. Where the rows
// that the second-level cache holds come first, as with int8 weights, `benchmarks/int4_weights.py --pairs 3` takes 59
// to 62 ms for 512 rows on two threads of a Zen 5 instead of 52, which int8 weights take too. With AMX the products
// take less time than reading the rows from the third-level cache, so a panel is expanded for each MiB of them: 512
// rows of 4,864 channels take 0.70, and those of 8,192 channels 0.82 of the time (one thread of a Xeon).
LIBRARY void matmul_int4(const struct Matmul* m, const struct Int4Weights* w, int thread, int threads);
