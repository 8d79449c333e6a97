// What microkernels are called with: the same bytes for assembly and for C++ (kernels/tile_spec.py has the offsets).

#pragma once

#include <stdint.h>

// Bounds and zero points of a requantization, in the widths kernels want them. Of results that keep a rest they have 16
// bits.
struct Limits {
    uint16_t zero_point16[32];
    uint8_t low8[64], high8[64];
    uint16_t low16[32], high16[32];
    int32_t zero_point, low, high, other_zero_point;
    float convertible_low, convertible_high;
};

// One call of a microkernel: `count` tiles side by side, each of `rows` output pixels by blocks of 16 channels. Strides
// in bytes; `run` in 4-byte steps. A kernel leaves `a`, `out`, `other` and rests behind its last tile, and `count` 0.
// `ahead` is its own.
struct Tile {
    const uint8_t* a;         // first tap of the first pixel
    int64_t a_pixel;          // to the next output pixel's first tap
    const int8_t* b;          // packed weights: [tap row][tap][run][16 * blocks][4]
    int64_t tap_rows, a_row;  // rows of taps, and how far apart they are
    int64_t taps, a_tap;      // taps in a row
    int64_t run;
    const int32_t* bias;  // zero-point term folded in
    const float* factor;
    uint8_t* out;
    int64_t out_pixel;
    const uint8_t* other;  // residual operand
    int64_t other_pixel;
    const float* other_factor;
    const struct Limits* limits;
    int64_t mask;  // channels of the panel
    int64_t count;
    int64_t ahead;         // from weights to those that are needed next, which a kernel may prefetch
    const uint8_t* table;  // of results, for kernels that look them up
    uint8_t* rest;         // of results of 16 bits, beside their levels
    int64_t rest_pixel;
    const uint8_t* other_rest;  // of a residual operand of 16 bits
    int64_t other_rest_pixel;
};

typedef void (*TileKernel)(struct Tile*);

// One call of a depthwise microkernel: `count` tiles side by side, each a few rows by a few columns of output pixels,
// the channels of a vector. A kernel leaves `count` 0 and `out` behind its last tile.
struct DepthwiseTile {
    const uint8_t* rows[16];  // of input, at the first column the tile reads
    int64_t pixel;            // bytes between input columns
    const int8_t* weights;
    const int32_t* bias;  // zero-point term folded in
    const float* factor;
    uint8_t* out;
    int64_t out_pixel, out_line;
    const struct Limits* limits;
    uint64_t mask;  // channels to write
    int64_t count;
    const uint8_t* table;  // of results, for kernels that look them up
};

typedef void (*DepthwiseKernel)(struct DepthwiseTile*);

// A table of kernels that an object file of the kernel library holds, by height or size.
#define KERNEL_TABLE(type, name) extern "C" __attribute__((visibility("hidden"))) const type name[]
