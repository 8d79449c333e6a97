// Embedding bags, bit for bit bags_reference of ops/embedding.py. Compile with -ffp-contract=off.
#pragma once

#include "elementwise/loops.h"
#include "base/run.h"

enum { BAG_SUM, BAG_MEAN, BAG_MAX };

// Rows of a table, combined per bag. `table` is f32[rows, width], or u8[rows, width] with `scales` and `zero_points`,
// f32[rows]. Bag b has the ids from offsets[b] up to offsets[b + 1]; without `ends`, the last bag goes on to the last
// id. `weights`, one per id, may be null. The id `padding` is skipped; it is -1 if all ids count.
struct Bags {
    const uint8_t* table;
    const float *scales, *zero_points, *weights;
    const int64_t *ids, *offsets;
    float* out;
    int64_t rows, width, count, bags, stride, padding;
    int ends, mode;
};

// Return up to FLOATS values of a row, from value d on, in float32.
static inline Reals row_of(const struct Bags* b, int64_t id, int64_t d, int64_t count) {
    if (!b->scales) return read_f32((const float*)b->table + id * b->width + d, 1, count);
    return dequantize_row(read_u8(b->table + id * b->width + d, 1, count), b->scales[id], b->zero_points[id]);
}

// Combine the rows of one bag. Return 0 if an id is not a row of the table, or if the bag is not inside of the ids.
static inline int joined_rows(const struct Bags* b, float* out, int64_t first, int64_t last) {
    int64_t joined = 0;
    if (first < 0 || last < first || last > b->count) return 0;
    memset(out, 0, (size_t)b->width * sizeof *out);
    for (int64_t i = first; i < last; ++i) {
        const int64_t id = b->ids[i];
        if (id < 0 || id >= b->rows) return 0;
        if (id == b->padding) continue;
        const float weight = b->weights ? b->weights[i] : 1.0f;
        for_each_block(
            0, b->width, [&](int64_t first, int64_t count, int, auto vectors) __attribute__((always_inline)) {
                enum { COUNT = decltype(vectors)::COUNT };
                EACH {
                    const int64_t d = first + i * FLOATS;
                    Reals row = row_of(b, id, d, count);
                    if (b->weights) row = row * weight;
                    const Reals total = read_f32(out + d, 1, count);
                    write_f32(out + d, 1, count, b->mode != BAG_MAX ? total + row : joined ? larger(row, total) : row);
                }
            });
        ++joined;
    }
    if (b->mode == BAG_MEAN && joined)
        for_each_block(0, b->width,
                       [&](int64_t first, int64_t count, int, auto vectors) __attribute__((always_inline)) {
                           enum { COUNT = decltype(vectors)::COUNT };
                           EACH {
                               const int64_t d = first + i * FLOATS;
                               write_f32(out + d, 1, count, read_f32(out + d, 1, count) / (float)joined);
                           }
                       });
    return 1;
}

// Compute this thread's part of the bags; *outside becomes 1 if an id or an offset is invalid.
static inline void embedding_bags(const struct Bags* b, int32_t* outside, int thread, int threads) {
    for (int64_t bag = shard_begin(b->bags, thread, threads); bag < shard_begin(b->bags, thread + 1, threads); ++bag) {
        const int64_t last = bag + 1 < b->bags + b->ends ? b->offsets[bag + 1] : b->count;
        const int begins = bag || !b->offsets[0];
        if (!begins || !joined_rows(b, b->out + bag * b->stride, b->offsets[bag], last)) *outside = 1;
    }
}
