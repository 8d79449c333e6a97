// Compare microkernels of an instruction set with those in plain C++ on random tiles. The tables are in `pairs`, which
// the test writes: name, its kernels, those of plain C++, heights, and whether results are floats.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "products/tile.h"

struct Pair {
    const char* name;
    const TileKernel *found, *expected;
    int rows, item;
};
#include "pairs.h"

static uint32_t state = 1;
static uint32_t draw(uint32_t below) {
    state = state * 1664525u + 1013904223u;
    return (state >> 8) % below;
}

enum { SIZE = 1 << 16 };
static uint8_t a[SIZE], residual[SIZE], rests[SIZE], out[2][SIZE], remainders[2][SIZE];
static int8_t b[SIZE];
static int32_t bias[16];
static float factor[16], residual_factor[16], row_scale[32], row_bias[16];

static int differs(const Pair& pair, int rows) {
    struct Limits limits = {};
    struct Tile tile = {};
    const int pixel = 256 + int(draw(64)), steps = 1 + int(draw(9));
    for (int i = 0; i < SIZE; ++i) a[i] = uint8_t(draw(256)), b[i] = int8_t(int(draw(256)) - 128);
    for (int i = 0; i < SIZE; ++i) residual[i] = uint8_t(draw(256)), rests[i] = uint8_t(draw(255));
    for (int i = 0; i < 16; ++i) {
        bias[i] = int32_t(draw(200000)) - 100000;
        factor[i] = float(1 + draw(1000)) * 1e-6f * (draw(8) ? 1.0f : 1e12f);
        residual_factor[i] = float(1 + draw(1000)) * 1e-3f;
        row_bias[i] = float(draw(1000)) - 500.0f;
    }
    for (float& scale : row_scale) scale = float(1 + draw(1000)) * 1e-3f;
    const int wide = strstr(pair.name, "_rest") != 0;
    limits.zero_point = int32_t(draw(wide ? 65026 : 256)), limits.other_zero_point = int32_t(draw(256));
    limits.low = int32_t(draw(100)), limits.high = (wide ? 65025 : 255) - int32_t(draw(100));
    tile.a_pixel = pixel, tile.tap_rows = 1 + draw(3), tile.a_row = 4 * pixel, tile.taps = 1 + draw(3);
    tile.a_tap = draw(2) ? pixel : 4 * steps, tile.run = steps, tile.bias = bias, tile.factor = factor;
    tile.out_pixel = 16 * pair.item + 4 * draw(9), tile.residual_pixel = 16 + draw(9);
    tile.residual_factor = residual_factor, tile.limits = &limits, tile.remainder_pixel = 16 + draw(9);
    tile.residual_remainder_pixel = 16 + draw(9), tile.mask = draw(3) ? 0xffff : (1 << (1 + draw(15))) - 1;
    memset(out, 7, sizeof out), memset(remainders, 7, sizeof remainders);
    for (int side = 0; side < 2; ++side) {
        struct Tile own = tile;
        own.a = a, own.b = b, own.out = out[side], own.residual = residual, own.remainder = remainders[side];
        own.residual_remainder = rests, own.row_scale = row_scale, own.row_bias = row_bias;
        own.count = 1 + (tile.mask & 1) * 2;
        (side ? pair.expected : pair.found)[rows](&own);
        if (own.count) return 1;
    }
    return memcmp(out[0], out[1], SIZE) || memcmp(remainders[0], remainders[1], SIZE);
}

int main() {
    int compared = 0, different = 0;
    for (const Pair& pair : pairs)
        for (int rows = 1; rows <= pair.rows; ++rows)
            for (int i = 0; i < 20; ++i, ++compared)
                if (differs(pair, rows)) {
                    if (!different++) printf("%s, %d rows, example %d\n", pair.name, rows, i);
                }
    printf("%d of %d differ\n", different, compared);
    return different != 0;
}
