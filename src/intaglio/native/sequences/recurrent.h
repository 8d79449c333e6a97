// LSTM and GRU: the twin of ops/recurrent.py. Products of x are one matrix product a layer and direction; then every
// step is a product of the hidden states, and gates. Threads share rows of the batch and directions, which never wait
// for each other, or, where there are fewer of these than threads, the columns of every step's product.
#pragma once

#include "base/library.h"
#include "products/matmul.h"

enum { MOST_DIRECTIONS = 2 };

// Where f32[layers * directions, batch, hidden] lies; `base` may be null. Strides in elements.
struct States {
    float* base;
    int64_t layer, row, apart;
};

struct Recurrent {
    int64_t lstm, layers, directions, steps, batch, inputs, hidden;
    int64_t row_t, row_b;   // rows of x and y between steps, and between entries of the batch
    uint8_t* x;             // levels
    const float* x_scales;  // one for every row, or one for all
    int64_t x_alike;
    float* y;  // null where nobody reads it
    struct States hidden_0, cell_0, hidden_n, cell_n;
    const struct Matmul *of_x, *of_h;  // by layer, then direction; without images and scales of rows
    uint8_t* scratch;
};

LIBRARY void recurrent(const struct Recurrent* r, struct IntaglioBarrier* barrier, int thread, int threads);
