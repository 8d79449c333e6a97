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
static inline void depthwise(const struct Depthwise* d, int thread, int threads) {
    enum { CHANNELS = 64 };
    const int64_t groups = (d->out.height + d->rows - 1) / d->rows,
                  tiles = (d->out.width + d->columns - 1) / d->columns;
    const int64_t units_of_image = groups * d->blocks, units = d->out.images * units_of_image;
    if (!tiles) return;
    const int64_t least = d->out.width / tiles, longer = d->out.width % tiles;  // columns; tiles with one more
    const int64_t begin = shard_begin(units, thread, threads), end = shard_begin(units, thread + 1, threads);
    struct DepthwiseTile t = d->tile;
    t.pixel = d->in.pixel, t.line = d->dilation_y * d->in.line;
    const int64_t inner = d->rows_inside ? groups : d->blocks, outer = d->rows_inside ? d->blocks : groups;
    for (int64_t u = begin; u < end; ++u) {
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
            d->table.look_up(at(&d->out, n, row, 0) + channel, d->out.width, d->out.pixel, __builtin_popcountll(t.mask),
                             d->table.entries);
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
};

#if defined(__AVX2__)
enum {
    BLOCK_CHANNELS = 16,  // channels that are computed together
    MOST_TAPS = 64,       // larger kernels run in the loops of `depthwise_plain`
    BLOCK_PIXELS = 32     // pixels whose float32 results are computed before a function reads them
};

// Values of 16 channels: those of channels 0 to 3 and 8 to 11, and those of the others. Byte products are added in this
// order. Of weights, each number is a pair of 16-bit numbers, the weights of two taps.
struct ChannelHalves {
    __m256i low, high;
};

// Return the halves of 16 numbers in two vectors, and the other way round: each function undoes itself.
static inline __m256i low_parts(__m256i a, __m256i b) { return _mm256_permute2x128_si256(a, b, 0x20); }
static inline __m256i high_parts(__m256i a, __m256i b) { return _mm256_permute2x128_si256(a, b, 0x31); }

// Copy the values of up to 16 channels; the others become 0.
static inline void copy_lanes(void* to, const void* from, int64_t lanes, int64_t bytes) {
    memset(to, 0, (size_t)(BLOCK_CHANNELS * bytes));
    memcpy(to, from, (size_t)(lanes * bytes));
}

// Pair the weights of all taps for `lanes` channels from `c` on. An odd last tap is paired with zeros.
static inline void pair_taps(const struct DepthwisePlain* d, int64_t c, int64_t lanes, struct ChannelHalves* pairs) {
    const int64_t taps = d->taps_y * d->taps_x;
    for (int64_t t = 0; t < taps; t += 2) {
        __m256i wide[2];
        for (int64_t i = 0; i < 2; ++i) {
            int8_t some[BLOCK_CHANNELS] = {0};
            if (t + i < taps) memcpy(some, d->weights + (t + i) * d->in.pixel + c, (size_t)lanes);
            wide[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)some));
        }
        pairs[t / 2].low = _mm256_unpacklo_epi16(wide[0], wide[1]);
        pairs[t / 2].high = _mm256_unpackhi_epi16(wide[0], wide[1]);
    }
}

// Add the products of all taps of one output pixel to sums. `taps` are the places of the taps behind `from`.
static inline struct ChannelHalves add_taps(struct ChannelHalves sums, const uint8_t* from, const int64_t* taps,
                                            int64_t count, const struct ChannelHalves* pairs) {
    for (int64_t t = 0; t < count; t += 2) {
        const __m256i a = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(from + taps[t])));
        const __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(from + taps[t + 1])));
        const __m256i low = _mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), pairs[t / 2].low);
        const __m256i high = _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), pairs[t / 2].high);
        sums.low = _mm256_add_epi32(sums.low, low);
        sums.high = _mm256_add_epi32(sums.high, high);
    }
    return sums;
}

// Return sums multiplied by their factors.
static inline __m256 scaled_sums(__m256i sums, __m256i factors) {
    return _mm256_mul_ps(_mm256_cvtepi32_ps(sums), _mm256_castsi256_ps(factors));
}

// Quantize the scaled sums of 16 channels, as the epilogue of a microkernel does.
static inline __m128i quantize_sums(__m256 low, __m256 high, const struct Limits* q) {
    const __m256 least = _mm256_set1_ps(q->convertible_low), most = _mm256_set1_ps(q->convertible_high);
    const __m256i a = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(low, least), most));
    const __m256i b = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(high, least), most));
    const __m256i zero = _mm256_loadu_si256((const __m256i*)q->zero_point16);
    const __m256i words = _mm256_adds_epi16(_mm256_packs_epi32(a, b), zero);
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    const __m128i floor = _mm_loadu_si128((const __m128i*)q->low8), ceiling = _mm_loadu_si128((const __m128i*)q->high8);
    return _mm_min_epu8(_mm_max_epu8(bytes, floor), ceiling);
}

