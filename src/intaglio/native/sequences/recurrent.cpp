// LSTM, GRU and plain RNN, see recurrent.h.

#include "sequences/recurrent.h"

#include "base/functions.h"
#include "products/row_scale.h"
#include "sequences/rows.h"

// Arrays of a layer in scratch memory. In the first layer, `y_scales` are those of x if all its rows have one scale.
struct Working {
    float *of_x, *y, *y_scales, *of_h, *hidden, *cell, *h_scales;
    uint8_t *y_quantized, *h_quantized;
    struct TileSetup* setup;  // of this thread
};

// Return the next `bytes` bytes of scratch memory, rounded up to whole cache lines.
static inline uint8_t* cut(uint8_t** from, int64_t bytes) {
    uint8_t* part = *from;
    *from += (bytes + 63) / 64 * 64;
    return part;
}

// Divide the scratch memory, in the order of recurrent_scratch in ops/products/recurrent.py.
static inline struct Working cut_up(const struct Recurrent* r) {
    const int64_t gates = r->gates, rows = r->steps * r->batch, d = r->directions, cells = d * r->batch;
    uint8_t* at = r->scratch;
    struct Working w;
    w.of_x = (float*)cut(&at, d * rows * gates * 4);
    w.y = (float*)cut(&at, rows * d * r->hidden * 4);
    w.y_scales = (float*)cut(&at, rows * 4);
    w.of_h = (float*)cut(&at, cells * gates * 4);
    w.hidden = (float*)cut(&at, cells * r->hidden * 4);
    w.cell = (float*)cut(&at, cells * r->hidden * 4);
    w.h_scales = (float*)cut(&at, cells * 4);
    w.y_quantized = cut(&at, rows * d * r->hidden);
    w.h_quantized = cut(&at, cells * r->hidden);
    return w;
}

// Functions that return NaN for NaN.
static inline Reals sigmoid_keeping_nan(Reals z) { return z == z ? sigmoid(z) : z; }
static inline Reals tanh_keeping_nan(Reals z) { return z == z ? tanh_f32(z) : z; }

static inline Reals reals_at(const float* from) {
    Reals x;
    memcpy(&x, from, sizeof x);
    return x;
}

// Compute one time step of a row from the products of x and of h: update its states in place, and write y unless it is
// null. Vectors read past the end of a row.
static inline void step_row(const struct Recurrent* r, const float* x, const float* h, float* hidden, float* cell,
                            float* y) {
    const int64_t n = r->hidden;
    for (int64_t c = 0; c < n; c += FLOATS) {
        const size_t bytes = (size_t)(n - c < FLOATS ? n - c : FLOATS) * sizeof(float);
        Reals state;
        if (r->kind == RECURRENT_LSTM) {
            const Reals i = sigmoid_keeping_nan(reals_at(x + c) + reals_at(h + c)),
                        f = sigmoid_keeping_nan(reals_at(x + n + c) + reals_at(h + n + c));
            const Reals g = tanh_keeping_nan(reals_at(x + 2 * n + c) + reals_at(h + 2 * n + c));
            const Reals o = sigmoid_keeping_nan(reals_at(x + 3 * n + c) + reals_at(h + 3 * n + c));
            const Reals next = f * reals_at(cell + c) + i * g;
            memcpy(cell + c, &next, bytes);
            state = o * tanh_keeping_nan(next);
        } else if (r->kind == RECURRENT_GRU) {
            const Reals reset = sigmoid_keeping_nan(reals_at(x + c) + reals_at(h + c)),
                        z = sigmoid_keeping_nan(reals_at(x + n + c) + reals_at(h + n + c));
            const Reals fresh = tanh_keeping_nan(reals_at(x + 2 * n + c) + reset * reals_at(h + 2 * n + c));
            state = fresh + z * (reals_at(hidden + c) - fresh);
        } else {
            const Reals sum = reals_at(x + c) + reals_at(h + c);
            state = r->kind == RECURRENT_RNN_TANH ? tanh_keeping_nan(sum) : sum < 0.0f ? Reals{} : sum;
        }
        memcpy(hidden + c, &state, bytes);
        if (y) memcpy(y + c, &state, bytes);
    }
}

// Quantize the hidden state of a cell for the next product.
static inline void quantize_state(const struct Working* w, int64_t cell, int64_t n) {
    const float* state = w->hidden + cell * n;
    w->h_scales[cell] = quantize_row(state, 1, n, peak_bits(state, 1, n, MIN_ROW_ABSMAX), w->h_quantized + cell * n);
}

// Copy a state to (`out`) or from the caller's memory.
static inline void copy_state(const struct States* s, int64_t layer, int64_t row, float* state, int64_t n, int out) {
    float* at = s->base + layer * s->layer + row * s->row;
    for (int64_t c = 0; c < n; ++c) {
        if (out)
            at[c * s->stride] = state[c];
        else
            state[c] = at[c * s->stride];
    }
}

// Set the states of a cell to their initial values, or to 0 if there are none.
static inline void start_row(const struct Recurrent* r, const struct Working* w, int64_t layer, int64_t cell) {
    const int64_t n = r->hidden, row = cell % r->batch, place = layer * r->directions + cell / r->batch;
    memset(w->hidden + cell * n, 0, (size_t)n * sizeof(float));
    memset(w->cell + cell * n, 0, (size_t)n * sizeof(float));
    if (r->hidden_0.base) copy_state(&r->hidden_0, place, row, w->hidden + cell * n, n, 0);
    if (r->cell_0.base) copy_state(&r->cell_0, place, row, w->cell + cell * n, n, 0);
    quantize_state(w, cell, n);
}

