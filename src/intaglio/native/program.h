// What every generated program is made of: images in memory, loops over tiles, pooling, moves, borders.
// Geometry is data here; channels, taps and tiles arrive as constants from the generated text, which the compiler sees.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <time.h>

#include "functions.h"
#include "numerics.h"
#include "pool.h"

// One call of the program: free dimensions, where buffers lie, constants, the caller's tensors with their strides
// (in elements; batch, channel, row, column).
struct Run {
    const int64_t* dims;
    const int64_t* offsets;
    uint8_t* arena;
    const uint8_t* constants;
    uint8_t* const* external;
    const int64_t* strides;
    struct IntaglioBarrier* barrier;
    const uint8_t* bytes;      // which of them hold levels, where the program takes floats too
    int64_t* times;            // nanoseconds by step, then the last reading of the clock; null when nobody asks
    int32_t* outside;          // becomes 1 where an id is none of a table's rows
};

// After a step, when times are asked for: all threads meet, the first reads the clock. Step -1 starts it.
static inline void time_step(const struct Run* r, int64_t step, int64_t steps, int thread, int threads) {
    struct timespec now;
    if (!r->times) return;
    intaglio_barrier_wait(r->barrier, threads);
    if (thread) return;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const int64_t nanoseconds = now.tv_sec * 1000000000 + now.tv_nsec;
    if (step >= 0) r->times[step] += nanoseconds - r->times[steps];
    r->times[steps] = nanoseconds;
}

// Images `first` to `first + count` of a batch. What steps leave for each other in a turn lies in the `slot`-th of equal parts of
// memory, or with `spread` over so many of them.
struct Part { int64_t first, count, slot, spread; };

typedef void (*TakeTurn)(const struct Run*, const struct Part*, int thread, int threads);

// Turns of `each` images whose memory the arena has: one for every core, if there are so many.
static inline int64_t turns_at_once(int64_t batch, int64_t each) {
    const int64_t turns = (batch + each - 1) / each, cores = intaglio_cores();
    return turns < cores ? turns : cores;
}

// Threads take turns of their own, and none waits, as long as there is one for all of them; the rest they take together.
static inline void take_turns(const struct Run* r, TakeTurn take, int64_t batch, int64_t each, int thread, int threads) {
    const int64_t slots = turns_at_once(batch, each), own = threads <= slots ? batch / (each * threads) : 0;
    for (int64_t i = 0; i < own; ++i) {
        const struct Part part = {(thread * own + i) * each, each, thread, 1};
        take(r, &part, 0, 1);
    }
    if (own) intaglio_barrier_wait(r->barrier, threads);
    for (int64_t first = threads * own * each; first < batch; first += slots * each) {
        const struct Part part = {first, batch - first < slots * each ? batch - first : slots * each, 0, slots};
        take(r, &part, thread, threads);
    }
}

// An NHWC tensor; `base` is the first pixel inside the halo, `pixel` the bytes of one pixel.
struct Image {
    uint8_t* base;
    int64_t images, height, width, pixel, halo_y, halo_x, line, image;
};

static inline struct Image image(uint8_t* start, int64_t images, int64_t height, int64_t width, int64_t pixel, int64_t halo_y,
                                 int64_t halo_x) {
    struct Image i = {start, images, height, width, pixel, halo_y, halo_x, (width + 2 * halo_x) * pixel, 0};
    i.image = (height + 2 * halo_y) * i.line;
    i.base += halo_y * i.line + halo_x * pixel;
    return i;
}

// Some channels of an image, from the first; pixels stay as far apart.
static inline struct Image channels_from(struct Image i, int64_t first) {
    i.base += first;
    return i;
}

// Some rows and columns of an image as an image of its own: from the first, one in `step`.
static inline struct Image every(struct Image i, int64_t first_y, int64_t step_y, int64_t height, int64_t first_x, int64_t step_x,
                                 int64_t width) {
    i.base += first_y * i.line + first_x * i.pixel;
    i.line *= step_y, i.pixel *= step_x;
    i.height = height, i.width = width;
    return i;
}

static inline uint8_t* at(const struct Image* i, int64_t n, int64_t y, int64_t x) {
    return i->base + n * i->image + y * i->line + x * i->pixel;
}

static inline int64_t share(int64_t total, int thread, int threads) { return total * thread / threads; }

// Pixels that are all alike; `bytes` are a whole number of them.
static inline void fill_pixels(uint8_t* to, const uint8_t* pixel, int64_t channels, int64_t bytes) {
    if (bytes) memcpy(to, pixel, (size_t)channels);
    for (int64_t done = channels; done < bytes; done *= 2)
        memcpy(to + done, to, (size_t)(done < bytes - done ? done : bytes - done));
}

// This thread's part of the frame around each image gets the zero point of every channel.
static inline void fill_halo_pixels(const struct Image* i, const uint8_t* pixel, int thread, int threads) {
    const int64_t rows = i->height + 2 * i->halo_y, side = i->halo_x * i->pixel;
    for (int64_t r = share(i->images * rows, thread, threads); r < share(i->images * rows, thread + 1, threads); ++r) {
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

// This thread's part of the frame around each image gets the zero point.
static inline void fill_halo(const struct Image* i, uint8_t level, int thread, int threads) {
    const int64_t rows = i->height + 2 * i->halo_y, side = i->halo_x * i->pixel;
    for (int64_t r = share(i->images * rows, thread, threads); r < share(i->images * rows, thread + 1, threads); ++r) {
        const int64_t y = r % rows - i->halo_y;
        uint8_t* line = at(i, r / rows, y, -i->halo_x);
        if (y < 0 || y >= i->height) {
            memset(line, level, (size_t)i->line);
        } else {
            memset(line, level, (size_t)side);
            memset(line + i->line - side, level, (size_t)side);
        }
    }
}

// Bounds and zero points of a requantization, in the widths kernels want them. Of results that keep a rest they have 16 bits.
struct Limits {
    uint16_t zero_point16[32];
    uint8_t low8[64], high8[64];
    uint16_t low16[32], high16[32];
    int32_t zero_point, low, high, other_zero_point;
    float convertible_low, convertible_high;
};

// -- tables -------------------------------------------------------------------------------------------------------------

// Whether kernels that look up levels run here.
static inline int has_vbmi(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512vbmi");
#else
    return 0;
#endif
}

static inline void look_up_pixels(const uint8_t* from, uint8_t* to, int64_t pixels, int64_t apart, int64_t channels, const uint8_t* table);

// Levels of some channels of pixels `apart` from each other -> what the table has for them, in place.
static inline void look_up_here(uint8_t* at, int64_t pixels, int64_t apart, int64_t channels, const uint8_t* table) {
    if (channels == apart) channels *= pixels, pixels = 1;
    look_up_pixels(at, at, pixels, apart, channels, table);
}

// -- functions ----------------------------------------------------------------------------------------------------------

// A function of results in float, before they become levels: clamp(rne((f(x) * gain) * inverse) + zero_point, low, high).
struct Activation {
    // Channels of pixels that lie `from_pixel` floats and `to_pixel` bytes apart; floats up to a multiple of 16 are read.
    void (*levels)(const struct Activation* a, const float* from, int64_t from_pixel, int64_t pixels, uint8_t* to, int64_t to_pixel, int64_t channels);
    float inverse, slope;
    const struct Limits* limits;
    const float* gain;         // of each channel; null when all are 1
};

// 16 levels, each in 32 bits -> in 8 bits.
static inline void narrow16(const RealBits* words, uint8_t* levels) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)words[0], (__m256i)words[1]), 0xd8);
    _mm_storeu_si128((__m128i*)levels, _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
#else
    typedef uint8_t Bytes __attribute__((vector_size(FLOATS)));
    for (int i = 0; i < 16 / FLOATS; ++i) {
        const Bytes bytes = __builtin_convertvector(words[i], Bytes);
        memcpy(levels + i * FLOATS, &bytes, sizeof bytes);
    }
#endif
}

// Of `COUNT` vectors of results, their levels. Bounds are whole steps, so it does not matter that they are taken before
// rounding.
template <int COUNT>
static inline __attribute__((always_inline)) void levels_of(const struct Activation* a, Reals* x, const float* gain, RealBits* words) {
    const struct Limits* q = a->limits;
    const float inverse = a->inverse, least = (float)(q->low - q->zero_point), most = (float)(q->high - q->zero_point);
    if (gain)
        EACH {
            Reals own;
            memcpy(&own, gain + i * FLOATS, sizeof own);
            x[i] = x[i] * own;
        }
    EACH x[i] = least_of(most_of(x[i] * inverse, least), most);
    EACH words[i] = whole(shifted(x[i])) + q->zero_point;
}

// Channels of some pixels, 64 at a time as long as there are so many.
template <class Function>
static inline __attribute__((always_inline)) void function_levels(const struct Activation* a, const float* from, int64_t from_pixel, int64_t pixels, uint8_t* to, int64_t to_pixel, int64_t channels) {
    enum { ONE = 16 / FLOATS, FOUR = 64 / FLOATS };
    for (int64_t p = 0; p < pixels; ++p, from += from_pixel, to += to_pixel) {
        int64_t c = 0;
        for (; c + 64 <= channels; c += 64) {
            Reals x[FOUR];
            RealBits words[FOUR];
            memcpy(x, from + c, sizeof x);
            Function::template run<FOUR>(a, x);
            levels_of<FOUR>(a, x, a->gain ? a->gain + c : 0, words);
            for (int i = 0; i < 4; ++i) narrow16(words + i * ONE, to + c + 16 * i);
        }
        for (; c < channels; c += 16) {
            Reals x[ONE];
            RealBits words[ONE];
            uint8_t level[16];
            memcpy(x, from + c, sizeof x);
            Function::template run<ONE>(a, x);
            levels_of<ONE>(a, x, a->gain ? a->gain + c : 0, words);
            narrow16(words, level);
            memcpy(to + c, level, c + 16 <= channels ? 16 : (size_t)(channels - c));
        }
    }
}

#define ACTIVATION(name, run_all) \
    struct name##_function { \
        template <int COUNT> \
        static inline __attribute__((always_inline)) void run(const struct Activation* a, Reals* x) { (void)a; run_all; } \
    }; \
    static inline void name##_levels(const struct Activation* a, const float* from, int64_t from_pixel, int64_t pixels, uint8_t* to, int64_t to_pixel, int64_t channels) { \
        function_levels<name##_function>(a, from, from_pixel, pixels, to, to_pixel, channels); \
    }
ACTIVATION(leaky_relu, EACH x[i] = leaky_relu(x[i], a->slope))
ACTIVATION(hardsigmoid, EACH x[i] = hardsigmoid(x[i]))
ACTIVATION(hardswish, EACH x[i] = hardswish(x[i]))
ACTIVATION(sigmoid, EACH x[i] = sigmoid(x[i]))
ACTIVATION(silu, EACH x[i] = silu(x[i]))
ACTIVATION(tanh, EACH x[i] = hyperbolic_tangent(x[i]))
ACTIVATION(gelu, near_gelus<COUNT>(x))
ACTIVATION(gelu_tanh, EACH x[i] = gelu_tanh(x[i]))
#undef ACTIVATION

#include "rows.h"

// -- epilogues ----------------------------------------------------------------------------------------------------------

