// Data movement, see data_movement.h.

#include "elementwise/data_movement.h"

#include <string.h>

// An element at any address.
template <typename T>
struct Unaligned {
    typedef T type __attribute__((aligned(1), may_alias));
};

// Copy a run of elements.
template <typename T>
static void copy_run(const uint8_t* in, uint8_t* out, int64_t size, int64_t from, int64_t to) {
    typedef typename Unaligned<T>::type Element;
    if (to == (int64_t)sizeof(T) && from == to) {
        memcpy(out, in, (size_t)(size * to));
    } else if (to == (int64_t)sizeof(T) && from == 0) {
        const T value = *(const Element*)in;
        for (int64_t i = 0; i < size; ++i) ((Element*)out)[i] = value;
    } else if (to == (int64_t)sizeof(T)) {
        for (int64_t i = 0; i < size; ++i) ((Element*)out)[i] = *(const Element*)(in + i * from);
    } else {
        for (int64_t i = 0; i < size; ++i) *(Element*)(out + i * to) = *(const Element*)(in + i * from);
    }
}

// Call `body(in, out, digit)` for this thread's part of the iterations of the first `runs` loops of a copy. `digit`
// holds the iteration of each loop.
template <typename Body>
static void for_each_iteration(const struct Copy* c, int runs, int thread, int threads, const Body& body) {
    int64_t total = 1, digit[RUNS];
    for (int k = 0; k < runs; ++k) total *= c->size[k];
    int64_t u = shard_begin(total, thread, threads);
    const int64_t end = shard_begin(total, thread + 1, threads);
    if (u >= end) return;
    const uint8_t* in = c->in;
    uint8_t* out = c->out;
    for (int64_t k = runs - 1, rest = u; k >= 0; --k) {
        digit[k] = rest % c->size[k], rest /= c->size[k];
        in += digit[k] * c->from[k], out += digit[k] * c->to[k];
    }
    for (; u < end; ++u) {
        body(in, out, digit);
        for (int k = runs - 1; k >= 0; --k) {
            in += c->from[k], out += c->to[k];
            if (++digit[k] < c->size[k]) break;
            in -= c->size[k] * c->from[k], out -= c->size[k] * c->to[k];
            digit[k] = 0;
        }
    }
}

enum { VECTOR_BYTES = 16, LINE_BYTES = 64 };

// Return the elements of `a` and of `b` behind it that are at the given places, which are constants.
template <typename Vector>
static inline Vector shuffled(Vector a, Vector b, Vector places) {
#if defined(__clang__)  // it has no shuffle with places in a variable, and makes one of this loop
    enum { COUNT = sizeof(Vector) / sizeof(a[0]) };
    Vector found;
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; ++i) found[i] = places[i] < COUNT ? a[places[i]] : b[places[i] - COUNT];
    return found;
#else
    return __builtin_shuffle(a, b, places);
#endif
}

// Transpose a square of elements whose rows are vectors: element j of row i becomes element i of row j. Each step
// interleaves row i with the row half of the square below it, which moves one bit of the row's index to the index of
// the element.
template <typename T>
static void transpose_square(const uint8_t* in, int64_t from, uint8_t* out, int64_t to) {
    enum { SIDE = VECTOR_BYTES / sizeof(T) };
    typedef T Vector __attribute__((vector_size(VECTOR_BYTES)));
    Vector rows[SIDE], next[SIDE], low, high;
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; ++i) {
        low[i] = (T)(i / 2 + i % 2 * SIDE), high[i] = (T)(low[i] + SIDE / 2);
        memcpy(&rows[i], in + i * from, VECTOR_BYTES);
    }
#pragma GCC unroll 4
    for (int step = 1; step < SIDE; step *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < SIDE / 2; ++i) {
            next[2 * i] = shuffled(rows[i], rows[i + SIDE / 2], low);
            next[2 * i + 1] = shuffled(rows[i], rows[i + SIDE / 2], high);
        }
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; ++i) rows[i] = next[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; ++i) memcpy(out + i * to, &rows[i], VECTOR_BYTES);
}

