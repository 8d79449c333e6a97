// Arguments of microkernels in assembly and in C++. kernels/tile_spec.py and kernels/depthwise_spec.py have the offsets
// of the fields.

#pragma once

#include <stdint.h>

// Zero points and bounds of a requantization, in the widths that kernels load. Those of 16-bit results are 16-bit
// values.
struct Limits {
    uint16_t zero_point16[32];
    uint8_t low8[64], high8[64];
    uint16_t low16[32], high16[32];
    int32_t zero_point, low, high, other_zero_point;
    float convertible_low, convertible_high;
};

// What a thread's tile registers of AMX are configured for: tiles of `blocks` of 16 channels by `rows` pixels, `first`
// of them in the first part, and taps of `run` steps of 4 bytes, which are `steps` steps of `step_run` each. All 0 if
// they are not configured.
struct TileSetup {
    int64_t blocks, rows, first, run, steps, step_run;
};

// Arguments of one call of a microkernel: `count` neighbouring tiles, each of some output pixels by some blocks of 16
// channels. Strides are in bytes. The kernel advances `a`, `out`, `residual` and both remainders past the last tile and
// sets `count` to 0; it may change `ahead`.
struct Tile {
    const uint8_t* a;         // first tap of the first output pixel
    int64_t a_pixel;          // from the first tap of an output pixel to that of the next
    const int8_t* b;          // packed weights: [tap row][tap][run][16 * blocks][4]
    int64_t tap_rows, a_row;  // rows of taps, and the stride between them
    int64_t taps, a_tap;      // taps of a row, and the stride between them
    int64_t run;              // steps of 4 bytes in each tap
    const int32_t* bias;      // bias of each channel, including the zero-point term
    const float* factor;      // multiplier of each channel
    uint8_t* out;             // first output pixel
    int64_t out_pixel;        // stride between output pixels
    const uint8_t* residual;  // residual operand, or null
    int64_t residual_pixel;
    const float* residual_factor;  // multiplier of the residual operand for each channel
    const struct Limits* limits;
    int64_t mask;          // bit mask of the channels of the panel that are written
    int64_t count;         // number of tiles
    int64_t ahead;         // bytes from the weights to those needed next, which a kernel may prefetch
    const uint8_t* table;  // u8[256] lookup table, for kernels that look up their results
    uint8_t* remainder;    // remainders of 16-bit results; `out` has the quotients
    int64_t remainder_pixel;
    const uint8_t* residual_remainder;  // remainders of a 16-bit residual operand
    int64_t residual_remainder_pixel;
    // For results with scales of rows: those of the output pixels from the first one on, which the kernel advances past
    // the last tile, and the bias of each channel.
    const float *row_scale, *row_bias;
    // For kernels with AMX; null for a kernel that configures tile registers by itself and releases them at the end.
    struct TileSetup* setup;
    // Kernels with AMX can compute parts of up to 16 pixels, such as lines of an image, that do not follow each other.
    // `part_rows` are the pixels of a part, or 0 without such parts. The others are the bytes between the end of a part
    // and the next one.
    int64_t part_rows, a_skip, out_skip, residual_skip, remainder_skip, residual_remainder_skip;
    // Levels of the cache that kernels with few rows prefetch weights into: 2, or else 1. 0 in `struct Matmul`: those
    // of `prefetched_levels`.
    int64_t levels;
};

typedef void (*TileKernel)(struct Tile*);

// Arguments of one call of a depthwise microkernel: `count` neighbouring tiles, each of some rows by some columns of
// output pixels, and the channels of one vector. The kernel advances `out` past the last tile and sets `count` to 0.
struct DepthwiseTile {
    const uint8_t* in;            // first input row, at the first column that the tile reads
    int64_t line, pixel;          // bytes between input rows and columns
    const int8_t* weights;        // packed weights of the channels
    const int32_t* bias;          // bias of each channel, including the zero-point term
    const float* factor;          // multiplier of each channel
    uint8_t* out;                 // first output pixel
    int64_t out_pixel, out_line;  // strides between output columns and rows, in bytes
    const struct Limits* limits;
    uint64_t mask;         // bit mask of the channels that are written
    int64_t count;         // number of tiles
    const uint8_t* table;  // u8[256] lookup table, for kernels that look up their results
};

typedef void (*DepthwiseKernel)(struct DepthwiseTile*);

// Release the tile registers of this thread if kernels configured them.
static inline void release_tiles(const struct TileSetup* setup) {
#if defined(__AMX_INT8__)
    if (setup->rows) __asm__ volatile("tilerelease");
#endif
    (void)setup;
}

// Declare a table of kernels, by height or size of a tile, that an object file of the kernel library defines.
#define KERNEL_TABLE(type, name) extern "C" __attribute__((visibility("hidden"))) const type name[]