// What reads results while they lie in the first-level cache, floats or levels: some channels of pixels `apart` bytes from
// each other. Pixels are counted through all images; where the results of this lie it knows itself.
struct Epilogue {
    void (*take)(const struct Run* r, const uint8_t* tile, int64_t apart, int64_t pixel, int64_t pixels, int64_t channel, int64_t channels);
    const struct Run* run;
    int64_t bytes;             // of an element it reads
};

// -- matrix products ------------------------------------------------------------------------------------------------------

// One call of a microkernel: `count` tiles side by side, each of `rows` output pixels by blocks of 16 channels. Strides in
// bytes; `run` in 4-byte steps. A kernel leaves `a`, `out`, `other` and rests behind its last tile, and `count` 0. `ahead` is its own.
struct Tile {
    const uint8_t* a;          // first tap of the first pixel
    int64_t a_pixel;           // to the next output pixel's first tap
    const int8_t* b;           // packed weights: [tap row][tap][run][16 * blocks][4]
    int64_t tap_rows, a_row;   // rows of taps, and how far apart they are
    int64_t taps, a_tap;       // taps in a row
    int64_t run;
    const int32_t* bias;       // zero-point term folded in
    const float* factor;
    uint8_t* out;
    int64_t out_pixel;
    const uint8_t* other;      // residual operand
    int64_t other_pixel;
    const float* other_factor;
    const struct Limits* limits;
    int64_t mask;              // channels of the panel
    int64_t count;
    int64_t ahead;             // from weights to those that are needed next, which a kernel may prefetch
    const uint8_t* table;      // of results, for kernels that look them up
    uint8_t* rest;             // of results of 16 bits, beside their levels
    int64_t rest_pixel;
    const uint8_t* other_rest; // of a residual operand of 16 bits
    int64_t other_rest_pixel;
};

typedef void (*TileKernel)(struct Tile*);

// A convolution or linear layer over one pair of images.
struct Matmul {
    struct Image in, out, other, rest, other_rest;
    int64_t stride_y, stride_x, top, left;
    struct Tile tile;                      // everything that does not change from call to call
    int64_t panels, blocks, panel_bytes, out_bytes;
    const int32_t* first_channel;          // per panel, of the input; null when it is always 0
    int64_t flat;                          // every output pixel's taps follow the last one's
    int64_t rows;                          // tallest tile
    int64_t mask, last_mask;               // channels of a full panel, and of the last one
    const TileKernel* kernels;             // by tile height, full panels
    const TileKernel* last_kernels;        // by tile height, the last panel
    int64_t split_channels_below;          // fewer output pixels than this: threads share panels, not pixels
    int64_t chunk_bytes;                   // input that stays in cache while all panels pass over it
    const uint8_t* table;                  // of results, for kernels that do not look them up; or null
    struct Activation activation;          // of results in float; `levels` may be null
    struct ByRow by_row;                   // of accumulators as floats, in flat products; `scales` may be null
    struct Epilogue epilogue;              // `take` may be null; then `out` has sizes only
};

// Bytes of results that are looked up, or taken as floats, while they lie in the first-level cache; of a tile at most.
enum { WARM = 8192, TILE_BYTES = 2048 };

// Tiles first..last of one panel. Heights are nearly equal, so no tile is a thin rest.
static __attribute__((noinline)) void matmul_span(const struct Matmul* m, int64_t panel, int64_t first, int64_t last, int64_t tiles, int64_t width) {
    struct Tile t = m->tile;
    const int last_panel = panel == m->panels - 1;
    const TileKernel* kernels = last_panel ? m->last_kernels : m->kernels;
    const int64_t channel = panel * m->blocks * 16;
    const int64_t offset = m->first_channel ? m->first_channel[panel] : 0;
    t.b += panel * m->panel_bytes, t.ahead = m->panel_bytes;
    t.bias += channel;
    t.factor += channel;
    if (t.other_factor) t.other_factor += channel;
    t.mask = last_panel ? m->last_mask : m->mask;
    const int32_t least = (int32_t)(width / tiles), longer = (int32_t)(width % tiles), per_image = (int32_t)m->out.height;
    const int64_t channels = __builtin_popcountll((unsigned long long)t.mask), out_pixel = t.out_pixel;
    struct Activation own = m->activation;
    const struct Activation* activation = own.levels ? &own : 0;
    if (own.gain) own.gain += channel;
    float real[(WARM + TILE_BYTES) / sizeof(float)] __attribute__((aligned(64)));
    if (activation) {
        t.out_pixel = (channels + 15) / 16 * 64;
        if (channels % 16) memset(real, 0, sizeof real);  // a kernel leaves lanes behind the last channel as they are
    }
    const struct Epilogue* epilogue = m->epilogue.take ? &m->epilogue : 0;
    uint8_t levels[WARM + TILE_BYTES] __attribute__((aligned(64)));
    if (epilogue && !activation) t.out_pixel = (channels + 15) / 16 * 16 * epilogue->bytes;
    uint8_t* const warmed = activation ? levels : (uint8_t*)real;
    const int64_t warmed_pixel = activation ? (channels + 15) / 16 * 16 : t.out_pixel;
    const int32_t warm = (int32_t)(WARM / (m->rows * t.out_pixel)) + 1;
    const int staged = m->table || activation || epilogue || m->by_row.scales;
    int32_t line = (int32_t)(first / tiles), i = (int32_t)(first % tiles);
    for (int64_t done = first; done < last;) {
        const int64_t n = m->flat ? 0 : line / per_image, y = m->flat ? 0 : line % per_image;
        const uint8_t* a = at(&m->in, n, y * m->stride_y - m->top, -m->left) + offset;
        uint8_t* out = at(&m->out, n, y, 0) + channel * m->out_bytes;
        const uint8_t* other = m->other.base ? at(&m->other, n, y, 0) + channel : 0;
        const int64_t x = (int64_t)i * least + (i < longer ? i : longer);
        t.a = a + x * t.a_pixel;
        int64_t pixel = line * width + x;
        t.out = out + x * out_pixel;
        t.other = other + x * t.other_pixel;
        if (m->rest.base) t.rest = at(&m->rest, n, y, 0) + channel + x * t.rest_pixel;
        if (m->other_rest.base) t.other_rest = at(&m->other_rest, n, y, 0) + channel + x * t.other_rest_pixel;
        while (i < tiles && done < last) {
            const int32_t equal = (i < longer ? longer : (int32_t)tiles) - i;
            const int32_t left = done + equal < last ? equal : (int32_t)(last - done);
            const int32_t height = least + (i < longer), count = staged && left > warm ? warm : left;
            uint8_t* first_pixel = t.out;
            t.count = count;
            if (activation || epilogue) t.out = (uint8_t*)real;
            kernels[height](&t);
            if (activation || epilogue) t.out = first_pixel + height * count * out_pixel;
            if (epilogue) first_pixel = warmed;
            const int64_t apart = epilogue ? warmed_pixel : out_pixel;
            if (activation) activation->levels(activation, real, t.out_pixel / 4, height * count, first_pixel, apart, channels);
            if (m->by_row.scales) dequantize_rows(&m->by_row, (float*)first_pixel, apart / 4, pixel, height * count, channel, channels);
            if (m->table) look_up_here(first_pixel, height * count, apart, channels, m->table);
            if (epilogue) epilogue->take(epilogue->run, warmed, warmed_pixel, pixel, height * count, channel, channels);
            pixel += height * count;
            i += count, done += count;
        }
        i = 0;
        ++line;
    }
}

// The tile, counted through all panels, at which a thread's share begins; tiles of a narrow last panel weigh less.
static inline int64_t first_unit(const struct Matmul* m, int64_t tiles, int thread, int threads) {
    const int64_t narrow = (__builtin_popcountll((unsigned long long)m->last_mask) + 15) / 16, wide = (m->panels - 1) * tiles;
    const int64_t at = share(wide * m->blocks + tiles * narrow, thread, threads);
    return at < wide * m->blocks ? at / m->blocks : wide + (at - wide * m->blocks) / narrow;
}

static __attribute__((noinline)) void matmul(const struct Matmul* m, int thread, int threads) {
    const int64_t pixels = m->out.images * m->out.height * m->out.width;
    const int64_t lines = m->flat ? 1 : m->out.images * m->out.height, width = m->flat ? pixels : m->out.width;
    if (!pixels) return;
    const int64_t tiles = (width + m->rows - 1) / m->rows, total = lines * tiles;
    if (pixels < m->split_channels_below || total < threads) {
        const int64_t last = first_unit(m, total, thread + 1, threads);
        for (int64_t unit = first_unit(m, total, thread, threads); unit < last;) {
            const int64_t panel = unit / total, begin = unit % total;
            const int64_t end = begin + (last - unit) < total ? begin + (last - unit) : total;
            matmul_span(m, panel, begin, end, tiles, width);
            unit += end - begin;
        }
        return;
    }
    const int64_t first = share(total, thread, threads), last = share(total, thread + 1, threads);
    const int64_t bytes = (width + tiles - 1) / tiles * m->tile.a_pixel * m->stride_y;
    const int64_t chunk = m->chunk_bytes / bytes > 1 ? m->chunk_bytes / bytes : 1;
    for (int64_t begin = first; begin < last; begin += chunk) {
        const int64_t end = begin + chunk < last ? begin + chunk : last;
        for (int64_t panel = 0; panel < m->panels; ++panel) matmul_span(m, panel, begin, end, tiles, width);
    }
}

struct Pair;
static inline void weigh_pixels(const struct Pair* p, int64_t first, int64_t count, uint8_t* to);

enum { WEIGHED_BYTES = 1 << 16, BEHIND = 64 };   // what a thread has room for; what may be read behind it

// The same of a product that no step has made: pixels of one line, weighed as threads come to need them. Threads that share
// panels weigh all pixels each; those that share pixels weigh theirs, a few tiles at a time.
static __attribute__((noinline)) void matmul_weighed(struct Matmul* m, const struct Pair* weighed, int thread, int threads) {
    uint8_t made[WEIGHED_BYTES + BEHIND] __attribute__((aligned(64)));
    const int64_t pixels = m->out.images * m->out.height * m->out.width, pixel = m->in.pixel;
    if (!pixels) return;
    const int64_t tiles = (pixels + m->rows - 1) / m->rows, least = pixels / tiles, longer = pixels % tiles;
    if ((pixels < m->split_channels_below || tiles < threads) && pixels * pixel <= WEIGHED_BYTES) {
        if (first_unit(m, tiles, thread, threads) == first_unit(m, tiles, thread + 1, threads)) return;
        weigh_pixels(weighed, 0, pixels, made);
        m->in.base = made;
        matmul(m, thread, threads);
        return;
    }
    const int64_t first = share(tiles, thread, threads), last = share(tiles, thread + 1, threads);
    const int64_t most = WEIGHED_BYTES / ((least + (longer > 0)) * pixel), chunks = (last - first + most - 1) / most;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t begin = first + chunk * (last - first) / chunks, end = first + (chunk + 1) * (last - first) / chunks;
        const int64_t x = begin * least + (begin < longer ? begin : longer), stop = end * least + (end < longer ? end : longer);
        weigh_pixels(weighed, x, stop - x, made);
        m->in.base = made - x * pixel;
        for (int64_t panel = 0; panel < m->panels; ++panel) matmul_span(m, panel, begin, end, tiles, pixels);
    }
}

// -- depthwise ----------------------------------------------------------------------------------------------------------

