// LSTM, GRU and plain RNN, see ops/products/recurrent.py. The products of x are one matrix product per layer and
// direction; after that, each time step consists of a matrix product of the hidden states, and the gates. Threads share
// the rows of the batch and the directions, which do not wait for each other. If there are fewer of these than threads,
// threads share the columns of the product in each time step.
#pragma once

#include "base/library.h"
#include "layers/matmul.h"

enum { MAX_DIRECTIONS = 2 };

// States f32[layers * directions, batch, hidden] and their strides in elements; `base` may be null.
struct States {
    float* base;
    int64_t layer, row, stride;
};

enum { RECURRENT_LSTM, RECURRENT_GRU, RECURRENT_RNN_TANH, RECURRENT_RNN_RELU };

// A quantized recurrent network of one or more layers. `gates` is the number of outputs of its products.
struct Recurrent {
    int64_t kind, gates, layers, directions, steps, batch, inputs, hidden;
    int64_t row_t, row_b;   // rows of x and y from one time step to the next, and from one sequence to the next
    uint8_t* x;             // quantized input
    const float* x_scales;  // scale of each row of x, or of all rows if `x_alike`
    int64_t x_alike;
    float* y;                                          // null if it is not an output
    struct States hidden_0, cell_0, hidden_n, cell_n;  // initial and final states
    const struct Matmul *of_x, *of_h;                  // [layers][directions], without images and scales of rows
    uint8_t* scratch;                                  // shared by all threads
};

// Compute this thread's part of all layers.
LIBRARY void recurrent(const struct Recurrent* r, struct IntaglioBarrier* barrier, int thread, int threads);
