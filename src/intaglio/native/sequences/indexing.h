// Elements at computed places, and sums, extrema and order along an axis, see ops/direct. Strides are in elements.
#pragma once

#include <string.h>

#include "base/numerics.h"
#include "base/run.h"

enum { INDEXED_AXES = 6, INDICES = 4 };

// A tensor that is iterated over: sizes of the result's axes, padded with leading ones.
struct Places {
    int64_t sizes[INDEXED_AXES];
    const uint8_t* from;
    uint8_t* to;
    int64_t from_stride[INDEXED_AXES], to_stride[INDEXED_AXES];
    int64_t bytes;
};

// Indices of one axis of the operand: `limit` elements, `step` apart. Negative indices count from the end if `wraps`.
struct Index {
    const int64_t* at;
    int64_t stride[INDEXED_AXES], limit, step;
    int wraps;
};

// Whether elements along an axis, `run` of which follow one another, are copied together: no index moves along it.
static inline int continues_run(const struct Places* p, const struct Index* indices, int count, int axis, int64_t run) {
    if (p->sizes[axis] == 1) return 1;
    for (int i = 0; i < count; ++i)
        if (indices[i].stride[axis]) return 0;
    return p->from_stride[axis] == run && p->to_stride[axis] == run;
}

// Copy the elements that `count` index tensors select; *outside becomes 1 if an index is not inside of its axis.
// Elements of the last axes are copied together where that leaves work for every thread.
static inline void copy_indexed(const struct Places* p, const struct Index* indices, int count, int32_t* outside,
                                int thread, int threads) {
    int64_t total = 1, run = 1;
    for (int axis = 0; axis < INDEXED_AXES; ++axis) total *= p->sizes[axis];
    int axes = INDEXED_AXES;
    while (total && axes && continues_run(p, indices, count, axes - 1, run)) {
        if (total / (run * p->sizes[axes - 1]) < threads) break;
        run *= p->sizes[--axes];
    }
    const int64_t lines = total / run;
    for (int64_t e = shard_begin(lines, thread, threads); e < shard_begin(lines, thread + 1, threads); ++e) {
        int64_t rest = e, from = 0, to = 0, at[INDICES] = {0};
        for (int axis = axes - 1; axis >= 0; --axis) {
            const int64_t place = rest % p->sizes[axis];
            rest /= p->sizes[axis];
            from += place * p->from_stride[axis], to += place * p->to_stride[axis];
            for (int i = 0; i < count; ++i) at[i] += place * indices[i].stride[axis];
        }
        for (int i = 0; i < count; ++i) {
            int64_t index = indices[i].at[at[i]];
            if (index < 0 && indices[i].wraps) index += indices[i].limit;
            if (index < 0 || index >= indices[i].limit) *outside = 1, index = 0;
            from += index * indices[i].step;
        }
        if (*outside) return;
        memcpy(p->to + to * p->bytes, p->from + from * p->bytes, (size_t)(run * p->bytes));
    }
}

// Lines along one axis: `size` elements, with strides along it, for every place of the other axes.
struct Lines {
    int64_t sizes[INDEXED_AXES];
    const uint8_t* from;
    uint8_t* to;
    int64_t from_stride[INDEXED_AXES], to_stride[INDEXED_AXES];
    int64_t size, from_step, to_step;
};

// Call take(first element of the operand's line, first element of the result's) for this thread's lines.
template <typename From, typename To, typename Take>
static inline void for_each_line(const struct Lines* l, int thread, int threads, Take take) {
    int64_t total = 1;
    for (int axis = 0; axis < INDEXED_AXES; ++axis) total *= l->sizes[axis];
    for (int64_t line = shard_begin(total, thread, threads); line < shard_begin(total, thread + 1, threads); ++line) {
        int64_t rest = line, from = 0, to = 0;
        for (int axis = INDEXED_AXES - 1; axis >= 0; --axis) {
            const int64_t place = rest % l->sizes[axis];
            rest /= l->sizes[axis];
            from += place * l->from_stride[axis], to += place * l->to_stride[axis];
        }
        take((const From*)l->from + from, (To*)l->to + to);
    }
}

// What is put to indices along an axis: strides along the other axes and along the axis, of elements and of indices.
struct Scattered {
    const uint8_t* from;
    const int64_t* at;
    int64_t from_stride[INDEXED_AXES], from_step, at_stride[INDEXED_AXES], at_step, count;
};
enum { SCATTER_SET, SCATTER_SUM, SCATTER_AMAX, SCATTER_AMIN };