// One call of a depthwise microkernel: `count` tiles side by side, each a few rows by a few columns of output pixels, the
// channels of a vector. A kernel leaves `count` 0 and `out` behind its last tile.
struct DepthwiseTile {
    const uint8_t* rows[16];   // of input, at the first column the tile reads
    int64_t pixel;             // bytes between input columns
    const int8_t* weights;
    const int32_t* bias;       // zero-point term folded in
    const float* factor;
    uint8_t* out;
    int64_t out_pixel, out_line;
    const struct Limits* limits;
    uint64_t mask;             // channels to write
    int64_t count;
    const uint8_t* table;      // of results, for kernels that look them up
};

typedef void (*DepthwiseKernel)(struct DepthwiseTile*);

struct Depthwise {
    struct Image in, out;
    int64_t stride_y, stride_x, dilation_y, top, left, taps_y;
    int64_t rows, columns;     // of the tallest tile
    int64_t blocks, block_bytes;
    uint64_t last_mask;
    const DepthwiseKernel *kernels, *last_kernels;   // by rows, then columns, from 1; full blocks, and the last one
    const uint8_t* table;      // of results, for kernels that do not look them up; or null
    struct Activation activation;                    // of results in float; `levels` may be null
    struct DepthwiseTile tile;
};

// Some tiles side by side, `rows` by `columns` pixels each.
static inline void depthwise_tiles(const struct Depthwise* d, struct DepthwiseTile* t, DepthwiseKernel kernel, int64_t rows, int64_t columns, int64_t tiles) {
    enum { CHANNELS = 64, PIXEL = 4 * CHANNELS };
    const struct Activation* activation = d->activation.levels ? &d->activation : 0;
    const int64_t most = activation ? WARM / (rows * columns * PIXEL) + 1 : tiles;
    float real[(WARM + TILE_BYTES) / sizeof(float)] __attribute__((aligned(64)));
    while (tiles) {
        const int64_t count = tiles < most ? tiles : most, pixels = count * columns;
        uint8_t* out = t->out;
        t->count = count;
        if (activation) t->out = (uint8_t*)real, t->out_pixel = PIXEL, t->out_line = pixels * PIXEL;
        kernel(t);
        for (int64_t row = 0; activation && row < rows; ++row)
            activation->levels(activation, real + row * pixels * CHANNELS, CHANNELS, pixels, out + row * d->out.line, d->out.pixel, __builtin_popcountll(t->mask));
        if (activation) t->out = out + pixels * d->out.pixel;
        for (int64_t i = 0; i < 16; ++i) t->rows[i] += pixels * d->stride_x * t->pixel;
        tiles -= count;
    }
}

static inline void depthwise(const struct Depthwise* d, int thread, int threads) {
    enum { CHANNELS = 64 };
    const int64_t groups = (d->out.height + d->rows - 1) / d->rows, tiles = (d->out.width + d->columns - 1) / d->columns;
    const int64_t units = d->out.images * groups * d->blocks;
    if (!tiles) return;
    const int64_t least = d->out.width / tiles, longer = d->out.width % tiles;  // columns, tiles with one more
    for (int64_t u = share(units, thread, threads); u < share(units, thread + 1, threads); ++u) {
        const int64_t block = u % d->blocks, group = u / d->blocks % groups, n = u / d->blocks / groups;
        const int64_t y = group * d->out.height / groups, rows = (group + 1) * d->out.height / groups - y;
        const int last = block == d->blocks - 1;
        const DepthwiseKernel* kernels = (last ? d->last_kernels : d->kernels) + (rows - 1) * d->columns - 1;
        struct DepthwiseTile t = d->tile;
        t.weights += block * d->block_bytes;
        t.bias += block * CHANNELS;
        t.factor += block * CHANNELS;
        t.pixel = d->in.pixel, t.out_pixel = d->out.pixel, t.out_line = d->out.line;
        if (last) t.mask = d->last_mask;
        const int64_t needed = (rows - 1) * d->stride_y + d->taps_y;
        for (int64_t i = 0; i < 16; ++i)  // rows past the last one have weights of zero
            t.rows[i] = at(&d->in, n, y * d->stride_y - d->top + (i < needed ? i : needed - 1) * d->dilation_y, -d->left) + block * CHANNELS;
        t.out = at(&d->out, n, y, 0) + block * CHANNELS;
        if (longer) depthwise_tiles(d, &t, kernels[least + 1], rows, least + 1, longer);
        depthwise_tiles(d, &t, kernels[least], rows, least, tiles - longer);
        for (int64_t row = y; d->table && row < y + rows; ++row)
            look_up_here(at(&d->out, n, row, 0) + block * CHANNELS, d->out.width, d->out.pixel, __builtin_popcountll(t.mask), d->table);
    }
}

// The same in plain loops, 64 channels at a time. A product of u8 and s8 fits 16 bits.
struct DepthwisePlain {
    struct Image in, out;
    int64_t stride_y, stride_x, dilation_y, dilation_x, top, left, taps_y, taps_x;
    const int8_t* weights;     // [tap y][tap x][channel]
    const int32_t* bias;
    const float* factor;
    const struct Limits* limits;
    const uint8_t* table;      // of results; or null
    struct Activation activation;
};

static inline void depthwise_plain(const struct DepthwisePlain* d, int thread, int threads) {
    enum { CHANNELS = 64 };
    const int64_t channels = d->in.pixel, lines = d->out.images * d->out.height;
    const struct Limits* q = d->limits;
    for (int64_t r = share(lines, thread, threads); r < share(lines, thread + 1, threads); ++r) {
        const int64_t n = r / d->out.height, y = r % d->out.height;
        for (int64_t x = 0; x < d->out.width; ++x)
            for (int64_t c = 0; c < channels; c += CHANNELS) {
                const int64_t lanes = channels - c < CHANNELS ? channels - c : CHANNELS;
                int32_t sum[CHANNELS];
                for (int64_t l = 0; l < lanes; ++l) sum[l] = d->bias[c + l];
                for (int64_t ky = 0; ky < d->taps_y; ++ky)
                    for (int64_t kx = 0; kx < d->taps_x; ++kx) {
                        const uint8_t* in = at(&d->in, n, y * d->stride_y - d->top + ky * d->dilation_y, x * d->stride_x - d->left + kx * d->dilation_x) + c;
                        const int8_t* w = d->weights + (ky * d->taps_x + kx) * channels + c;
                        if (lanes == CHANNELS)
                            for (int l = 0; l < CHANNELS; ++l) sum[l] += (int16_t)(in[l] * w[l]);
                        else
                            for (int64_t l = 0; l < lanes; ++l) sum[l] += in[l] * w[l];
                    }
                uint8_t* out = at(&d->out, n, y, x) + c;
                if (d->activation.levels) {
                    float real[CHANNELS] = {0};
                    for (int64_t l = 0; l < lanes; ++l) real[l] = (float)sum[l] * d->factor[c + l];
                    d->activation.levels(&d->activation, real, CHANNELS, 1, out, 0, lanes);
                } else {
                    for (int64_t l = 0; l < lanes; ++l)
                        out[l] = (uint8_t)requantize(sum[l], d->factor[c + l], q->zero_point, q->low, q->high);
                }
                if (d->table) look_up_here(out, 1, 0, lanes, d->table);
            }
    }
}

// -- vectors of levels ------------------------------------------------------------------------------------------------

// A vector of levels is spread into four of float and packed again; within 16 bytes, the j-th takes the j-th 4. Where
// channels have constants of their own, `deal` first moves levels so that the j-th takes the j-th quarter of the vector,
// and `gather` moves them back. A count says how many levels there are to read or write; more than WIDE are WIDE.
#if defined(__AVX2__)
#define VECTORS 1
static const float UNKNOWN = 3e38f;   // for how large steps may be
static const uint8_t spread_bytes[4][16] = {{0, 128, 128, 128, 1, 128, 128, 128, 2, 128, 128, 128, 3, 128, 128, 128},
                                            {4, 128, 128, 128, 5, 128, 128, 128, 6, 128, 128, 128, 7, 128, 128, 128},
                                            {8, 128, 128, 128, 9, 128, 128, 128, 10, 128, 128, 128, 11, 128, 128, 128},
                                            {12, 128, 128, 128, 13, 128, 128, 128, 14, 128, 128, 128, 15, 128, 128, 128}};
enum { TWO_TO_23 = 0x4b000000 };   // as float; a level in its lowest byte is added
#endif

#if defined(__AVX512BW__) && defined(__AVX512VL__)
enum { WIDE = 64 };
typedef __m512i Levels;
typedef __m512 Floats;
typedef uint16_t Words __attribute__((vector_size(WIDE)));
typedef int32_t Ints __attribute__((vector_size(WIDE)));

static inline Levels load_levels(const uint8_t* from, int64_t count) {
    return count >= WIDE ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi8(((__mmask64)1 << count) - 1, from);
}

static inline void store_levels(uint8_t* to, Levels x, int64_t count) {
    if (count >= WIDE)
        _mm512_storeu_si512(to, x);
    else
        _mm512_mask_storeu_epi8(to, ((__mmask64)1 << count) - 1, x);
}

static inline Levels deal(Levels x) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), x);
}

static inline Levels gather(Levels x) { return deal(x); }

static inline Floats floats(float x) { return _mm512_set1_ps(x); }

static inline Floats load_floats(const float* from) { return _mm512_loadu_ps(from); }

// 2^23 + level.
static inline Floats spread(Levels x, int j) {
    const __m512i order = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)spread_bytes[j]));
    return _mm512_castsi512_ps(_mm512_mask_shuffle_epi8(_mm512_set1_epi32(TWO_TO_23), 0x1111111111111111, x, order));
}

static inline Floats rising(Floats x, Floats rise, Floats fall) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GE_OQ), fall, rise);
}

struct Finish { __m512i zero_point, low, high; __m512 convertible; int far, whole; };   // whole: bounds are 0 and 255

static inline struct Finish finishing(const struct Limits* q, float most) {
    const struct Finish f = {_mm512_loadu_si512(q->zero_point16), _mm512_loadu_si512(q->low8), _mm512_loadu_si512(q->high8),
                             _mm512_set1_ps(q->convertible_high), !(most < q->convertible_high), q->low == 0 && q->high == 255};
    return f;
}

// Steps -> int32. What is below the least one and NaN become it; only steps that may be above 2^30 need the bound.
static inline __m512i converted(Floats steps, const struct Finish* f) {
    return _mm512_cvtps_epi32(f->far ? _mm512_min_ps(f->convertible, steps) : steps);
}

// clamp(rne(steps) + zero_point) of four vectors. 16 bits saturate beyond every level, so no clamped result sees it.
static inline Levels pack(const Floats* steps, const struct Finish* f) {
    const __m512i a = _mm512_packs_epi32(converted(steps[0], f), converted(steps[1], f));
    const __m512i b = _mm512_packs_epi32(converted(steps[2], f), converted(steps[3], f));
    const __m512i level = _mm512_packus_epi16(_mm512_adds_epi16(a, f->zero_point), _mm512_adds_epi16(b, f->zero_point));
    return f->whole ? level : _mm512_min_epu8(_mm512_max_epu8(level, f->low), f->high);
}

static inline Levels unpack_low(Levels a, Levels b) { return _mm512_unpacklo_epi16(a, b); }
static inline Levels unpack_high(Levels a, Levels b) { return _mm512_unpackhi_epi16(a, b); }
static inline Ints add_pairs(Levels a, Levels b) { return (Ints)_mm512_madd_epi16(a, b); }   // products of words
#elif defined(__AVX2__)
enum { WIDE = 32 };
typedef __m256i Levels;
typedef __m256 Floats;
typedef uint16_t Words __attribute__((vector_size(WIDE)));
typedef int32_t Ints __attribute__((vector_size(WIDE)));