// Copy with loop `a`, whose elements are adjacent in the operand, and loop `b`, whose elements are adjacent in the
// result, in blocks of a cache line by a cache line, and these in squares.
template <typename T>
static void copy_transposed(const struct Copy* c, int a, int b, int thread, int threads) {
    enum { SIDE = VECTOR_BYTES / sizeof(T), BLOCK = LINE_BYTES / sizeof(T) };
    const int64_t from = c->from[b], to = c->to[a], width = (int64_t)sizeof(T);
    struct Copy blocks = *c;
    for (int k = 0; k < RUNS; ++k) {
        if (k != a && k != b) continue;
        blocks.size[k] = (c->size[k] + BLOCK - 1) / BLOCK;
        blocks.from[k] *= BLOCK, blocks.to[k] *= BLOCK;
    }
    for_each_iteration(&blocks, RUNS, thread, threads, [=](const uint8_t* in, uint8_t* out, const int64_t* digit) {
        const int64_t rest_a = c->size[a] - digit[a] * BLOCK, rest_b = c->size[b] - digit[b] * BLOCK;
        const int64_t size_a = rest_a < BLOCK ? rest_a : BLOCK, size_b = rest_b < BLOCK ? rest_b : BLOCK;
        const int64_t whole_a = size_a / SIDE * SIDE, whole_b = size_b / SIDE * SIDE;
        for (int64_t i = 0; i < whole_a; i += SIDE)
            for (int64_t j = 0; j < whole_b; j += SIDE)
                transpose_square<T>(in + j * from + i * width, from, out + i * to + j * width, to);
        for (int64_t i = 0; i < size_a; ++i) {
            const int64_t j = i < whole_a ? whole_b : 0;
            copy_run<T>(in + j * from + i * width, out + i * to + j * width, size_b - j, from, width);
        }
    });
}

// Return the loop other than the last whose elements are adjacent on one side, or -1 without one.
static int adjacent_loop(const struct Copy* c, const int64_t* stride, int64_t least) {
    for (int k = RUNS - 2; k >= 0; --k)
        if (stride[k] == c->element && c->size[k] >= least) return k;
    return -1;
}

template <typename T>
static void copy_elements(const struct Copy* c, int thread, int threads) {
    const int last = RUNS - 1;
    const int64_t size = c->size[last], from = c->from[last], to = c->to[last], side = VECTOR_BYTES / sizeof(T);
    if (size >= side && from != to) {
        const int a = to == c->element ? adjacent_loop(c, c->from, side) : last;
        const int b = to == c->element ? last : adjacent_loop(c, c->to, side);
        if (a >= 0 && b >= 0 && c->from[a] == c->element && c->from[b] > 0 && c->to[a] > 0)
            return copy_transposed<T>(c, a, b, thread, threads);
    }
    int64_t total = 1;
    for (int k = 0; k < last; ++k) total *= c->size[k];
    if (total == 1) {
        const int64_t first = shard_begin(size, thread, threads), end = shard_begin(size, thread + 1, threads);
        return copy_run<T>(c->in + first * from, c->out + first * to, end - first, from, to);
    }
    for_each_iteration(c, last, thread, threads,
                       [=](const uint8_t* in, uint8_t* out, const int64_t*) { copy_run<T>(in, out, size, from, to); });
}

LIBRARY void copy_strided(const struct Copy* c, int thread, int threads) {
    switch (c->element) {
        case 1:
            return copy_elements<uint8_t>(c, thread, threads);
        case 2:
            return copy_elements<uint16_t>(c, thread, threads);
        case 4:
            return copy_elements<uint32_t>(c, thread, threads);
        default:
            return copy_elements<uint64_t>(c, thread, threads);
    }
}

// Return the address of an element by its logical index, and set `digit` to its index along each axis.
static uint8_t* enter(const struct Side* s, int64_t index, int64_t* digit) {
    uint8_t* at = s->base;
    for (int k = AXES - 1; k >= 0; --k) {
        digit[k] = index % s->size[k], index /= s->size[k];
        at += digit[k] * s->stride[k];
    }
    return at;
}

// Return the address of the element that follows in logical order.
static uint8_t* advance(const struct Side* s, uint8_t* at, int64_t* digit) {
    for (int k = AXES - 1; k >= 0; --k) {
        at += s->stride[k];
        if (++digit[k] < s->size[k]) break;
        at -= s->size[k] * s->stride[k];
        digit[k] = 0;
    }
    return at;
}

template <typename T>
static void reshape_elements(const struct Side* in, const struct Side* out, int thread, int threads) {
    typedef typename Unaligned<T>::type Element;
    int64_t total = 1, digit_in[AXES], digit_out[AXES];
    for (int k = 0; k < AXES; ++k) total *= out->size[k];
    int64_t u = shard_begin(total, thread, threads);
    const int64_t end = shard_begin(total, thread + 1, threads);
    if (u >= end) return;
    const uint8_t* from = enter(in, u, digit_in);
    uint8_t* to = enter(out, u, digit_out);
    for (; u < end; ++u) {
        *(Element*)to = *(const Element*)from;
        from = advance(in, (uint8_t*)from, digit_in);
        to = advance(out, to, digit_out);
    }
}

LIBRARY void copy_in_logical_order(const struct Side* in, const struct Side* out, int64_t element, int thread,
                                   int threads) {
    switch (element) {
        case 1:
            return reshape_elements<uint8_t>(in, out, thread, threads);
        case 2:
            return reshape_elements<uint16_t>(in, out, thread, threads);
        case 4:
            return reshape_elements<uint32_t>(in, out, thread, threads);
        default:
            return reshape_elements<uint64_t>(in, out, thread, threads);
    }
}
