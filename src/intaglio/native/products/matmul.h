// Convolutions and linear layers: panels of packed weights by tiles of output pixels.

#pragma once

#include "products/epilogue.h"
#include "base/image.h"
#include "base/library.h"

// A convolution or linear layer over one pair of images.
struct Matmul {
    struct Image in, out, other, rest, other_rest;
    int64_t stride_y, stride_x, top, left;
    struct Tile tile;  // everything that does not change from call to call
    int64_t panels, blocks, panel_bytes, out_bytes;
    const int32_t* first_channel;    // per panel, of the input; null when it is always 0
    int64_t flat;                    // every output pixel's taps follow the last one's
    int64_t rows;                    // tallest tile
    int64_t mask, last_mask;         // channels of a full panel, and of the last one
    const TileKernel* kernels;       // by tile height, full panels
    const TileKernel* last_kernels;  // by tile height, the last panel
    int64_t split_channels_below;    // fewer output pixels than this: threads share panels, not pixels
    int64_t chunk_bytes;             // input that stays in cache while all panels pass over it
    const uint8_t* table;            // of results, for kernels that do not look them up; or null
    struct Activation activation;    // of results in float; `levels` may be null
    struct ByRow by_row;             // of accumulators as floats, in flat products; `scales` may be null
    struct Epilogue epilogue;        // `take` may be null; then `out` has sizes only
};

// All of it, this thread's part.
LIBRARY void matmul(const struct Matmul* m, int thread, int threads);

// Tiles first..last of one panel.
LIBRARY void matmul_span(const struct Matmul* m, int64_t panel, int64_t first, int64_t last, int64_t tiles,
                         int64_t width);

enum {
    WARM = 8192,
    TILE_BYTES = 2048
};  // bytes of results that epilogues read while they are warm, and of one tile more

// The tile, counted through all panels, at which a thread's share begins; tiles of a narrow last panel weigh less.
static inline int64_t first_unit(const struct Matmul* m, int64_t tiles, int thread, int threads) {
    const int64_t narrow = (__builtin_popcountll((unsigned long long)m->last_mask) + 15) / 16,
                  wide = (m->panels - 1) * tiles;
    const int64_t at = share(wide * m->blocks + tiles * narrow, thread, threads);
    return at < wide * m->blocks ? at / m->blocks : wide + (at - wide * m->blocks) / narrow;
}