static inline Levels load_levels(const uint8_t* from, int64_t count) {
    if (count >= WIDE) return _mm256_loadu_si256((const __m256i*)from);
    uint8_t some[WIDE] = {0};
    memcpy(some, from, (size_t)count);
    return _mm256_loadu_si256((const __m256i*)some);
}

static inline void store_levels(uint8_t* to, Levels x, int64_t count) {
    uint8_t some[WIDE];
    _mm256_storeu_si256((__m256i*)(count >= WIDE ? to : some), x);
    if (count < WIDE) memcpy(to, some, (size_t)count);
}

static inline Levels deal(Levels x) { return _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7)); }

static inline Levels gather(Levels x) { return _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)); }

static inline Floats floats(float x) { return _mm256_set1_ps(x); }

static inline Floats load_floats(const float* from) { return _mm256_loadu_ps(from); }

// 2^23 + level.
static inline Floats spread(Levels x, int j) {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)spread_bytes[j]));
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_shuffle_epi8(x, order), _mm256_set1_epi32(TWO_TO_23)));
}

static inline Floats rising(Floats x, Floats rise, Floats fall) {
    return _mm256_blendv_ps(fall, rise, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GE_OQ));
}

struct Finish { __m256i zero_point, low, high; __m256 convertible; int far, whole; };

static inline struct Finish finishing(const struct Limits* q, float most) {
    const struct Finish f = {_mm256_loadu_si256((const __m256i*)q->zero_point16), _mm256_loadu_si256((const __m256i*)q->low8),
                             _mm256_loadu_si256((const __m256i*)q->high8), _mm256_set1_ps(q->convertible_high), !(most < q->convertible_high),
                             q->low == 0 && q->high == 255};
    return f;
}

static inline __m256i converted(Floats steps, const struct Finish* f) {
    return _mm256_cvtps_epi32(f->far ? _mm256_min_ps(f->convertible, steps) : steps);
}

static inline Levels pack(const Floats* steps, const struct Finish* f) {
    const __m256i a = _mm256_packs_epi32(converted(steps[0], f), converted(steps[1], f));
    const __m256i b = _mm256_packs_epi32(converted(steps[2], f), converted(steps[3], f));
    const __m256i level = _mm256_packus_epi16(_mm256_adds_epi16(a, f->zero_point), _mm256_adds_epi16(b, f->zero_point));
    return f->whole ? level : _mm256_min_epu8(_mm256_max_epu8(level, f->low), f->high);
}

static inline Levels unpack_low(Levels a, Levels b) { return _mm256_unpacklo_epi16(a, b); }
static inline Levels unpack_high(Levels a, Levels b) { return _mm256_unpackhi_epi16(a, b); }
static inline Ints add_pairs(Levels a, Levels b) { return (Ints)_mm256_madd_epi16(a, b); }
#else
enum { WIDE = 16 };
#endif

#if defined(VECTORS)
static inline float magnitude(float x) { return x < 0 ? -x : x; }

// What `spread` gives for a level at its zero point; the difference is exact.
static inline Floats origin(int32_t zero) { return floats((float)(8388608 + zero)); }
#endif

// -- pooling ----------------------------------------------------------------------------------------------------------

struct PoolAxis { int64_t kernel, stride, before, dilation; };

// Images of volumes are their depths; an image or a line has one depth.
struct Pool {
    struct Image in, out;
    int64_t depth_in, depth_out;
    struct PoolAxis z, y, x;
    int64_t include_pad, fixed_divisor, adaptive;
    int32_t zero_in;
    const float* factors;      // by divisor, from 1; only one when the divisor is fixed; null where windows grow with a free size
    double ratio;              // then this, divided by the divisor
    const struct Limits* limits;
    int32_t* sums;             // by thread, up to `shares`, and channel; null unless the window is the image
    int64_t shares;
};

enum { SHARED_BYTES = 1 << 16 };   // of one image, from which on threads sum it together

static inline int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most_of(int64_t a, int64_t b) { return a > b ? a : b; }

typedef uint8_t Lanes __attribute__((vector_size(WIDE)));   // channels; what lies behind the last is read, and not used

// Window of one output along one axis: what it reads, and what it divides by.
struct Window { int64_t start, stop, count; };

// Taps of a window that lie inside an axis of `size`; `start` may lie before it.
static inline struct Window taps_inside(const struct PoolAxis* axis, int64_t index, int64_t size) {
    struct Window w = {0, axis->kernel, 0};
    const int64_t start = index * axis->stride - axis->before;
    if (start < 0) w.start = least_of((axis->dilation - 1 - start) / axis->dilation, axis->kernel);
    if (start + (axis->kernel - 1) * axis->dilation >= size)
        w.stop = size > start ? most_of((size - start + axis->dilation - 1) / axis->dilation, w.start) : w.start;
    w.count = w.stop - w.start;
    w.start = start + w.start * axis->dilation;
    return w;
}

static inline void max_pool(const struct Pool* p, int thread, int threads) {
    const int64_t rows = p->out.images * p->out.height, channels = p->in.pixel;
    const int64_t step_z = p->z.dilation * p->in.image, step_y = p->y.dilation * p->in.line, step_x = p->x.dilation * p->in.pixel;
    for (int64_t r = share(rows, thread, threads); r < share(rows, thread + 1, threads); ++r) {
        const int64_t i = r / p->out.height, n = i / p->depth_out;
        const struct Window depths = taps_inside(&p->z, i % p->depth_out, p->depth_in);
        const struct Window lines = taps_inside(&p->y, r % p->out.height, p->in.height);
        for (int64_t x = 0; x < p->out.width; ++x) {
            const struct Window columns = taps_inside(&p->x, x, p->in.width);
            const uint8_t* in = at(&p->in, n * p->depth_in + depths.start, lines.start, columns.start);
            uint8_t* out = at(&p->out, i, r % p->out.height, x);
            for (int64_t c = 0; c < channels; c += WIDE) {
                Lanes best = {};
                for (int64_t z = 0; z < depths.count; ++z)
                    for (int64_t y = 0; y < lines.count; ++y) {
                        const uint8_t* tap = in + z * step_z + y * step_y + c;
                        for (int64_t k = 0; k < columns.count; ++k, tap += step_x) {
                            Lanes level;
                            memcpy(&level, tap, WIDE);
                            best = level > best ? level : best;
                        }
                    }
                if (channels - c >= WIDE)
                    memcpy(out + c, &best, WIDE);
                else
                    memcpy(out + c, &best, (size_t)(channels - c));
            }
        }
    }
}

static inline struct Window window(const struct Pool* p, const struct PoolAxis* axis, int64_t index, int64_t outputs, int64_t size) {
    struct Window w;
    if (p->adaptive) {
        w.start = index * size / outputs;
        w.stop = ((index + 1) * size + outputs - 1) / outputs;
        w.count = w.stop - w.start;
        return w;
    }
    const int64_t start = index * axis->stride - axis->before, stop = least_of(start + axis->kernel, size + axis->before);
    w.start = most_of(start, 0);
    w.stop = most_of(w.start, least_of(stop, size));
    w.count = p->include_pad ? stop - start : w.stop - w.start;
    return w;
}

// Sums of the levels of some pixels, WIDE channels wide. Two levels of a vector make a word: words add up modulo 2^16,
// their upper levels apart, which gives both sums while they are below 2^16; then they are spread.
#if defined(VECTORS)
enum { HELD = 257 };           // times 255 is below 2^16
struct Sums { Words words, upper; Ints total[4]; int64_t held; };

static inline void spread_sums(struct Sums* s) {
    const Words even = s->words - (s->upper << 8), none = {};
    const Levels low = unpack_low((Levels)even, (Levels)s->upper), high = unpack_high((Levels)even, (Levels)s->upper);
    s->total[0] += (Ints)unpack_low(low, (Levels)none), s->total[1] += (Ints)unpack_high(low, (Levels)none);
    s->total[2] += (Ints)unpack_low(high, (Levels)none), s->total[3] += (Ints)unpack_high(high, (Levels)none);
    s->words = s->upper = none, s->held = 0;
}

static inline void sum_pixels(struct Sums* s, const uint8_t* from, int64_t count, int64_t apart) {
    while (count) {
        if (s->held == HELD) spread_sums(s);
        const int64_t some = least_of(count, HELD - s->held);
        for (int64_t i = 0; i < some; ++i, from += apart) {
            const Words x = (Words)load_levels(from, WIDE);
            s->words += x, s->upper += x >> 8;
        }
        s->held += some, count -= some;
    }
}

// In the order of channels.
static inline void store_sums(struct Sums* s, int32_t* to) {
    spread_sums(s);
    for (int j = 0; j < 4; ++j)
        for (int lane = 0; lane < WIDE / 16; ++lane) memcpy(to + 16 * lane + 4 * j, (const char*)&s->total[j] + 16 * lane, 16);
}

// (sum - real) * factor as levels.
static inline void finish_sums(struct Sums* s, int32_t real, float factor, const struct Limits* q, uint8_t* to, int64_t count) {
    const struct Finish f = finishing(q, UNKNOWN);
    Floats steps[4];
    spread_sums(s);
    for (int j = 0; j < 4; ++j) steps[j] = __builtin_convertvector(s->total[j] - real, Floats) * floats(factor);
    store_levels(to, pack(steps, &f), count);
}
#else
struct Sums { int32_t total[WIDE]; };

static inline void sum_pixels(struct Sums* s, const uint8_t* from, int64_t count, int64_t apart) {
    for (int64_t i = 0; i < count; ++i, from += apart)
        for (int l = 0; l < WIDE; ++l) s->total[l] += from[l];
}

static inline void store_sums(struct Sums* s, int32_t* to) { memcpy(to, s->total, sizeof s->total); }

static inline void finish_sums(struct Sums* s, int32_t real, float factor, const struct Limits* q, uint8_t* to, int64_t count) {
    for (int64_t l = 0; l < least_of(count, WIDE); ++l)
        to[l] = (uint8_t)requantize(s->total[l] - real, factor, q->zero_point, q->low, q->high);
}
#endif

// numerics.pool_multipliers
static inline float factor_of(const struct Pool* p, int64_t count) {
    return p->factors ? p->factors[p->fixed_divisor ? 0 : count - 1] : (float)(p->ratio / (double)count);
}

static inline void avg_pool_rows(const struct Pool* p, int thread, int threads) {
    const int64_t channels = p->in.pixel, parts = (channels + WIDE - 1) / WIDE;
    const int64_t units = p->out.images * p->out.height * parts;
    for (int64_t u = share(units, thread, threads); u < share(units, thread + 1, threads); ++u) {
        const int64_t c = u % parts * WIDE, r = u / parts, i = r / p->out.height, y = r % p->out.height, n = i / p->depth_out;
        const struct Window depths = window(p, &p->z, i % p->depth_out, p->depth_out, p->depth_in);
        const struct Window lines = window(p, &p->y, y, p->out.height, p->in.height);
        for (int64_t x = 0; x < p->out.width; ++x) {
            const struct Window columns = window(p, &p->x, x, p->out.width, p->in.width);
            const int64_t width = columns.stop - columns.start;
            struct Sums sums = {};
            for (int64_t z = depths.start; z < depths.stop; ++z)
                for (int64_t line = lines.start; line < lines.stop; ++line)
                    sum_pixels(&sums, at(&p->in, n * p->depth_in + z, line, columns.start) + c, width, p->in.pixel);
            const int64_t inside = (depths.stop - depths.start) * (lines.stop - lines.start) * width;
            const float factor = factor_of(p, depths.count * lines.count * columns.count);
            finish_sums(&sums, (int32_t)inside * p->zero_in, factor, p->limits, at(&p->out, i, y, x) + c, channels - c);
        }
    }
}

