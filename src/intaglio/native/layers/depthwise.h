// Depthwise convolutions: microkernels for tiles of output pixels, 256-bit vectors, or plain loops.

#pragma once

#include "base/image.h"
#include "base/intrinsics.h"
#include "layers/matmul.h"
#include "base/numerics.h"

// A depthwise convolution by microkernels, in blocks of 64 channels.
struct Depthwise {
    struct Image in, out;
    int64_t stride_y, stride_x, dilation_y, top, left;  // `top`, `left`: padding
    int64_t rows, columns;                              // output pixels of the largest tile
    int64_t blocks, block_bytes;                        // blocks of channels, and bytes of their weights
    int64_t rows_inside;                                // all rows of a block, and not all blocks of some rows
    uint64_t last_mask;                                 // bit mask of the channels of the last block
    const DepthwiseKernel *kernels, *last_kernels;      // [rows][columns] of a tile, from 1; for the last block
    struct ResultTable table;                           // lookup table of the results; `look_up` may be null
    struct Activation activation;                       // activation function of the results; `run` may be null
    struct Epilogue epilogue;   // of float32 results; `take` may be null; otherwise `out` has sizes, but no memory
    struct DepthwiseTile tile;  // all fields that are the same in every call of a kernel
    struct Share* shares;       // of the threads; null: each computes its own part
};

// Compute `tiles` neighbouring tiles of `rows` by `columns` output pixels each, and advance `t` past them. `pixel` is
// the number of the first pixel, counted through all images, and `channel` that of the first channel.
static inline void depthwise_tiles(const struct Depthwise* d, struct DepthwiseTile* t, DepthwiseKernel kernel,
                                   int64_t rows, int64_t columns, int64_t tiles, int64_t pixel, int64_t channel) {
    enum { CHANNELS = 64, PIXEL = 4 * CHANNELS };
    const struct Activation* activation = d->activation.run ? &d->activation : 0;
    const struct Epilogue* epilogue = d->epilogue.take ? &d->epilogue : 0;
    const int staged = activation || epilogue;
    const int64_t most = staged ? WARM / (rows * columns * PIXEL) + 1 : tiles, channels = __builtin_popcountll(t->mask);
    float real[(WARM + TILE_BYTES) / sizeof(float)] __attribute__((aligned(64)));
    while (tiles) {
        const int64_t count = tiles < most ? tiles : most, pixels = count * columns;
        uint8_t* out = t->out;
        t->count = count;
        if (staged) t->out = (uint8_t*)real, t->out_pixel = PIXEL, t->out_line = pixels * PIXEL;
        kernel(t);
        for (int64_t row = 0; activation && row < rows; ++row)
            activation->run(activation, real + row * pixels * CHANNELS, CHANNELS, pixels, out + row * d->out.line,
                            d->out.pixel, channels);
        for (int64_t row = 0; epilogue && row < rows; ++row)
            epilogue->take(epilogue->run, (uint8_t*)(real + row * pixels * CHANNELS), PIXEL, pixel + row * d->out.width,
                           pixels, channel, channels);
        if (staged) t->out = out + pixels * d->out.pixel;
        pixel += pixels;
        t->in += pixels * d->stride_x * t->pixel;
        tiles -= count;
    }
}

// Compute this thread's part of the convolution. All blocks of channels of some rows come before the next rows, whose
// lines overlap; or all rows of a block before the next block, if the lines of all blocks exceed the first-level cache.
static inline __attribute__((always_inline)) void depthwise(const struct Depthwise* d, int thread, int threads) {
    enum { CHANNELS = 64 };
    const int64_t groups = (d->out.height + d->rows - 1) / d->rows,
                  tiles = (d->out.width + d->columns - 1) / d->columns;
    const int64_t units_of_image = groups * d->blocks, units = d->out.images * units_of_image;
    if (!tiles) return;
    const int64_t least = d->out.width / tiles, longer = d->out.width % tiles;  // columns; tiles with one more
    struct DepthwiseTile t = d->tile;
    t.pixel = d->in.pixel, t.line = d->dilation_y * d->in.line;
    const int64_t inner = d->rows_inside ? groups : d->blocks, outer = d->rows_inside ? d->blocks : groups;
    const int64_t products = units * d->out.width * d->block_bytes;
    struct Sharing s = enter_step(d->shares, products / DEPTHWISE_PRODUCTS_PER_NS, thread, threads);
    while (next_piece(&s)) {
        const int64_t end = first_item(&s, units, 1);
        for (int64_t u = first_item(&s, units, 0); u < end; ++u) {
            const int64_t i = u % inner, o = u / inner % outer, n = u / units_of_image;
            const int64_t block = d->rows_inside ? o : i, group = d->rows_inside ? i : o;
            const int64_t y = group * d->out.height / groups, rows = (group + 1) * d->out.height / groups - y;
            const int last = block == d->blocks - 1;
            const DepthwiseKernel* kernels = (last ? d->last_kernels : d->kernels) + (rows - 1) * d->columns - 1;
            const int64_t pixel = (n * d->out.height + y) * d->out.width, channel = block * CHANNELS;
            t.weights = d->tile.weights + block * d->block_bytes;
            t.bias = d->tile.bias + channel, t.factor = d->tile.factor + channel;
            t.mask = last ? d->last_mask : d->tile.mask;
            t.in = at(&d->in, n, y * d->stride_y - d->top, -d->left) + channel;
            t.out = at(&d->out, n, y, 0) + channel;
            t.out_pixel = d->out.pixel, t.out_line = d->out.line;
            if (longer) depthwise_tiles(d, &t, kernels[least + 1], rows, least + 1, longer, pixel, channel);
            depthwise_tiles(d, &t, kernels[least], rows, least, tiles - longer, pixel + longer * (least + 1), channel);
            for (int64_t row = y; d->table.look_up && row < y + rows; ++row)
                d->table.look_up(at(&d->out, n, row, 0) + channel, d->out.width, d->out.pixel,
                                 __builtin_popcountll(t.mask), d->table.entries);
        }
    }
}