// Copy every line, and put elements to its indices in order; *outside becomes 1 if an index is not inside of the axis.
template <typename Element>
static inline void scatter_lines(const struct Lines* l, const struct Scattered* s, int mode, int32_t* outside,
                                 int thread, int threads) {
    int64_t total = 1;
    for (int axis = 0; axis < INDEXED_AXES; ++axis) total *= l->sizes[axis];
    for (int64_t line = shard_begin(total, thread, threads); line < shard_begin(total, thread + 1, threads); ++line) {
        int64_t rest = line, from = 0, to = 0, put = 0, at = 0;
        for (int axis = INDEXED_AXES - 1; axis >= 0; --axis) {
            const int64_t place = rest % l->sizes[axis];
            rest /= l->sizes[axis];
            from += place * l->from_stride[axis], to += place * l->to_stride[axis];
            put += place * s->from_stride[axis], at += place * s->at_stride[axis];
        }
        const Element* x = (const Element*)l->from + from;
        Element* y = (Element*)l->to + to;
        for (int64_t i = 0; i < l->size; ++i) y[i * l->to_step] = x[i * l->from_step];
        for (int64_t i = 0; i < s->count; ++i) {
            const int64_t index = s->at[at + i * s->at_step];
            if (index < 0 || index >= l->size) {
                *outside = 1;
                return;
            }
            const Element added = ((const Element*)s->from)[put + i * s->from_step];
            Element* const old = y + index * l->to_step;
            const int is_nan = added != added, replaces = mode == SCATTER_AMAX ? added > *old : added < *old;
            if (mode == SCATTER_SUM)
                *old += added;
            else if (mode == SCATTER_SET || is_nan || replaces)
                *old = added;
        }
    }
}

// Write the sums of the elements up to each one; i64 wraps around.
template <typename From, typename To, typename Sum>
static inline void cumulative_sums(const struct Lines* l, int thread, int threads) {
    for_each_line<From, To>(l, thread, threads, [l](const From* from, To* to) {
        Sum sum = 0;
        for (int64_t i = 0; i < l->size; ++i) {
            sum += (Sum)from[i * l->from_step];
            to[i * l->to_step] = (To)sum;
        }
    });
}

// Write the sum of each line; it wraps around.
template <typename From>
static inline void sums_of_integers(const struct Lines* l, int thread, int threads) {
    for_each_line<From, int64_t>(l, thread, threads, [l](const From* from, int64_t* to) {
        uint64_t sum = 0;
        for (int64_t i = 0; i < l->size; ++i) sum += (uint64_t)from[i * l->from_step];
        *to = (int64_t)sum;
    });
}

// Write the first place of the largest or smallest element; a NaN precedes all others.
template <typename From>
static inline void places_of_extrema(const struct Lines* l, int largest, int thread, int threads) {
    for_each_line<From, int64_t>(l, thread, threads, [l, largest](const From* from, int64_t* to) {
        int64_t found = 0;
        From best = from[0];
        for (int64_t i = 1; i < l->size && best == best; ++i) {
            const From x = from[i * l->from_step];
            if (x != x || (largest ? x > best : x < best)) best = x, found = i;
        }
        *to = found;
    });
}

// Elements along an axis, by their places.
template <typename From>
struct Ordered {
    const From* from;
    int64_t step;
    int descending;

    // Return whether place a comes before place b. Equal elements keep their order; a NaN counts as the largest.
    bool precedes(int64_t a, int64_t b) const {
        const From x = from[a * step], y = from[b * step];
        if ((x != x) != (y != y)) return (x != x) == descending;
        if (x < y || y < x) return (y < x) == descending;
        return a < b;
    }
};

// Let a place sink from the root of a heap of `count` places, in which no place comes before those below it.
template <typename From>
static inline void sink(const struct Ordered<From>* o, int64_t place, int64_t* heap, int64_t step, int64_t count) {
    int64_t at = 0;
    for (int64_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && o->precedes(heap[child * step], heap[(child + 1) * step])) ++child;
        if (!o->precedes(place, heap[child * step])) break;
        heap[at * step] = heap[child * step];
    }
    heap[at * step] = place;
}

// Write the first `count` places in order: a heap keeps the first ones found so far, and is sorted in the end.
template <typename From>
static inline void places_in_order(const struct Lines* l, int descending, int64_t count, int thread, int threads) {
    for_each_line<From, int64_t>(l, thread, threads, [l, descending, count](const From* from, int64_t* to) {
        const Ordered<From> o{from, l->from_step, descending};
        const int64_t step = l->to_step;
        for (int64_t place = 0; place < l->size && count; ++place) {
            if (place >= count) {
                if (o.precedes(place, to[0])) sink(&o, place, to, step, count);
                continue;
            }
            int64_t at = place;
            for (int64_t above; at && o.precedes(to[(above = (at - 1) / 2) * step], place); at = above)
                to[at * step] = to[above * step];
            to[at * step] = place;
        }
        for (int64_t last = count - 1; last > 0; --last) {
            const int64_t place = to[last * step];
            to[last * step] = to[0];
            sink(&o, place, to, step, last);
        }
    });
}