// Sums of rows first..last of an image by channels; where pixels fill whole vectors, several at once.
static inline void sum_rows(const struct Image* in, int64_t first, int64_t last, int32_t* to) {
    const int64_t channels = in->pixel, fit = WIDE / channels;
    const int64_t pixels = fit && WIDE % channels == 0 && in->width % fit == 0 ? fit : 1;
    for (int64_t c = 0; c < channels; c += WIDE) {
        int32_t total[WIDE];
        struct Sums sums = {};
        for (int64_t y = first; y < last; ++y) sum_pixels(&sums, at(in, 0, y, 0) + c, in->width / pixels, pixels * channels);
        store_sums(&sums, total);
        for (int64_t l = channels; l < pixels * channels; ++l) total[l % channels] += total[l];
        memcpy(to + c, total, sizeof *total * (size_t)least_of(WIDE, channels - c));
    }
}

// The mean of one image: threads sum rows, those they are likely to have written, then each does some channels.
static inline void mean_of_image(const struct Pool* p, struct IntaglioBarrier* barrier, int thread, int threads) {
    enum { SOME = 16 };
    const int64_t channels = p->in.pixel, pixels = p->in.height * p->in.width, parts = (channels + SOME - 1) / SOME;
    const int shares = threads < p->shares ? threads : (int)p->shares;
    const struct Limits* q = p->limits;
    const float factor = factor_of(p, pixels);
    if (thread < shares)
        sum_rows(&p->in, share(p->in.height, thread, shares), share(p->in.height, thread + 1, shares), p->sums + thread * channels);
    intaglio_barrier_wait(barrier, threads);
    for (int64_t c = share(parts, thread, threads) * SOME; c < share(parts, thread + 1, threads) * SOME; c += SOME) {
        int32_t total[SOME] = {0};
        for (int64_t s = 0; s < shares; ++s)  // what lies behind the last channel is read, and not used
            for (int l = 0; l < SOME; ++l) total[l] += p->sums[s * channels + c + l];
        for (int64_t l = 0; l < least_of(SOME, channels - c); ++l)
            p->out.base[c + l] = (uint8_t)requantize(total[l] - (int32_t)pixels * p->zero_in, factor, q->zero_point, q->low,
                                                     q->high);
    }
}

static inline void avg_pool(const struct Pool* p, struct IntaglioBarrier* barrier, int thread, int threads) {
    if (p->sums && p->in.images == 1 && p->in.image >= SHARED_BYTES)
        mean_of_image(p, barrier, thread, threads);
    else
        avg_pool_rows(p, thread, threads);
}

// -- levels to levels -------------------------------------------------------------------------------------------------

// Rows of pixels of equal geometry, one thread's share: `each(in, other, out, bytes)` for every row.
#define FOR_EACH_ROW(out_image)                                                                           \
    for (int64_t r_ = share((out_image)->images * (out_image)->height, thread, threads),                  \
                 end_ = share((out_image)->images * (out_image)->height, thread + 1, threads),            \
                 n = 0, y = 0;                                                                            \
         r_ < end_ && (n = r_ / (out_image)->height, y = r_ % (out_image)->height, 1); ++r_)

// Constants by channel go on with the first channels for WIDE - 1 more: a vector begins with any channel and may end in
// another pixel. `channel` of the vector at `i` is where it begins, of `count` levels of whole pixels of `period` channels.
#define FOR_EACH_VECTOR(count, period)                                            \
    for (int64_t i = 0, channel = 0, step_ = WIDE % (period); i < (count);        \
         i += WIDE, channel += step_, channel -= channel < (period) ? 0 : (period))

// Two operands with their zero points and factors; a product has one factor, the first. `each`: the second is one for every
// channel, and goes on with the first channels.
struct Pair {
    struct Image a, b, out;
    int32_t zero_a, each;
    const float *factor_a, *factor_b;
    const struct Limits* limits;
};

static inline void add_line(const struct Pair* p, const uint8_t* a, const uint8_t* b, uint8_t* to, int64_t count) {
    const struct Limits* q = p->limits;
#if defined(VECTORS)
    const struct Finish f = finishing(q, 255 * (magnitude(p->factor_a[0]) + magnitude(p->factor_b[0])));
    const Floats origin_a = origin(p->zero_a), origin_b = origin(q->other_zero_point);
    const Floats factor_a = floats(p->factor_a[0]), factor_b = floats(p->factor_b[0]);
    for (int64_t i = 0; i < count; i += WIDE) {
        const Levels left = load_levels(a + i, count - i), right = load_levels(b + i, count - i);
        Floats steps[4];
        for (int j = 0; j < 4; ++j) steps[j] = (spread(left, j) - origin_a) * factor_a + (spread(right, j) - origin_b) * factor_b;
        store_levels(to + i, pack(steps, &f), count - i);
    }
#else
    for (int64_t i = 0; i < count; ++i)
        to[i] = (uint8_t)add_requantize(a[i] - p->zero_a, p->factor_a[0], b[i] - q->other_zero_point, p->factor_b[0],
                                        q->zero_point, q->low, q->high);
#endif
}

static inline void add_scaled_line(const struct Pair* p, const uint8_t* a, const uint8_t* b, uint8_t* to, int64_t count) {
    const struct Limits* q = p->limits;
#if defined(VECTORS)
    const struct Finish f = finishing(q, UNKNOWN);
    const Floats origin_a = origin(p->zero_a), origin_b = origin(q->other_zero_point), factor_a = floats(p->factor_a[0]);
    FOR_EACH_VECTOR(count, p->out.pixel) {
        const Levels left = deal(load_levels(a + i, count - i)), right = deal(load_levels(b + i, count - i));
        Floats steps[4];
        for (int j = 0; j < 4; ++j) {
            const Floats factor_b = load_floats(p->factor_b + channel + WIDE / 4 * j);
            steps[j] = (spread(left, j) - origin_a) * factor_a + (spread(right, j) - origin_b) * factor_b;
        }
        store_levels(to + i, gather(pack(steps, &f)), count - i);
    }
#else
    for (int64_t i = 0; i < count; i += p->out.pixel)
        for (int64_t c = 0; c < p->out.pixel; ++c)
            to[i + c] = (uint8_t)add_requantize(a[i + c] - p->zero_a, p->factor_a[0], b[i + c] - q->other_zero_point, p->factor_b[c],
                                                q->zero_point, q->low, q->high);
#endif
}

// A product of two differences of levels is below 2^17, so float32 holds it exactly.
static inline void mul_line(const struct Pair* p, const uint8_t* a, const uint8_t* b, uint8_t* to, int64_t count) {
    const struct Limits* q = p->limits;
#if defined(VECTORS)
    const struct Finish f = finishing(q, 255 * 255 * magnitude(p->factor_a[0]));
    const Floats origin_a = origin(p->zero_a), origin_b = origin(q->other_zero_point), factor = floats(p->factor_a[0]);
    for (int64_t i = 0; i < count; i += WIDE) {
        const Levels left = load_levels(a + i, count - i), right = load_levels(b + i, count - i);
        Floats steps[4];
        for (int j = 0; j < 4; ++j) steps[j] = (spread(left, j) - origin_a) * (spread(right, j) - origin_b) * factor;
        store_levels(to + i, pack(steps, &f), count - i);
    }
#else
    for (int64_t i = 0; i < count; ++i)
        to[i] = (uint8_t)requantize((a[i] - p->zero_a) * (b[i] - q->other_zero_point), p->factor_a[0], q->zero_point, q->low,
                                    q->high);
#endif
}

// An operand that is the same for every pixel of an image: its difference from zero per channel, in sums times its
// factor. The other operand has the zero point and, in sums, the factor here; in products it is that of the result.
enum { TERMS = 4096 };

struct Terms {
    int64_t channels;
    int32_t zero;
    float factor, term[TERMS + WIDE];
};

#if defined(VECTORS)
// Vectors that begin with a multiple of 16 channels need no dealing where the j-th terms of all 16 lie together.
static inline int in_sixteens(const struct Terms* t) { return t->channels % 16 == 0; }

static inline void fill_terms(struct Terms* t, const uint8_t* from, int32_t zero, float factor) {
    if (!in_sixteens(t)) {
        for (int64_t c = 0; c < t->channels; ++c) t->term[c] = (float)(from[c] - zero) * factor;
        for (int64_t c = 0; c < WIDE - 1; ++c) t->term[t->channels + c] = t->term[c];
        return;
    }
    const int64_t quarter = t->channels / 4, apart = quarter + WIDE / 4;
    for (int64_t c = 0; c < t->channels; c += WIDE) {
        const Levels x = load_levels(from + c, t->channels - c);
        for (int j = 0; j < 4; ++j) {
            const Floats term = (spread(x, j) - origin(zero)) * floats(factor);
            memcpy(t->term + j * apart + c / 4, &term, sizeof term);
        }
    }
    for (int j = 0; j < 4; ++j)
        for (int64_t c = 0; c < WIDE / 4; ++c) t->term[j * apart + quarter + c] = t->term[j * apart + c];
}

static inline __attribute__((always_inline)) void term_vectors(const struct Terms* t, const uint8_t* from, uint8_t* to, int64_t count,
                                                               const struct Finish* f, int sum, int sixteens) {
    const Floats zero = origin(t->zero), factor = floats(t->factor);
    const int64_t apart = sixteens ? t->channels / 4 + WIDE / 4 : WIDE / 4;
    FOR_EACH_VECTOR(count, t->channels) {
        const Levels loaded = load_levels(from + i, count - i), x = sixteens ? loaded : deal(loaded);
        const float* terms = t->term + (sixteens ? channel / 4 : channel);
        Floats steps[4];
        for (int j = 0; j < 4; ++j) {
            const Floats real = spread(x, j) - zero, term = load_floats(terms + apart * j);
            steps[j] = sum ? real * factor + term : real * term * factor;
        }
        const Levels level = pack(steps, f);
        store_levels(to + i, sixteens ? level : gather(level), count - i);
    }
}
#else
static inline void fill_terms(struct Terms* t, const uint8_t* from, int32_t zero, float factor) {
    for (int64_t c = 0; c < t->channels; ++c) t->term[c] = (float)(from[c] - zero) * factor;
}
#endif

static inline void add_terms(const struct Terms* t, const uint8_t* from, uint8_t* to, int64_t count, const struct Limits* q) {
#if defined(VECTORS)
    const struct Finish f = finishing(q, UNKNOWN);
    if (in_sixteens(t))
        term_vectors(t, from, to, count, &f, 1, 1);
    else
        term_vectors(t, from, to, count, &f, 1, 0);
#else
    for (int64_t i = 0; i < count; i += t->channels)
        for (int64_t c = 0; c < t->channels; ++c)
            to[i + c] = (uint8_t)finish((float)(from[i + c] - t->zero) * t->factor + t->term[c], q->zero_point, q->low, q->high);
#endif
}

