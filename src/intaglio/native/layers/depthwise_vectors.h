// Depthwise convolutions in 256-bit vectors of 16 channels. Included by layers/depthwise.h, whose `DepthwisePlain`
// they compute.
//
// Inputs and weights are widened to 16 bits. Values of two taps are interleaved, so that one instruction multiplies and
// adds both: those of two rows of a column, or of two columns of the last row if the number of rows is odd. With 3x3
// or 5x5 taps and strides of 1 or 2 a column is widened and interleaved once, and added to every output pixel that
// reads it.

#pragma once

#include "base/intrinsics.h"

enum {
    BLOCK_CHANNELS = 16,     // channels that are computed together
    CACHED_CHANNELS = 64,    // channels of a cache line, which are computed one block after the other
    CACHED_BYTES = 1 << 14,  // of input that stays in the first-level cache meanwhile
    MOST_TAPS = 64,          // larger kernels run in the loops of `depthwise_plain`
    BLOCK_PIXELS = 32        // pixels whose float32 results are computed before a function reads them
};

// Values of 16 channels: those of channels 0 to 3 and 8 to 11, and those of the others. Byte products are added in this
// order. Of weights and inputs, each number is a pair of 16-bit numbers, those of two taps.
struct ChannelHalves {
    __m256i low, high;
};

// Return the halves of 16 numbers in two vectors, and the other way round: each function undoes itself.
static inline __m256i low_parts(__m256i a, __m256i b) { return _mm256_permute2x128_si256(a, b, 0x20); }
static inline __m256i high_parts(__m256i a, __m256i b) { return _mm256_permute2x128_si256(a, b, 0x31); }

// Return 16 inputs of one tap in 16 bits.
static inline __m256i widened_inputs(const uint8_t* from) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from));
}

// Return the pairs of the values of two taps.
static inline struct ChannelHalves paired(__m256i a, __m256i b) {
    const struct ChannelHalves pairs = {_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b)};
    return pairs;
}

// Add the products of pairs of inputs and pairs of weights to sums.
static inline void add_products(struct ChannelHalves* sums, struct ChannelHalves inputs, struct ChannelHalves weights) {
    sums->low = _mm256_add_epi32(sums->low, _mm256_madd_epi16(inputs.low, weights.low));
    sums->high = _mm256_add_epi32(sums->high, _mm256_madd_epi16(inputs.high, weights.high));
}

// Channels of a layer that are computed together: `lanes` of them from `channel` on, with their biases and factors.
struct ChannelBlock {
    int64_t channel, lanes;
    struct ChannelHalves biases, factors;
};

// Return 16 values of which `lanes` are in memory; the others are 0.
static inline struct ChannelHalves channel_values(const void* from, int64_t lanes) {
    __m256i values[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    memcpy(values, from, (size_t)(4 * lanes));
    const struct ChannelHalves halves = {low_parts(values[0], values[1]), high_parts(values[0], values[1])};
    return halves;
}

// Return the block of channels that begins with `channel`.
static inline struct ChannelBlock channel_block(const struct DepthwisePlain* d, int64_t channel) {
    struct ChannelBlock block;
    const int64_t left = d->in.pixel - channel;
    block.channel = channel, block.lanes = left < BLOCK_CHANNELS ? left : BLOCK_CHANNELS;
    block.biases = channel_values(d->bias + channel, block.lanes);
    block.factors = channel_values(d->factor + channel, block.lanes);
    return block;
}

// Return the weights of a block of channels for a tap in 16 bits, or zeros for a tap outside of the kernel.
static inline __m256i tap_weights(const struct DepthwisePlain* d, const struct ChannelBlock* block, int64_t y,
                                  int64_t x) {
    int8_t some[BLOCK_CHANNELS] = {0};
    if (y >= 0 && y < d->taps_y && x >= 0 && x < d->taps_x)
        memcpy(some, d->weights + (y * d->taps_x + x) * d->in.pixel + block->channel, (size_t)block->lanes);
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)some));
}