// Compute `lanes` channels from `c` on of line `y` of image `n`. `taps` are the places of the taps behind the first.
static inline void depthwise_lanes(const struct DepthwisePlain* d, int64_t n, int64_t y, int64_t c, int64_t lanes,
                                   const int64_t* taps) {
    struct ChannelHalves pairs[MOST_TAPS / 2], factors, biases;
    float real[BLOCK_PIXELS * BLOCK_CHANNELS] __attribute__((aligned(32)));
    __m256i bias[2], factor[2];
    const int64_t count = d->taps_y * d->taps_x, width = d->out.width, step = d->stride_x * d->in.pixel;
    const int64_t first = (n * d->out.height + y) * width;
    const uint8_t* from = at(&d->in, n, y * d->stride_y - d->top, -d->left) + c;
    const int staged = d->activation.run || d->epilogue.take;
    pair_taps(d, c, lanes, pairs);
    copy_lanes(bias, d->bias + c, lanes, sizeof(int32_t));
    copy_lanes(factor, d->factor + c, lanes, sizeof(float));
    biases.low = low_parts(bias[0], bias[1]), biases.high = high_parts(bias[0], bias[1]);
    factors.low = low_parts(factor[0], factor[1]), factors.high = high_parts(factor[0], factor[1]);
    for (int64_t x = 0; x < width; ++x, from += step) {
        const struct ChannelHalves sums = add_taps(biases, from, taps, count, pairs);
        const __m256 low = scaled_sums(sums.low, factors.low), high = scaled_sums(sums.high, factors.high);
        if (!staged) {
            uint8_t* out = at(&d->out, n, y, x) + c;
            const __m128i bytes = quantize_sums(low, high, d->limits);
            if (lanes == BLOCK_CHANNELS)
                _mm_storeu_si128((__m128i*)out, bytes);
            else
                memcpy(out, &bytes, (size_t)lanes);
            continue;
        }
        const int64_t place = x % BLOCK_PIXELS, pixels = place + 1;
        const __m256i a = _mm256_castps_si256(low), b = _mm256_castps_si256(high);
        _mm256_store_si256((__m256i*)(real + place * BLOCK_CHANNELS), low_parts(a, b));
        _mm256_store_si256((__m256i*)(real + place * BLOCK_CHANNELS + 8), high_parts(a, b));
        if (pixels < BLOCK_PIXELS && x + 1 < width) continue;
        uint8_t* out = at(&d->out, n, y, x - place) + c;
        if (d->activation.run)
            d->activation.run(&d->activation, real, BLOCK_CHANNELS, pixels, out, d->out.pixel, lanes);
        else
            d->epilogue.take(d->epilogue.run, (uint8_t*)real, 4 * BLOCK_CHANNELS, first + x - place, pixels, c, lanes);
    }
    if (d->table.look_up) d->table.look_up(at(&d->out, n, y, 0) + c, width, d->out.pixel, lanes, d->table.entries);
}

// Compute lines of a convolution with up to `MOST_TAPS` taps.
static inline void depthwise_lines(const struct DepthwisePlain* d, int64_t begin, int64_t end) {
    int64_t taps[MOST_TAPS + 1] = {0}, count = 0;
    for (int64_t ky = 0; ky < d->taps_y; ++ky)
        for (int64_t kx = 0; kx < d->taps_x; ++kx)
            taps[count++] = ky * d->dilation_y * d->in.line + kx * d->dilation_x * d->in.pixel;
    for (int64_t r = begin; r < end; ++r)
        for (int64_t c = 0; c < d->in.pixel; c += BLOCK_CHANNELS) {
            const int64_t lanes = d->in.pixel - c < BLOCK_CHANNELS ? d->in.pixel - c : BLOCK_CHANNELS;
            depthwise_lanes(d, r / d->out.height, r % d->out.height, c, lanes, taps);
        }
}
#endif

// Compute this thread's part of the convolution.
static inline void depthwise_plain(const struct DepthwisePlain* d, int thread, int threads) {
    enum { CHANNELS = 64 };
    const int64_t channels = d->in.pixel, lines = d->out.images * d->out.height;
    const struct Limits* q = d->limits;
#if defined(__AVX2__)
    if (d->taps_y * d->taps_x <= MOST_TAPS) {
        depthwise_lines(d, shard_begin(lines, thread, threads), shard_begin(lines, thread + 1, threads));
        return;
    }
#endif
    for (int64_t r = shard_begin(lines, thread, threads); r < shard_begin(lines, thread + 1, threads); ++r) {
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
}
