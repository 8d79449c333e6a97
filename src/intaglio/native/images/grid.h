// Input positions that the outputs of upsampling read.

#pragma once

#include "base/image.h"

// Input positions that the outputs read along one axis. `index` and `weight` are tables; without tables, the positions
// are computed from the other fields and are those of ops/images/resize.py, bit for bit.
struct Grid {
    const int32_t* index;  // [result], or [result][2] of linear interpolation
    const float* weight;   // [result][2], weights of linear interpolation
    int64_t size, result;  // sizes of the input and of the output
    float step;            // inputs between neighbouring outputs; 0: size / result
    int images, align;     // flags: two axes are resized; align_corners
};

// Return the input position that output `i` copies.
static inline int64_t nearest_at(const struct Grid* g, int64_t i) {
    if (g->index) return g->index[i];
    if (g->images && (g->result == g->size || g->result == 2 * g->size)) return i * g->size / g->result;
    const float step = g->step != 0 ? g->step : (float)g->size / (float)g->result;
    return at_most((int64_t)((float)i * step), g->size - 1);
}

// The two input positions that an output interpolates, and their weights.
struct Between {
    int64_t below, above;
    float weight[2];
};

static inline struct Between between(const struct Grid* g, int64_t i) {
    if (g->index)
        return (struct Between){g->index[2 * i], g->index[2 * i + 1], {g->weight[2 * i], g->weight[2 * i + 1]}};
    float place = (float)i;
    if (g->align) {
        place = place * (g->result > 1 ? (float)(g->size - 1) / (float)(g->result - 1) : 0.0f);
    } else if (g->size != g->result) {
        const float step = g->step != 0 ? g->step : (float)g->size / (float)g->result;
        place = step * (place + 0.5f) - 0.5f;
        place = place > 0 ? place : 0;
    }
    const int64_t below = at_most((int64_t)place, g->size - 1);
    const float over = place - (float)below, fraction = over > 0 ? over < 1 ? over : 1 : 0;
    return (struct Between){below, below + (below < g->size - 1), {1 - fraction, fraction}};
}