// Copy the final states of a cell to the caller's memory.
static inline void end_row(const struct Recurrent* r, const struct Working* w, int64_t layer, int64_t cell) {
    const int64_t n = r->hidden, row = cell % r->batch, place = layer * r->directions + cell / r->batch;
    if (r->hidden_n.base) copy_state(&r->hidden_n, place, row, w->hidden + cell * n, n, 1);
    if (r->cell_n.base) copy_state(&r->cell_n, place, row, w->cell + cell * n, n, 1);
}

// Multiply the hidden states of `count` cells of one direction by their weights.
static inline void multiply_states(const struct Recurrent* r, const struct Working* w, int64_t layer, int64_t first,
                                   int64_t count, int thread, int threads) {
    const int64_t gates = r->gates;
    struct Matmul m = r->of_h[layer * r->directions + first / r->batch];
    m.in = image(w->h_quantized + first * r->hidden, count, 1, 1, r->hidden, 0, 0);
    m.out = image((uint8_t*)(w->of_h + first * gates), count, 1, 1, gates * 4, 0, 0);
    m.tile.out_pixel = m.out.pixel, m.tile.a_row = m.in.line;
    m.tile.row_scale = w->h_scales + first;
    m.tile.setup = w->setup;
    matmul(&m, thread, threads);
}

// Compute one time step of a cell; the second direction begins with the last step.
static inline void step_cell(const struct Recurrent* r, const struct Working* w, float* y, int64_t step, int64_t cell) {
    const int64_t gates = r->gates, n = r->hidden, d = cell / r->batch;
    const int64_t t = d ? r->steps - 1 - step : step, row = t * r->row_t + cell % r->batch * r->row_b;
    const float* x = w->of_x + (d * r->steps * r->batch + row) * gates;
    step_row(r, x, w->of_h + cell * gates, w->hidden + cell * n, w->cell + cell * n,
             y ? y + (row * r->directions + d) * n : 0);
    quantize_state(w, cell, n);
}

// Run all time steps of a layer. A cell is a row of the batch in one direction; those of a direction are neighbours.
static inline void run_steps(const struct Recurrent* r, const struct Working* w, int64_t layer, float* y,
                             struct IntaglioBarrier* barrier, int thread, int threads) {
    const int64_t cells = r->directions * r->batch, first = shard_begin(cells, thread, threads),
                  last = shard_begin(cells, thread + 1, threads);
    for (int64_t cell = first; cell < last; ++cell) start_row(r, w, layer, cell);
    if (cells >= threads) {
        for (int64_t step = 0; step < r->steps; ++step)
            for (int64_t begin = first, end; begin < last; begin = end) {
                end = at_most(last, (begin / r->batch + 1) * r->batch);
                multiply_states(r, w, layer, begin, end - begin, 0, 1);
                for (int64_t cell = begin; cell < end; ++cell) step_cell(r, w, y, step, cell);
            }
    } else {
        for (int64_t step = 0; step < r->steps; ++step) {
            intaglio_barrier_wait(barrier, threads);
            for (int64_t begin = 0; begin < cells; begin += r->batch)
                multiply_states(r, w, layer, begin, r->batch, thread, threads);
            intaglio_barrier_wait(barrier, threads);
            for (int64_t cell = first; cell < last; ++cell) step_cell(r, w, y, step, cell);
        }
    }
    for (int64_t cell = first; cell < last; ++cell) end_row(r, w, layer, cell);
}

LIBRARY void recurrent(const struct Recurrent* r, struct IntaglioBarrier* barrier, int thread, int threads) {
    const int64_t rows = r->steps * r->batch, gates = r->gates;
    struct Working w = cut_up(r);
    struct TileSetup setup = {};
    w.setup = &setup;
    if (!r->batch) return;
    for (int64_t layer = 0; layer < r->layers; ++layer) {
        const int64_t width = layer ? r->directions * r->hidden : r->inputs;
        if (layer) {
            const struct Image y = image(w.y_quantized, rows, 1, 1, width, 0, 0);
            const int64_t strides[] = {width, 1, 0, 0};
            quantize_rows(w.y, strides, &y, w.y_scales, 1, 0, thread, threads);
            intaglio_barrier_wait(barrier, threads);
        } else if (r->x_alike) {
            const int64_t last = shard_begin(rows, thread + 1, threads);
            for (int64_t row = shard_begin(rows, thread, threads); row < last; ++row) w.y_scales[row] = *r->x_scales;
            intaglio_barrier_wait(barrier, threads);
        }
        for (int64_t d = 0; d < r->directions; ++d) {
            struct Matmul m = r->of_x[layer * r->directions + d];
            m.in = image(layer ? w.y_quantized : r->x, rows, 1, 1, width, 0, 0);
            m.out = image((uint8_t*)(w.of_x + d * rows * gates), rows, 1, 1, gates * 4, 0, 0);
            m.tile.out_pixel = m.out.pixel, m.tile.a_row = m.in.line;
            m.tile.row_scale = layer || r->x_alike ? w.y_scales : r->x_scales;
            m.tile.setup = w.setup;
            matmul(&m, thread, threads);
        }
        intaglio_barrier_wait(barrier, threads);
        run_steps(r, &w, layer, layer + 1 < r->layers ? w.y : r->y, barrier, thread, threads);
        intaglio_barrier_wait(barrier, threads);
    }
    release_tiles(&setup);
}
