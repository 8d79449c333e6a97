// NHWC images in memory, and the halo of padding pixels around them.

#pragma once

#include "base/run.h"

// An NHWC tensor with a halo of `halo_y` rows and `halo_x` columns on every side of each image. `base` is the address
// of the first pixel inside the halo. `pixel`, `line` and `image` are the strides in bytes between columns, rows and
// images; `pixel` is also the number of bytes in a pixel.
struct Image {
    uint8_t* base;
    int64_t images, height, width, pixel, halo_y, halo_x, line, image;
};

// Return the image whose memory, halo included, begins at `start`.
static inline struct Image image(uint8_t* start, int64_t images, int64_t height, int64_t width, int64_t pixel,
                                 int64_t halo_y, int64_t halo_x) {
    struct Image i = {start, images, height, width, pixel, halo_y, halo_x, (width + 2 * halo_x) * pixel, 0};
    i.image = (height + 2 * halo_y) * i.line;
    i.base += halo_y * i.line + halo_x * pixel;
    return i;
}

// Return a view of the channels from `first` on; the strides stay the same.
static inline struct Image channels_from(struct Image i, int64_t first) {
    i.base += first;
    return i;
}

// Return a view of every `step_y`-th row from `first_y` on and every `step_x`-th column from `first_x` on, with
// `height` by `width` pixels per image.
static inline struct Image every(struct Image i, int64_t first_y, int64_t step_y, int64_t height, int64_t first_x,
                                 int64_t step_x, int64_t width) {
    i.base += first_y * i.line + first_x * i.pixel;
    i.line *= step_y, i.pixel *= step_x;
    i.height = height, i.width = width;
    return i;
}

// Return the address of a pixel. Coordinates outside of the image are those of the halo.
static inline uint8_t* at(const struct Image* i, int64_t n, int64_t y, int64_t x) {
    return i->base + n * i->image + y * i->line + x * i->pixel;
}

// Fill `bytes` bytes, a multiple of `channels`, with copies of one pixel.
static inline void fill_pixels(uint8_t* to, const uint8_t* pixel, int64_t channels, int64_t bytes) {
    if (bytes) memcpy(to, pixel, (size_t)channels);
    for (int64_t done = channels; done < bytes; done *= 2)
        memcpy(to + done, to, (size_t)(done < bytes - done ? done : bytes - done));
}

// Fill this thread's part of the halo with `pixel`, which holds one zero point per channel.
static inline void fill_halo_pixels(const struct Image* i, const uint8_t* pixel, int thread, int threads) {
    const int64_t rows = i->height + 2 * i->halo_y, side = i->halo_x * i->pixel;
    for (int64_t r = shard_begin(i->images * rows, thread, threads);
         r < shard_begin(i->images * rows, thread + 1, threads); ++r) {
        const int64_t y = r % rows - i->halo_y;
        uint8_t* line = at(i, r / rows, y, -i->halo_x);
        if (y < 0 || y >= i->height) {
            fill_pixels(line, pixel, i->pixel, i->line);
        } else {
            fill_pixels(line, pixel, i->pixel, side);
            fill_pixels(line + i->line - side, pixel, i->pixel, side);
        }
    }
}

// Fill this thread's part of the halo with the zero point.
static inline void fill_halo(const struct Image* i, uint8_t zero_point, int thread, int threads) {
    const int64_t rows = i->height + 2 * i->halo_y, side = i->halo_x * i->pixel;
    for (int64_t r = shard_begin(i->images * rows, thread, threads);
         r < shard_begin(i->images * rows, thread + 1, threads); ++r) {
        const int64_t y = r % rows - i->halo_y;
        uint8_t* line = at(i, r / rows, y, -i->halo_x);
        if (y < 0 || y >= i->height) {
            memset(line, zero_point, (size_t)i->line);
        } else {
            memset(line, zero_point, (size_t)side);
            memset(line + i->line - side, zero_point, (size_t)side);
        }
    }
}

// Iterate over this thread's part of the rows of all images: `n` is the image, `y` the row.
#define FOR_EACH_ROW(out_image)                                                                                    \
    for (int64_t r_ = shard_begin((out_image)->images * (out_image)->height, thread, threads),                     \
                 end_ = shard_begin((out_image)->images * (out_image)->height, thread + 1, threads), n = 0, y = 0; \
         r_ < end_ && (n = r_ / (out_image)->height, y = r_ % (out_image)->height, 1); ++r_)

static inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