static inline void mul_terms(const struct Terms* t, const uint8_t* from, uint8_t* to, int64_t count, const struct Limits* q) {
#if defined(VECTORS)
    const struct Finish f = finishing(q, 255 * 255 * magnitude(t->factor));
    if (in_sixteens(t))
        term_vectors(t, from, to, count, &f, 0, 1);
    else
        term_vectors(t, from, to, count, &f, 0, 0);
#else
    for (int64_t i = 0; i < count; i += t->channels)
        for (int64_t c = 0; c < t->channels; ++c)
            to[i + c] = (uint8_t)finish((float)(from[i + c] - t->zero) * t->term[c] * t->factor, q->zero_point, q->low, q->high);
#endif
}

// A pair of which operand `one` has one pixel an image. More channels than there are terms are done some at a time.
static inline void pair_with_pixel(const struct Pair* p, int sum, int one_a, int thread, int threads) {
    const struct Image *one = one_a ? &p->a : &p->b, *other = one_a ? &p->b : &p->a;
    const int32_t zero_b = p->limits->other_zero_point, zero_one = one_a ? p->zero_a : zero_b;
    const float factor_one = !sum ? 1.0f : one_a ? p->factor_a[0] : p->factor_b[0];
    struct Terms t;
    t.zero = one_a ? zero_b : p->zero_a;
    t.factor = sum && one_a ? p->factor_b[0] : p->factor_a[0];
    for (int64_t c = 0; c < p->out.pixel; c += t.channels) {
        int64_t known = -1;
        t.channels = least_of(TERMS, p->out.pixel - c);
        const int64_t lines = t.channels == p->out.pixel ? 1 : p->out.width, count = p->out.width / lines * t.channels;
        FOR_EACH_ROW(&p->out) {
            if (n != known) fill_terms(&t, at(one, n, 0, 0) + c, zero_one, factor_one);
            known = n;
            for (int64_t x = 0; x < lines; ++x)
                (sum ? add_terms : mul_terms)(&t, at(other, n, y, x) + c, at(&p->out, n, y, x) + c, count, p->limits);
        }
    }
}

// Some pixels of an image times one pixel for it, dense; they are counted through all images.
static inline void weigh_pixels(const struct Pair* p, int64_t first, int64_t count, uint8_t* to) {
    const int one_a = p->a.height * p->a.width == 1;
    const struct Image *one = one_a ? &p->a : &p->b, *other = one_a ? &p->b : &p->a;
    const int32_t zero_b = p->limits->other_zero_point;
    const int64_t pixels = other->height * other->width;
    struct Terms t;
    t.channels = other->pixel, t.zero = one_a ? zero_b : p->zero_a, t.factor = p->factor_a[0];
    for (int64_t some; count; first += some, count -= some, to += some * t.channels) {
        const int64_t n = first / pixels;
        some = least_of(count, (n + 1) * pixels - first);
        fill_terms(&t, at(one, n, 0, 0), one_a ? p->zero_a : zero_b, 1.0f);
        mul_terms(&t, other->base + first * t.channels, to, some * t.channels, p->limits);
    }
}

static inline void pair_levels(const struct Pair* p, int sum, int thread, int threads) {
    const int one_a = p->a.height * p->a.width == 1, one_b = p->b.height * p->b.width == 1;
    if (one_a != one_b) {
        pair_with_pixel(p, sum, one_a, thread, threads);
        return;
    }
    FOR_EACH_ROW(&p->out)
        (!sum ? mul_line : p->each ? add_scaled_line : add_line)(p, at(&p->a, n, y, 0), at(&p->b, n, y, 0), at(&p->out, n, y, 0), p->out.width * p->out.pixel);
}

// A factor and an offset per channel: batch norm on its own.
static inline void affine_levels(const struct Image* in, const struct Image* out, int32_t zero, const float* factor,
                                 const float* offset, const struct Limits* q, int thread, int threads) {
    FOR_EACH_ROW(out) {
        const uint8_t* from = at(in, n, y, 0);
        uint8_t* to = at(out, n, y, 0);
        const int64_t count = out->width * out->pixel;
#if defined(VECTORS)
        const struct Finish f = finishing(q, UNKNOWN);
        FOR_EACH_VECTOR(count, out->pixel) {
            const Levels x = deal(load_levels(from + i, count - i));
            Floats steps[4];
            for (int j = 0; j < 4; ++j) {
                const int64_t c = channel + WIDE / 4 * j;
                steps[j] = (spread(x, j) - origin(zero)) * load_floats(factor + c) + load_floats(offset + c);
            }
            store_levels(to + i, gather(pack(steps, &f)), count - i);
        }
#else
        for (int64_t i = 0; i < count; i += out->pixel)
            for (int64_t c = 0; c < out->pixel; ++c)
                to[i + c] = (uint8_t)finish((float)(from[i + c] - zero) * factor[c] + offset[c], q->zero_point, q->low, q->high);
#endif
    }
}

// A value that is not negative times `rise`, another times its channel's `fall`.
static inline void prelu_levels(const struct Image* in, const struct Image* out, int32_t zero, const float* rise,
                                const float* fall, const struct Limits* q, int thread, int threads) {
    FOR_EACH_ROW(out) {
        const uint8_t* from = at(in, n, y, 0);
        uint8_t* to = at(out, n, y, 0);
        const int64_t count = out->width * out->pixel;
#if defined(VECTORS)
        const struct Finish f = finishing(q, UNKNOWN);
        FOR_EACH_VECTOR(count, out->pixel) {
            const Levels x = deal(load_levels(from + i, count - i));
            Floats steps[4];
            for (int j = 0; j < 4; ++j) {
                const Floats centred = spread(x, j) - origin(zero);
                steps[j] = centred * rising(centred, floats(*rise), load_floats(fall + channel + WIDE / 4 * j));
            }
            store_levels(to + i, gather(pack(steps, &f)), count - i);
        }
#else
        for (int64_t i = 0; i < count; i += out->pixel)
            for (int64_t c = 0; c < out->pixel; ++c) {
                const int32_t centred = from[i + c] - zero;
                to[i + c] = (uint8_t)requantize(centred, centred >= 0 ? *rise : fall[c], q->zero_point, q->low, q->high);
            }
#endif
    }
}

// Sums of up to 2^15 levels and of their squares.
struct Moments { int64_t levels, squares; };

static inline struct Moments moments(const uint8_t* from, int64_t count) {
    int32_t levels = 0, squares = 0;
#if defined(VECTORS)
    Ints sum = {}, square = {};
    for (int64_t i = 0; i < count; i += WIDE) {
        const Words x = (Words)load_levels(from + i, count - i), even = x & 255, odd = x >> 8;
        sum += add_pairs((Levels)(even + odd), (Levels)(x - x + 1));
        square += add_pairs((Levels)even, (Levels)even) + add_pairs((Levels)odd, (Levels)odd);
    }
    for (int l = 0; l < WIDE / 4; ++l) levels += sum[l], squares += square[l];
#else
    for (int64_t c = 0; c < count; ++c) levels += from[c], squares += from[c] * from[c];
#endif
    const struct Moments m = {levels, squares};
    return m;
}

// numerics.layer_norm of every pixel. Sums are exact, so their order is free and the zero point leaves the variance alone.
static inline void layer_norm_levels(const struct Image* in, const struct Image* out, int32_t zero, const float* factor,
                                     const float* offset, float eps, const struct Limits* q, int thread, int threads) {
    const int64_t count = in->pixel;
    FOR_EACH_ROW(out) {
        for (int64_t x = 0; x < out->width; ++x) {
            const uint8_t* from = at(in, n, y, x);
            uint8_t* to = at(out, n, y, x);
            const struct Moments m = moments(from, count);
            const float mean = (float)(m.levels - count * zero) / (float)count;
            const float variance = (float)(count * m.squares - m.levels * m.levels) / (float)(count * count);
            const float inverse = 1.0f / __builtin_sqrtf(variance + eps);
#if defined(VECTORS)
            const struct Finish f = finishing(q, UNKNOWN);
            for (int64_t i = 0; i < count; i += WIDE) {
                const Levels level = deal(load_levels(from + i, count - i));
                Floats steps[4];
                for (int j = 0; j < 4; ++j) {
                    const int64_t c = i + WIDE / 4 * j;
                    const Floats normal = (spread(level, j) - origin(zero) - floats(mean)) * floats(inverse);
                    steps[j] = normal * load_floats(factor + c) + load_floats(offset + c);
                }
                store_levels(to + i, gather(pack(steps, &f)), count - i);
            }
#else
            for (int64_t c = 0; c < count; ++c)
                to[c] = (uint8_t)finish(((float)(from[c] - zero) - mean) * inverse * factor[c] + offset[c], q->zero_point, q->low, q->high);
#endif
        }
    }
}

static inline void clamp_levels(const struct Image* in, const struct Image* out, const struct Limits* q, int thread, int threads) {
    const uint8_t low = (uint8_t)q->low, high = (uint8_t)q->high;
    FOR_EACH_ROW(out) {
        const uint8_t* from = at(in, n, y, 0);
        uint8_t* to = at(out, n, y, 0);
        for (int64_t i = 0; i < out->width * out->pixel; ++i) {
            const uint8_t level = from[i] < low ? low : from[i];
            to[i] = level > high ? high : level;
        }
    }
}

#if defined(__AVX512BW__)
// Processors with AVX512-VBMI look up 64 levels at a time in two registers of each half of the table.
__attribute__((target("avx512bw,avx512vbmi"))) static void look_up_vectors(const uint8_t* from, uint8_t* to, int64_t pixels, int64_t apart, int64_t channels, const uint8_t* table) {
    const __m512i a = _mm512_loadu_si512(table), b = _mm512_loadu_si512(table + 64);
    const __m512i c = _mm512_loadu_si512(table + 128), d = _mm512_loadu_si512(table + 192);
    for (int64_t x = 0; x < pixels; ++x, from += apart, to += apart)
        for (int64_t i = 0; i < channels; i += 64) {
            const __mmask64 some = channels - i < 64 ? ((__mmask64)1 << (channels - i)) - 1 : ~(__mmask64)0;
            const __m512i level = _mm512_maskz_loadu_epi8(some, from + i);
            const __m512i low = _mm512_permutex2var_epi8(a, level, b), high = _mm512_permutex2var_epi8(c, level, d);
            _mm512_mask_storeu_epi8(to + i, some, _mm512_mask_blend_epi8(_mm512_movepi8_mask(level), low, high));
        }
}
#elif defined(__AVX2__)
// A shuffle sees 16 entries and gives 0 for a negative level. Each changes what the one before it gave, for levels that
// are still not negative after so many times 16; levels from 128 on are negative until their upper bit is flipped.
static inline void look_up_vectors(const uint8_t* from, uint8_t* to, int64_t pixels, int64_t apart, int64_t channels, const uint8_t* table) {
    const __m256i sixteen = _mm256_set1_epi8(16);
    __m256i change[16];
    for (int j = 0; j < 16; ++j) {
        const __m128i part = _mm_loadu_si128((const __m128i*)(table + 16 * j));
        const __m128i last = j % 8 ? _mm_loadu_si128((const __m128i*)(table + 16 * j - 16)) : _mm_setzero_si128();
        change[j] = _mm256_broadcastsi128_si256(_mm_xor_si128(part, last));
    }
    for (int64_t x = 0; x < pixels; ++x, from += apart, to += apart)
        for (int64_t i = 0; i < channels; i += WIDE) {
            __m256i low = load_levels(from + i, channels - i), high = _mm256_xor_si256(low, _mm256_set1_epi8(-128));
            __m256i found = _mm256_setzero_si256();
            for (int j = 0; j < 8; ++j) {
                found = _mm256_xor_si256(found, _mm256_shuffle_epi8(change[j], low));
                found = _mm256_xor_si256(found, _mm256_shuffle_epi8(change[8 + j], high));
                low = _mm256_subs_epi8(low, sixteen), high = _mm256_subs_epi8(high, sixteen);
            }
            store_levels(to + i, found, channels - i);
        }
}
#endif

