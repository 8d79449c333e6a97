// Convolutions and linear layers as matrix products: panels of packed weights times tiles of output pixels.

#pragma once

#include "products/epilogue.h"
#include "base/image.h"
#include "base/library.h"
#include "base/sharing.h"

// A convolution or linear layer. `residual` is a residual operand; `remainder` and `residual_remainder` are the
// remainders of 16-bit results and of a 16-bit residual operand.
struct Matmul {
    struct Image in, out, residual, remainder, residual_remainder;
    int64_t stride_y, stride_x, top, left;           // `top`, `left`: padding
    struct Tile tile;                                // all fields that are the same in every call of a kernel
    int64_t panels, blocks, panel_bytes, out_bytes;  // `blocks` of a panel; bytes of its weights, and of a result
    const int32_t* first_channel;                    // first input channel of each panel; null if all are 0
    int64_t flat;                    // all output pixels are one line: each one's taps follow those of the pixel before
    int64_t first_row;               // number of the first output pixel, as scales of rows and `epilogue` count them
    int64_t rows;                    // height of the tallest tile
    int64_t lines;                   // lines of up to 16 pixels that a tile may have as its parts; 0 without such tiles
    int64_t mask, last_mask;         // bit masks of the channels of a full panel, and of the last one
    const TileKernel* kernels;       // for full panels, by height of a tile
    const TileKernel* last_kernels;  // for the last panel, by height of a tile
    const int16_t* transformed;      // weights for Winograd's method, or null: [panel][position][input / 2][16][2]
    const TileKernel *sums_kernels, *sums_last_kernels;        // the same as `kernels`, for sums of products in memory
    const TileKernel *widened_kernels, *widened_last_kernels;  // the same, for widened input; null without such kernels
    int64_t split_channels_below;  // with fewer output pixels, threads share panels instead of pixels
    int64_t chunk_bytes;           // bytes of input that stay in cache while all panels are multiplied
    struct ResultTable table;      // lookup table of the results; `look_up` may be null
    struct Activation activation;  // activation function of the results; `run` may be null
    struct Epilogue epilogue;      // `take` may be null; otherwise `out` has sizes, but no memory
    struct Share* shares;          // of the threads, or null, see sharing.h
};

// Compute this thread's part of the layer.
LIBRARY void matmul(const struct Matmul* m, int thread, int threads);

// Groups of rows, each with a weight of its own: the last row of group g is the one before `ends[g * step]`.
struct RowGroups {
    const int64_t* ends;
    int64_t step, count;
    int64_t weight_bytes, columns, factors;  // of each group; `factors` is 0 if all groups have the same ones
};

// Compute this thread's part of the products of all groups. An end before that of the group in front of it, or past the
// rows, is moved to the nearest row. Results of rows behind all groups are 0.
LIBRARY void matmul_groups(const struct Matmul* m, const struct RowGroups* g, int thread, int threads);

// Return the pixel of a line of `width` pixels at which a tile begins. The heights of tiles differ by at most one
// pixel.
static inline int64_t pixel_of_tile(int64_t tile, int64_t tiles, int64_t width) {
    return tile * (width / tiles) + at_most(tile, width % tiles);
}

// Compute tiles first to last (exclusive) of one panel, where each line of `width` pixels has `tiles` tiles.
LIBRARY void matmul_span(const struct Matmul* m, int64_t panel, int64_t first, int64_t last, int64_t tiles,
                         int64_t width);

enum {
    LINE_PIXELS = 16,  // of a line that is part of a tile, at most
    WARM = 8192,       // bytes of results that are computed before an epilogue reads them
    TILE_BYTES = 4096  // bytes of the largest tile, by which results may exceed that
};

// Return the tile, counted through all panels, at which a thread's part begins. Tiles of the last panel count less if
// it has fewer blocks.
static inline int64_t first_unit(const struct Matmul* m, int64_t tiles, int thread, int threads) {
    const int64_t narrow = (__builtin_popcountll((unsigned long long)m->last_mask) + 15) / 16,
                  wide = (m->panels - 1) * tiles;
    const int64_t at = shard_begin(wide * m->blocks + tiles * narrow, thread, threads);
    return at < wide * m->blocks ? at / m->blocks : wide + (at - wide * m->blocks) / narrow;
}

// Return how many nanoseconds one core takes for `pixels` output pixels, roughly, if it reads some bytes of weights.
static inline int64_t nanoseconds_of(const struct Matmul* m, int64_t pixels, int64_t weight_bytes) {
    const int64_t inputs = 4 * m->tile.run * m->tile.taps * m->tile.tap_rows, channels = 16 * m->panels * m->blocks;
    return pixels * inputs * channels / PRODUCTS_PER_NS + weight_bytes / WEIGHT_BYTES_PER_NS;
}