// Return sums multiplied by their factors.
static inline __m256 scaled_sums(__m256i sums, __m256i factors) {
    return _mm256_mul_ps(_mm256_cvtepi32_ps(sums), _mm256_castsi256_ps(factors));
}

// Return scaled sums as integers. `CLAMPS`: they may be outside of the range of integers.
template <int CLAMPS>
static inline __m256i rounded(__m256 scaled, const struct Limits* q) {
    const __m256 least = _mm256_set1_ps(q->convertible_low), most = _mm256_set1_ps(q->convertible_high);
    return _mm256_cvtps_epi32(CLAMPS ? _mm256_min_ps(_mm256_max_ps(scaled, least), most) : scaled);
}

// Return the quantized values of a pixel in 16 bits, as the epilogue of a microkernel does.
template <int CLAMPS>
static inline __m256i quantized_words(struct ChannelHalves sums, const struct ChannelHalves* factors,
                                      const struct Limits* q) {
    const __m256i low = rounded<CLAMPS>(scaled_sums(sums.low, factors->low), q);
    const __m256i high = rounded<CLAMPS>(scaled_sums(sums.high, factors->high), q);
    return _mm256_adds_epi16(_mm256_packs_epi32(low, high), _mm256_loadu_si256((const __m256i*)q->zero_point16));
}

// Return the values of two pixels as bytes between their limits, those of the first pixel in the lower half.
static inline __m256i quantized_bytes(__m256i first, __m256i second, const struct Limits* q) {
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(first, second), 0xd8);
    const __m256i floor = _mm256_loadu_si256((const __m256i*)q->low8);
    return _mm256_min_epu8(_mm256_max_epu8(bytes, floor), _mm256_loadu_si256((const __m256i*)q->high8));
}

// Store the values of a pixel.
static inline void store_bytes(__m128i bytes, uint8_t* out, int64_t lanes) {
    if (lanes == BLOCK_CHANNELS)
        _mm_storeu_si128((__m128i*)out, bytes);
    else if (lanes == BLOCK_CHANNELS / 2)
        _mm_storel_epi64((__m128i*)out, bytes);
    else
        memcpy(out, &bytes, (size_t)lanes);
}