// Levels of some channels of pixels `apart` from each other -> what the table has for them.
static inline void look_up_pixels(const uint8_t* from, uint8_t* to, int64_t pixels, int64_t apart, int64_t channels, const uint8_t* table) {
#if defined(__AVX512BW__)
    if (has_vbmi()) {
        look_up_vectors(from, to, pixels, apart, channels, table);
        return;
    }
#elif defined(__AVX2__)
    look_up_vectors(from, to, pixels, apart, channels, table);
    return;
#endif
    for (int64_t x = 0; x < pixels; ++x, from += apart, to += apart)
        for (int64_t i = 0; i < channels; ++i) to[i] = table[from[i]];
}

static inline void look_up(const struct Image* in, const struct Image* out, const uint8_t* table, int thread, int threads) {
    FOR_EACH_ROW(out) look_up_pixels(at(in, n, y, 0), at(out, n, y, 0), 1, 0, out->width * out->pixel, table);
}

// Channel 2 * i + g of the result is channel g * each + i: two halves, one from each by turns.
static inline void interleave_levels(const struct Image* in, const struct Image* out, int thread, int threads) {
    const int64_t each = out->pixel / 2;
    FOR_EACH_ROW(out) {
        for (int64_t x = 0; x < out->width; ++x) {
            const uint8_t *a = at(in, n, y, x), *b = a + each;
            uint8_t* to = at(out, n, y, x);
            int64_t i = 0;
#if defined(__AVX2__)
            for (; i + 16 <= each; i += 16) {
                const __m128i left = _mm_loadu_si128((const __m128i*)(a + i)), right = _mm_loadu_si128((const __m128i*)(b + i));
                _mm_storeu_si128((__m128i*)(to + 2 * i), _mm_unpacklo_epi8(left, right));
                _mm_storeu_si128((__m128i*)(to + 2 * i + 16), _mm_unpackhi_epi8(left, right));
            }
#endif
            for (; i < each; ++i) to[2 * i] = a[i], to[2 * i + 1] = b[i];
        }
    }
}

// -- moves --------------------------------------------------------------------------------------------------------------

enum { RUNS = 8, AXES = 7 };

// A strided copy; the last run is the innermost.
struct Copy {
    const uint8_t* in;
    uint8_t* out;
    int64_t size[RUNS], from[RUNS], to[RUNS];
};

static inline void copy_run(const uint8_t* in, uint8_t* out, int64_t size, int64_t from, int64_t to) {
    if (to == 1 && from == 1)
        memcpy(out, in, (size_t)size);
    else if (to == 1 && from == 0)
        memset(out, *in, (size_t)size);
    else
        for (int64_t i = 0; i < size; ++i) out[i * to] = in[i * from];
}

static inline void copy_levels(const struct Copy* c, int thread, int threads) {
    const int64_t size = c->size[RUNS - 1], from = c->from[RUNS - 1], to = c->to[RUNS - 1];
    int64_t total = 1, digit[RUNS - 1];
    for (int k = 0; k < RUNS - 1; ++k) total *= c->size[k];
    if (total == 1) {
        const int64_t first = share(size, thread, threads);
        copy_run(c->in + first * from, c->out + first * to, share(size, thread + 1, threads) - first, from, to);
        return;
    }
    int64_t u = share(total, thread, threads);
    const int64_t end = share(total, thread + 1, threads);
    if (u >= end) return;
    const uint8_t* in = c->in;
    uint8_t* out = c->out;
    for (int64_t k = RUNS - 2, rest = u; k >= 0; --k) {
        digit[k] = rest % c->size[k], rest /= c->size[k];
        in += digit[k] * c->from[k], out += digit[k] * c->to[k];
    }
    for (; u < end; ++u) {
        copy_run(in, out, size, from, to);
        for (int k = RUNS - 2; k >= 0; --k) {
            in += c->from[k], out += c->to[k];
            if (++digit[k] < c->size[k]) break;
            in -= c->size[k] * c->from[k], out -= c->size[k] * c->to[k];
            digit[k] = 0;
        }
    }
}

// A tensor by its logical axes, of any layout; missing axes of one element in front.
struct Side {
    uint8_t* base;
    int64_t size[AXES], stride[AXES];
};

static inline uint8_t* enter(const struct Side* s, int64_t index, int64_t* digit) {
    uint8_t* at = s->base;
    for (int k = AXES - 1; k >= 0; --k) {
        digit[k] = index % s->size[k], index /= s->size[k];
        at += digit[k] * s->stride[k];
    }
    return at;
}

static inline uint8_t* advance(const struct Side* s, uint8_t* at, int64_t* digit) {
    for (int k = AXES - 1; k >= 0; --k) {
        at += s->stride[k];
        if (++digit[k] < s->size[k]) break;
        at -= s->size[k] * s->stride[k];
        digit[k] = 0;
    }
    return at;
}

// Logical order of both is the same; memory order is each one's own.
static inline void reshape_levels(const struct Side* in, const struct Side* out, int thread, int threads) {
    int64_t total = 1, digit_in[AXES], digit_out[AXES];
    for (int k = 0; k < AXES; ++k) total *= out->size[k];
    int64_t u = share(total, thread, threads);
    const int64_t end = share(total, thread + 1, threads);
    if (u >= end) return;
    const uint8_t* from = enter(in, u, digit_in);
    uint8_t* to = enter(out, u, digit_out);
    for (; u < end; ++u) {
        *to = *from;
        from = advance(in, (uint8_t*)from, digit_in);
        to = advance(out, to, digit_out);
    }
}

// -- upsampling -----------------------------------------------------------------------------------------------------

// What outputs read along one axis: tables, or the sizes of a call and the inputs between neighbouring outputs (0: those
// of the sizes), from which the same numbers come as from ops/resize.py.
struct Grid {
    const int32_t* index;
    const float* weight;
    int64_t size, result;
    float step;
    int images, align;
};

static inline int64_t nearest_at(const struct Grid* g, int64_t i) {
    if (g->index) return g->index[i];
    if (g->images && (g->result == g->size || g->result == 2 * g->size)) return i * g->size / g->result;
    const float step = g->step != 0 ? g->step : (float)g->size / (float)g->result;
    return least_of((int64_t)((float)i * step), g->size - 1);
}

// The two values an output lies between, and their weights.
struct Between { int64_t below, above; float weight[2]; };

static inline struct Between between(const struct Grid* g, int64_t i) {
    if (g->index) return (struct Between){g->index[2 * i], g->index[2 * i + 1], {g->weight[2 * i], g->weight[2 * i + 1]}};
    float place = (float)i;
    if (g->align) {
        place = place * (g->result > 1 ? (float)(g->size - 1) / (float)(g->result - 1) : 0.0f);
    } else if (g->size != g->result) {
        const float step = g->step != 0 ? g->step : (float)g->size / (float)g->result;
        place = step * (place + 0.5f) - 0.5f;
        place = place > 0 ? place : 0;
    }
    const int64_t below = least_of((int64_t)place, g->size - 1);
    const float over = place - (float)below, rest = over > 0 ? over < 1 ? over : 1 : 0;
    return (struct Between){below, below + (below < g->size - 1), {1 - rest, rest}};
}

// Every output is a copy of the pixel its grids name. Rows that read the row before them copy its result.
static inline void upsample_nearest(const struct Image* in, const struct Image* out, int64_t depth_in, int64_t depth_out,
                                    const struct Grid* depth, const struct Grid* row, const struct Grid* column, int thread,
                                    int threads) {
    int64_t done_n = -1, done_y = -1;
    const uint8_t* done = 0;
    FOR_EACH_ROW(out) {
        const int64_t source = n / depth_out * depth_in + nearest_at(depth, n % depth_out), above = nearest_at(row, y);
        uint8_t* to = at(out, n, y, 0);
        if (done && source == done_n && above == done_y) {
            memcpy(to, done, (size_t)(out->width * out->pixel));
        } else {
            const uint8_t* from = at(in, source, above, 0);
            for (int64_t x = 0; x < out->width; ++x)
                memcpy(to + x * out->pixel, from + nearest_at(column, x) * out->pixel, (size_t)out->pixel);
        }
        done = to, done_n = source, done_y = above;
    }
}

// Means of two rows by two columns.
struct Blend {
    struct Image in, out;
    struct Grid row, column;
    const float* factor;
    int32_t zero_in;
    const struct Limits* limits;
};

static inline float blend(const uint8_t* a, const uint8_t* b, int64_t c, const float* weight, int32_t zero) {
    return (float)(a[c] - zero) * weight[0] + (float)(b[c] - zero) * weight[1];
}

static inline void upsample_linear(const struct Blend* b, int thread, int threads) {
    const struct Limits* q = b->limits;
    const int64_t channels = b->out.pixel;
    FOR_EACH_ROW(&b->out) {
        const struct Between rows = between(&b->row, y);
        const float *v = rows.weight, factor = b->factor[0];
        const uint8_t *above = at(&b->in, n, rows.below, 0), *below = at(&b->in, n, rows.above, 0);
        uint8_t* to = at(&b->out, n, y, 0);
        for (int64_t x = 0; x < b->out.width; ++x, to += channels) {
            const struct Between columns = between(&b->column, x);
            const int64_t left = columns.below * channels, right = columns.above * channels;
            const float* w = columns.weight;
#if defined(VECTORS)
            const struct Finish f = finishing(q, UNKNOWN);
            const Floats zero = origin(b->zero_in), w0 = floats(w[0]), w1 = floats(w[1]), v0 = floats(v[0]), v1 = floats(v[1]);
            for (int64_t c = 0; c < channels; c += WIDE) {
                const Levels a0 = load_levels(above + left + c, channels - c), a1 = load_levels(above + right + c, channels - c);
                const Levels b0 = load_levels(below + left + c, channels - c), b1 = load_levels(below + right + c, channels - c);
                Floats steps[4];
                for (int j = 0; j < 4; ++j) {
                    const Floats top = (spread(a0, j) - zero) * w0 + (spread(a1, j) - zero) * w1;
                    const Floats bottom = (spread(b0, j) - zero) * w0 + (spread(b1, j) - zero) * w1;
                    steps[j] = (top * v0 + bottom * v1) * floats(factor);
                }
                store_levels(to + c, pack(steps, &f), channels - c);
            }
#else
            for (int64_t c = 0; c < channels; ++c) {
                const float top = blend(above + left, above + right, c, w, b->zero_in);
                const float bottom = blend(below + left, below + right, c, w, b->zero_in);
                to[c] = (uint8_t)finish((top * v[0] + bottom * v[1]) * factor, q->zero_point, q->low, q->high);
            }
#endif
        }
    }
}

// -- borders ----------------------------------------------------------------------------------------------------------

// level = clamp(rne(x * inverse + offset) + zero_point, low, high)
struct Affine {
    float inverse, offset, scale;
    int32_t zero_point, low, high;
};

static inline uint8_t level_of(float x, const struct Affine* q) {
    return (uint8_t)quantize(x * q->inverse + q->offset, 1.0f, q->zero_point, q->low, q->high);
}

