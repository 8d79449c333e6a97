// Data movement of quantized values: copies between strides, and reshapes.

#pragma once

#include "base/image.h"

enum { RUNS = 8, AXES = 7 };

// A copy as RUNS nested loops with a size and two strides in bytes each; the last loop is the innermost.
struct Copy {
    const uint8_t* in;
    uint8_t* out;
    int64_t size[RUNS], from[RUNS], to[RUNS];
};

// Copy the innermost loop.
static inline void copy_run(const uint8_t* in, uint8_t* out, int64_t size, int64_t from, int64_t to) {
    if (to == 1 && from == 1)
        memcpy(out, in, (size_t)size);
    else if (to == 1 && from == 0)
        memset(out, *in, (size_t)size);
    else
        for (int64_t i = 0; i < size; ++i) out[i * to] = in[i * from];
}

// Compute this thread's part of a copy.
static inline void copy_strided(const struct Copy* c, int thread, int threads) {
    const int64_t size = c->size[RUNS - 1], from = c->from[RUNS - 1], to = c->to[RUNS - 1];
    int64_t total = 1, digit[RUNS - 1];
    for (int k = 0; k < RUNS - 1; ++k) total *= c->size[k];
    if (total == 1) {
        const int64_t first = shard_begin(size, thread, threads);
        copy_run(c->in + first * from, c->out + first * to, shard_begin(size, thread + 1, threads) - first, from, to);
        return;
    }
    int64_t u = shard_begin(total, thread, threads);
    const int64_t end = shard_begin(total, thread + 1, threads);
    if (u >= end) return;
    const uint8_t* in = c->in;
    uint8_t* out = c->out;
    for (int64_t k = RUNS - 2, rest = u; k >= 0; --k) {
        digit[k] = rest % c->size[k], rest /= c->size[k];
        in += digit[k] * c->from[k], out += digit[k] * c->to[k];
    }
    for (; u < end; ++u) {
        copy_run(in, out, size, from, to);
        for (int k = RUNS - 2; k >= 0; --k) {
            in += c->from[k], out += c->to[k];
            if (++digit[k] < c->size[k]) break;
            in -= c->size[k] * c->from[k], out -= c->size[k] * c->to[k];
            digit[k] = 0;
        }
    }
}

// A tensor with any strides in bytes, by its logical axes; missing leading axes have size 1.
struct Side {
    uint8_t* base;
    int64_t size[AXES], stride[AXES];
};

// Return the address of an element by its logical index, and set `digit` to its index along each axis.
static inline uint8_t* enter(const struct Side* s, int64_t index, int64_t* digit) {
    uint8_t* at = s->base;
    for (int k = AXES - 1; k >= 0; --k) {
        digit[k] = index % s->size[k], index /= s->size[k];
        at += digit[k] * s->stride[k];
    }
    return at;
}

// Return the address of the element that follows in logical order.
static inline uint8_t* advance(const struct Side* s, uint8_t* at, int64_t* digit) {
    for (int k = AXES - 1; k >= 0; --k) {
        at += s->stride[k];
        if (++digit[k] < s->size[k]) break;
        at -= s->size[k] * s->stride[k];
        digit[k] = 0;
    }
    return at;
}

// Compute this thread's part of a reshape: copy elements in logical order, between tensors of different strides.
static inline void copy_in_logical_order(const struct Side* in, const struct Side* out, int thread, int threads) {
    int64_t total = 1, digit_in[AXES], digit_out[AXES];
    for (int k = 0; k < AXES; ++k) total *= out->size[k];
    int64_t u = shard_begin(total, thread, threads);
    const int64_t end = shard_begin(total, thread + 1, threads);
    if (u >= end) return;
    const uint8_t* from = enter(in, u, digit_in);
    uint8_t* to = enter(out, u, digit_out);
    for (; u < end; ++u) {
        *to = *from;
        from = advance(in, (uint8_t*)from, digit_in);
        to = advance(out, to, digit_out);
    }
}