// Quantize a line. `next` returns the sums of the next output pixel. Three pairs of pixels are computed together: sums
// of one, 16-bit values of the pair before, and bytes of the pair before that, none of which waits for another.
template <typename Pixels>
static inline void quantized_line(const struct DepthwisePlain* d, const struct ChannelBlock* block, uint8_t* out,
                                  Pixels* pixels) {
    const int64_t step = d->out.pixel, width = d->out.width, pairs = (width + 1) / 2;
    struct ChannelHalves sums[2] = {block->biases, block->biases};
    __m256i words[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (int64_t i = 0; i < pairs + 2; ++i) {
        if (i > 1) {
            const __m256i bytes = quantized_bytes(words[0], words[1], d->limits);
            store_bytes(_mm256_castsi256_si128(bytes), out, block->lanes);
            if (2 * i - 3 < width) store_bytes(_mm256_extracti128_si256(bytes, 1), out + step, block->lanes);
            out += 2 * step;
        }
        for (int k = 0; k < 2; ++k) words[k] = quantized_words<Pixels::CLAMPS>(sums[k], &block->factors, d->limits);
        if (i < pairs) sums[0] = pixels->next();
        if (2 * i + 1 < width) sums[1] = pixels->next();
    }
}

// Compute float32 results of a line, of which a function reads those of some pixels at a time. `first` is the number of
// the line's first pixel, counted through all images.
template <typename Pixels>
static inline void float_line(const struct DepthwisePlain* d, const struct ChannelBlock* block, uint8_t* out,
                              int64_t first, Pixels* pixels) {
    float real[BLOCK_PIXELS * BLOCK_CHANNELS] __attribute__((aligned(32)));
    for (int64_t x = 0; x < d->out.width; x += BLOCK_PIXELS) {
        const int64_t left = d->out.width - x, count = left < BLOCK_PIXELS ? left : BLOCK_PIXELS;
        for (int64_t i = 0; i < count; ++i) {
            const struct ChannelHalves sums = pixels->next();
            const __m256i low = _mm256_castps_si256(scaled_sums(sums.low, block->factors.low));
            const __m256i high = _mm256_castps_si256(scaled_sums(sums.high, block->factors.high));
            _mm256_store_si256((__m256i*)(real + i * BLOCK_CHANNELS), low_parts(low, high));
            _mm256_store_si256((__m256i*)(real + i * BLOCK_CHANNELS + 8), high_parts(low, high));
        }
        if (d->activation.run)
            d->activation.run(&d->activation, real, BLOCK_CHANNELS, count, out + x * d->out.pixel, d->out.pixel,
                              block->lanes);
        else
            d->epilogue.take(d->epilogue.run, (uint8_t*)real, 4 * BLOCK_CHANNELS, first + x, count, block->channel,
                             block->lanes);
    }
}

// Compute a block of channels of line `y` of image `n`.
template <typename Pixels>
static inline void depthwise_line(const struct DepthwisePlain* d, const struct ChannelBlock* block, int64_t n,
                                  int64_t y, Pixels* pixels) {
    uint8_t* out = at(&d->out, n, y, 0) + block->channel;
    pixels->begin(at(&d->in, n, y * d->stride_y - d->top, -d->left) + block->channel);
    if (d->activation.run || d->epilogue.take)
        float_line(d, block, out, (n * d->out.height + y) * d->out.width, pixels);
    else
        quantized_line(d, block, out, pixels);
    if (d->table.look_up) d->table.look_up(out, d->out.width, d->out.pixel, block->lanes, d->table.entries);
}

// Sums of neighbouring output pixels for up to `MOST_TAPS` taps with any strides and dilations.
struct PixelsOfTaps {
    enum { CLAMPS = 1 };            // see `rounded`
    int64_t count, step;            // taps; bytes between output pixels
    int64_t places[MOST_TAPS + 1];  // of the taps behind the first one; an odd last tap is paired with any place
    struct ChannelHalves weights[MOST_TAPS / 2], biases;
    const uint8_t* from;

    explicit PixelsOfTaps(const struct DepthwisePlain* d) : count(0), step(d->stride_x * d->in.pixel), from(0) {
        for (int64_t y = 0; y < d->taps_y; ++y)
            for (int64_t x = 0; x < d->taps_x; ++x)
                places[count++] = y * d->dilation_y * d->in.line + x * d->dilation_x * d->in.pixel;
        places[count] = 0;
    }

    // Take the weights and biases of a block of channels.
    void take(const struct DepthwisePlain* d, const struct ChannelBlock* block) {
        biases = block->biases;
        for (int64_t t = 0; t < count; t += 2)
            weights[t / 2] = paired(tap_weights(d, block, t / d->taps_x, t % d->taps_x),
                                    tap_weights(d, block, (t + 1) / d->taps_x, (t + 1) % d->taps_x));
    }

    // Begin with a line whose first pixel has its first tap at `start`.
    void begin(const uint8_t* start) { from = start; }

    struct ChannelHalves next() {
        struct ChannelHalves sums = biases;
        for (int64_t t = 0; t < count; t += 2)
            add_products(&sums, paired(widened_inputs(from + places[t]), widened_inputs(from + places[t + 1])),
                         weights[t / 2]);
        from += step;
        return sums;
    }
};

// Sums of neighbouring output pixels of a kernel of a fixed size, `STRIDE` columns apart. Input columns come one after
// the other; each is added to all pixels that read it. The sums of the oldest of these are complete then.
template <int TAPS_Y, int TAPS_X, int STRIDE, int CLAMPS_FLOAT>
struct PixelsOfColumns {
    static_assert(TAPS_X % 2 && (STRIDE == 1 || STRIDE == 2), "the first column of a pixel completes an older one");
    enum { ROWS = TAPS_Y / 2, OLDEST = (TAPS_X - 1) / STRIDE, CLAMPS = CLAMPS_FLOAT };

    const uint8_t* column;                           // the next input column
    int64_t line, pixel;                             // bytes between rows of taps, and between input columns
    struct ChannelHalves weights[ROWS + 1][TAPS_X];  // of two rows of taps
    struct ChannelHalves last_weights[OLDEST + 1];   // of two columns of the last row of taps, by the age of pixels
    struct ChannelHalves biases, sums[OLDEST + 1];   // of the pixels that read a column, the newest first
    __m256i before;                                  // the last row of taps of the column before

    explicit PixelsOfColumns(const struct DepthwisePlain* d)
        : column(0), line(d->dilation_y * d->in.line), pixel(d->in.pixel) {}

    void take(const struct DepthwisePlain* d, const struct ChannelBlock* block) {
        biases = block->biases;
        for (int64_t y = 0; y < ROWS; ++y)
            for (int64_t x = 0; x < TAPS_X; ++x)
                weights[y][x] = paired(tap_weights(d, block, 2 * y, x), tap_weights(d, block, 2 * y + 1, x));
        for (int64_t age = 0; TAPS_Y % 2 && age <= OLDEST; ++age)
            last_weights[age] = paired(tap_weights(d, block, TAPS_Y - 1, age * STRIDE - 1),
                                       tap_weights(d, block, TAPS_Y - 1, age * STRIDE));
    }

    // Add the next column to all pixels that read it. It is `behind` columns before the first one of the newest pixel.
    __attribute__((always_inline)) void add_column(int behind) {
        for (int y = 0; y < ROWS; ++y) {
            const uint8_t* from = column + 2 * y * line;
            const struct ChannelHalves pairs = paired(widened_inputs(from), widened_inputs(from + line));
            for (int age = 0; age <= OLDEST; ++age)
                if (age * STRIDE >= behind) add_products(&sums[age], pairs, weights[y][age * STRIDE - behind]);
        }
        if (TAPS_Y % 2) {
            const __m256i last = widened_inputs(column + (TAPS_Y - 1) * line);
            for (int age = 0; age <= OLDEST; ++age)
                if (!behind && age * STRIDE % 2 == 0) add_products(&sums[age], paired(before, last), last_weights[age]);
            before = last;
        }
        column += pixel;
    }

    // Read the columns up to the first one of the next pixel.
    __attribute__((always_inline)) void advance(int columns) {
        for (int age = OLDEST; age > 0; --age) sums[age] = sums[age - 1];
        sums[0] = biases;
        for (int behind = columns - 1; behind >= 0; --behind) add_column(behind);
    }

    void begin(const uint8_t* start) {
        column = start;
        before = _mm256_setzero_si256();
        for (int age = 0; age < OLDEST; ++age) sums[age] = biases;
        advance(1);
        for (int age = 1; age < OLDEST; ++age) advance(STRIDE);
    }

    __attribute__((always_inline)) struct ChannelHalves next() {
        advance(STRIDE);
        return sums[OLDEST];
    }
};

// Compute this thread's part of a convolution. Lines are computed in bands, and all blocks of channels of a cache line
// before the next ones, so that the input stays in the first-level cache.
template <typename Pixels>
static inline void depthwise_lines(const struct DepthwisePlain* d, int thread, int threads) {
    const int64_t lines = d->out.images * d->out.height;
    const int64_t line_bytes = d->in.width * CACHED_CHANNELS * d->stride_y, fitting = CACHED_BYTES / line_bytes,
                  band = fitting > 1 ? fitting : 1;
    Pixels pixels(d);
    struct Sharing s = enter_lines(d, thread, threads);
    while (next_piece(&s)) {
        const int64_t end = first_item(&s, lines, 1);
        for (int64_t first = first_item(&s, lines, 0); first < end; first += band)
            for (int64_t c = 0; c < d->in.pixel; c += BLOCK_CHANNELS) {
                const struct ChannelBlock block = channel_block(d, c);
                pixels.take(d, &block);
                for (int64_t r = first; r < end && r < first + band; ++r)
                    depthwise_line(d, &block, r / d->out.height, r % d->out.height, &pixels);
            }
    }
}