#if defined(__AVX2__)
// By channels: where the bytes of four pixels that came as dwords are, and then the dwords of the 16 bytes that hold four.
static const uint8_t pixel_order[4][16] = {{0, 4, 8, 12}, {0, 1, 4, 5, 8, 9, 12, 13}, {0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};
#endif

#if defined(__AVX512BW__) && defined(__AVX512VL__)
typedef __m512 Plane;
typedef __m512i Dwords;
enum { PLANE = 16 };           // floats of a vector

static inline Plane plane_of(float x) { return _mm512_set1_ps(x); }
static inline Dwords dwords_of(int32_t x) { return _mm512_set1_epi32(x); }
static inline Dwords add_dwords(Dwords a, Dwords b, int64_t channel) { return _mm512_add_epi32(a, _mm512_slli_epi32(b, (unsigned)(8 * channel))); }
static inline Dwords levels_at(const uint8_t* from) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)); }

// Rounded steps from the zero point, within bounds; 0 for NaN.
static inline Dwords bounded_steps(Plane steps, Plane least, Plane most) {
    const __mmask16 number = _mm512_cmp_ps_mask(steps, steps, _CMP_ORD_Q);
    return _mm512_cvtps_epi32(_mm512_maskz_min_ps(number, _mm512_max_ps(steps, least), most));
}

static inline Plane steps_at(const float* from, Plane inverse, Plane offset) {
    return _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(from), inverse), offset);
}

// The low bytes of dwords, `channels` of each -> as many bytes for every pixel.
static inline void store_pixels(uint8_t* to, Dwords dwords, int64_t channels) {
    const __m128i order = _mm_loadu_si128((const __m128i*)pixel_order[channels - 1]);
    const __m512i all = _mm512_permutexvar_epi32(_mm512_cvtepu8_epi32(order), _mm512_shuffle_epi8(dwords, _mm512_broadcast_i32x4(order)));
    _mm_storeu_si128((__m128i*)to, _mm512_castsi512_si128(all));
    if (channels > 1) _mm_storeu_si128((__m128i*)(to + 16), _mm512_extracti32x4_epi32(all, 1));
    if (channels > 2) _mm_storeu_si128((__m128i*)(to + 32), _mm512_extracti32x4_epi32(all, 2));
    if (channels > 3) _mm_storeu_si128((__m128i*)(to + 48), _mm512_extracti32x4_epi32(all, 3));
}
#elif defined(__AVX2__)
typedef __m256 Plane;
typedef __m256i Dwords;
enum { PLANE = 8 };            // floats of a vector

static inline Plane plane_of(float x) { return _mm256_set1_ps(x); }
static inline Dwords dwords_of(int32_t x) { return _mm256_set1_epi32(x); }
static inline Dwords add_dwords(Dwords a, Dwords b, int64_t channel) { return _mm256_add_epi32(a, _mm256_slli_epi32(b, (int)(8 * channel))); }
static inline Dwords levels_at(const uint8_t* from) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)); }

// Rounded steps from the zero point, within bounds; 0 for NaN.
static inline Dwords bounded_steps(Plane steps, Plane least, Plane most) {
    const __m256 number = _mm256_cmp_ps(steps, steps, _CMP_ORD_Q);
    return _mm256_cvtps_epi32(_mm256_and_ps(number, _mm256_min_ps(_mm256_max_ps(steps, least), most)));
}

static inline Plane steps_at(const float* from, Plane inverse, Plane offset) {
    return _mm256_add_ps(_mm256_mul_ps(_mm256_loadu_ps(from), inverse), offset);
}

// The low bytes of dwords, `channels` of each -> as many bytes for every pixel.
static inline void store_pixels(uint8_t* to, Dwords dwords, int64_t channels) {
    const __m128i order = _mm_loadu_si128((const __m128i*)pixel_order[channels - 1]);
    const __m256i all = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(dwords, _mm256_broadcastsi128_si256(order)), _mm256_cvtepu8_epi32(order));
    const __m128i low = _mm256_castsi256_si128(all), high = _mm256_extracti128_si256(all, 1);
    if (channels == 1) _mm_storel_epi64((__m128i*)to, low);
    if (channels > 1) _mm_storeu_si128((__m128i*)to, low);
    if (channels == 3) _mm_storel_epi64((__m128i*)(to + 16), high);
    if (channels > 3) _mm_storeu_si128((__m128i*)(to + 16), high);
}
#endif

#if defined(__AVX2__)
enum { PLANES = 4 };           // at most

// What turns floats of a channel into levels. Bounds are whole steps, so it does not matter that they are taken before
// rounding.
struct Steps { Plane inverse, offset, least, most; };

static inline struct Steps steps_of(const struct Affine* q) {
    const float least = (float)(q->low - q->zero_point), most = (float)(q->high - q->zero_point);
    return (struct Steps){plane_of(q->inverse), plane_of(q->offset), plane_of(least), plane_of(most)};
}

// Pixel where the next vector begins, behind `x`; the last one ends with the row, and may do some pixels again.
static inline int64_t next_vector(int64_t x, int64_t width) { return x + 2 * PLANE <= width || x + PLANE == width ? x + PLANE : width - PLANE; }

// Up to 4 planes of floats -> interleaved levels, each plane by the next `apart` of q. Returns how many pixels it did:
// all, or none of a row narrower than a vector.
static inline int64_t quantize_planes(const float* from, int64_t plane, int64_t width, int64_t channels, uint8_t* to,
                                      const struct Affine* q, int64_t apart) {
    struct Steps by[PLANES];
    uint32_t zeros = 0;        // of all channels, where their bytes are
    for (int64_t c = 0; c < channels; ++c) by[c] = steps_of(q + c * apart), zeros += (uint32_t)q[c * apart].zero_point << 8 * c;
    for (int64_t x = 0; width >= PLANE && x < width; x = next_vector(x, width)) {
        Dwords dwords = dwords_of((int32_t)zeros);
        for (int64_t c = 0; c < channels; ++c) {
            const Plane steps = steps_at(from + c * plane + x, by[c].inverse, by[c].offset);
            dwords = add_dwords(dwords, bounded_steps(steps, by[c].least, by[c].most), c);
        }
        store_pixels(to + x * channels, dwords, channels);
    }
    return width < PLANE ? 0 : width;
}

// Up to 4 planes of bytes -> interleaved; returns as above.
static inline int64_t interleave_planes(const uint8_t* from, int64_t plane, int64_t width, int64_t channels, uint8_t* to) {
    for (int64_t x = 0; width >= PLANE && x < width; x = next_vector(x, width)) {
        Dwords dwords = levels_at(from + x);
        for (int64_t c = 1; c < channels; ++c) dwords = add_dwords(dwords, levels_at(from + c * plane + x), c);
        store_pixels(to + x * channels, dwords, channels);
    }
    return width < PLANE ? 0 : width;
}

static inline int64_t quantize_line(const float* from, int64_t count, uint8_t* to, const struct Affine* q) {
    return quantize_planes(from, 0, count, 1, to, q, 0);
}
#else
enum { PLANES = 0 };

static inline int64_t quantize_planes(const float* from, int64_t plane, int64_t width, int64_t channels, uint8_t* to,
                                      const struct Affine* q, int64_t apart) {
    (void)from, (void)plane, (void)width, (void)channels, (void)to, (void)q, (void)apart;
    return 0;
}

static inline int64_t interleave_planes(const uint8_t* from, int64_t plane, int64_t width, int64_t channels, uint8_t* to) {
    (void)from, (void)plane, (void)width, (void)channels, (void)to;
    return 0;
}

static inline int64_t quantize_line(const float* from, int64_t count, uint8_t* to, const struct Affine* q) {
    (void)from, (void)count, (void)to, (void)q;
    return 0;
}
#endif

// float, any strides (elements; batch, channel, row, column) -> levels. Channels are `apart` in q: 1, or 0 for all alike.
static inline void quantize_image(const float* from, const int64_t* strides, const struct Image* out, const struct Affine* q,
                                  int64_t apart, int thread, int threads) {
    const int64_t channels = out->pixel;
    FOR_EACH_ROW(out) {
        const float* line = from + n * strides[0] + y * strides[2];
        uint8_t* to = at(out, n, y, 0);
        if (strides[1] == 1 || channels == 1) {
            const int64_t run = !apart && strides[3] == channels ? out->width : 1;  // pixels without gaps, alike
            for (int64_t x = 0; x < out->width; x += run, to += run * channels) {
                const float* pixel = line + x * strides[3];
                for (int64_t i = apart ? 0 : quantize_line(pixel, run * channels, to, q); i < run * channels; ++i)
                    to[i] = level_of(pixel[i], q + i * apart);
            }
            continue;
        }
        int64_t done = 0;
        if (strides[3] == 1 && channels <= PLANES)
            done = quantize_planes(line, strides[1], out->width, channels, to, q, apart);
        for (int64_t c = 0; c < channels; ++c)
            for (int64_t x = done; x < out->width; ++x)
                to[x * channels + c] = level_of(line[c * strides[1] + x * strides[3]], q + c * apart);
    }
}

// Levels in any strides -> the same levels, channels last.
static inline void copy_image(const uint8_t* from, const int64_t* strides, const struct Image* out, int thread, int threads) {
    const int64_t channels = out->pixel;
    FOR_EACH_ROW(out) {
        const uint8_t* line = from + n * strides[0] + y * strides[2];
        uint8_t* to = at(out, n, y, 0);
        if (strides[1] == 1 && strides[3] == channels) {
            memcpy(to, line, (size_t)(out->width * channels));
            continue;
        }
        int64_t done = 0;
        if (strides[3] == 1 && channels <= PLANES) done = interleave_planes(line, strides[1], out->width, channels, to);
        for (int64_t c = 0; c < channels; ++c)
            for (int64_t x = done; x < out->width; ++x) to[x * channels + c] = line[c * strides[1] + x * strides[3]];
    }
}

// Levels -> dense NHWC floats.
static inline void dequantize_image(const struct Image* in, float* to, const struct Affine* q, int thread, int threads) {
    FOR_EACH_ROW(in) {
        const uint8_t* from = at(in, n, y, 0);
        float* out = to + (n * in->height + y) * in->width * in->pixel;
        for (int64_t i = 0; i < in->width * in->pixel; ++i) out[i] = dequantize(from[i], q->zero_point, q->scale);
    }
}

// -- plan -------------------------------------------------------------------------------------------------------------

// Life of one buffer: the phases in which it holds data.
struct Life { int32_t first, last; };

// Lowest place for each buffer, in the order given, that overlaps no buffer alive at the same time; returns the bytes
// of the arena. Offsets are multiples of 64.
static inline int64_t place(const struct Life* lives, const int64_t* sizes, int count, int64_t* offsets) {
    int64_t arena = 0;
    for (int i = 0; i < count; ++i) {
        const int64_t size = (sizes[i] + 64 + 63) / 64 * 64;
        int64_t offset = 0;
        for (int moved = 1; moved;) {
            moved = 0;
            for (int j = 0; j < i; ++j) {
                if (lives[j].first > lives[i].last || lives[i].first > lives[j].last) continue;
                const int64_t end = offsets[j] + (sizes[j] + 64 + 63) / 64 * 64;
                if (offset < end && offsets[j] < offset + size) offset = end, moved = 1;
            }
        }
        offsets[i] = offset;
        if (offset + size > arena) arena = offset + size;
    }
    return arena;
}