// A depthwise convolution without microkernels: with 256-bit vectors, or in loops over 64 channels at a time. Products
// of uint8 and int8 fit into 16 bits.
struct DepthwisePlain {
    struct Image in, out;
    int64_t stride_y, stride_x, dilation_y, dilation_x, top, left, taps_y, taps_x;
    const int8_t* weights;  // [tap y][tap x][channel]
    const int32_t* bias;
    const float* factor;
    const struct Limits* limits;
    struct ResultTable table;      // lookup table of the results; `look_up` may be null
    struct Activation activation;  // activation function of the results; `run` may be null
    struct Epilogue epilogue;      // of float32 results, as in `Depthwise`
    struct Share* shares;
};

// Enter the step of a convolution whose lines threads share.
static inline struct Sharing enter_lines(const struct DepthwisePlain* d, int thread, int threads) {
    const int64_t products = d->out.images * d->out.height * d->out.width * d->in.pixel * d->taps_y * d->taps_x;
    return enter_step(d->shares, products / DEPTHWISE_PRODUCTS_PER_NS, thread, threads);
}

#if defined(__AVX2__)
#include "layers/depthwise_vectors.h"
#endif

// Compute a line of results in loops over 64 channels at a time.
static inline void depthwise_plain_line(const struct DepthwisePlain* d, int64_t r) {
    enum { CHANNELS = 64 };
    const int64_t channels = d->in.pixel;
    const struct Limits* q = d->limits;
    const int64_t n = r / d->out.height, y = r % d->out.height;
    for (int64_t x = 0; x < d->out.width; ++x)
        for (int64_t c = 0; c < channels; c += CHANNELS) {
            const int64_t lanes = channels - c < CHANNELS ? channels - c : CHANNELS;
            int32_t sum[CHANNELS];
            for (int64_t l = 0; l < lanes; ++l) sum[l] = d->bias[c + l];
            for (int64_t ky = 0; ky < d->taps_y; ++ky)
                for (int64_t kx = 0; kx < d->taps_x; ++kx) {
                    const uint8_t* in = at(&d->in, n, y * d->stride_y - d->top + ky * d->dilation_y,
                                           x * d->stride_x - d->left + kx * d->dilation_x) +
                                        c;
                    const int8_t* w = d->weights + (ky * d->taps_x + kx) * channels + c;
                    if (lanes == CHANNELS)
                        for (int l = 0; l < CHANNELS; ++l) sum[l] += (int16_t)(in[l] * w[l]);
                    else
                        for (int64_t l = 0; l < lanes; ++l) sum[l] += in[l] * w[l];
                }
            uint8_t* out = at(&d->out, n, y, x) + c;
            if (d->activation.run || d->epilogue.take) {
                float real[CHANNELS] = {0};
                for (int64_t l = 0; l < lanes; ++l) real[l] = (float)sum[l] * d->factor[c + l];
                if (d->activation.run)
                    d->activation.run(&d->activation, real, CHANNELS, 1, out, 0, lanes);
                else
                    d->epilogue.take(d->epilogue.run, (uint8_t*)real, 0, r * d->out.width + x, 1, c, lanes);
            } else {
                for (int64_t l = 0; l < lanes; ++l)
                    out[l] = (uint8_t)requantize(sum[l], d->factor[c + l], q->zero_point, q->low, q->high);
            }
            if (d->table.look_up) d->table.look_up(out, 1, 0, lanes, d->table.entries);
        }
}

// Compute this thread's part of the convolution.
static inline void depthwise_plain(const struct DepthwisePlain* d, int thread, int threads) {
    const int64_t lines = d->out.images * d->out.height;
#if defined(__AVX2__)
    if (d->taps_y * d->taps_x <= MOST_TAPS) {
        depthwise_lines<PixelsOfTaps>(d, thread, threads);
        return;
    }
#endif
    struct Sharing s = enter_lines(d, thread, threads);
    while (next_piece(&s)) {
        const int64_t end = first_item(&s, lines, 1);
        for (int64_t r = first_item(&s, lines, 0); r < end; ++r) depthwise_plain_line(d, r);
    }
}

// Compute this thread's part of a convolution with this many taps, `STRIDE` columns apart and without dilation of
// columns. `CLAMPS`: scaled sums may be outside of the range of integers.
template <int TAPS_Y, int TAPS_X, int STRIDE, int CLAMPS>
static inline void depthwise_columns(const struct DepthwisePlain* d, int thread, int threads) {
#if defined(__AVX2__)
    depthwise_lines<PixelsOfColumns<TAPS_Y, TAPS_X, STRIDE, CLAMPS>>(d, thread, threads);
#else
    depthwise_plain(d, thread, threads);
#endif
}
