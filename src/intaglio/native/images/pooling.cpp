// Max and average pooling, see pooling.h.

#include "images/pooling.h"

#include "base/numerics.h"
#include "base/vectors.h"

enum { SHARED_BYTES = 1 << 16 };  // bytes of an image; threads sum larger ones together

typedef uint8_t Lanes __attribute__((vector_size(WIDE)));  // channels; lanes past the last one are read, but not used

// The part of a pooling window that is inside the input, along one axis: `start` is its first position. `count` is the
// number of taps, or the factor of the divisor along this axis.
struct Window {
    int64_t start, stop, count;
};

// Return the taps of output `index` of max pooling that are inside an axis of `size`: the position of the first tap,
// and the number of taps.
static inline struct Window taps_inside(const struct PoolAxis* axis, int64_t index, int64_t size) {
    struct Window w = {0, axis->kernel, 0};
    const int64_t start = index * axis->stride - axis->before;
    if (start < 0) w.start = at_most((axis->dilation - 1 - start) / axis->dilation, axis->kernel);
    if (start + (axis->kernel - 1) * axis->dilation >= size)
        w.stop = size > start ? at_least((size - start + axis->dilation - 1) / axis->dilation, w.start) : w.start;
    w.count = w.stop - w.start;
    w.start = start + w.start * axis->dilation;
    return w;
}

LIBRARY void max_pool(const struct Pool* p, int thread, int threads) {
    const int64_t rows = p->out.images * p->out.height, channels = p->in.pixel;
    const int64_t step_z = p->z.dilation * p->in.image, step_y = p->y.dilation * p->in.line,
                  step_x = p->x.dilation * p->in.pixel;
    for (int64_t r = shard_begin(rows, thread, threads); r < shard_begin(rows, thread + 1, threads); ++r) {
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
                            Lanes lanes;
                            memcpy(&lanes, tap, WIDE);
                            best = lanes > best ? lanes : best;
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

// Return the window of output `index` of average pooling: positions `start` to `stop` (exclusive) of the input.
static inline struct Window window(const struct Pool* p, const struct PoolAxis* axis, int64_t index, int64_t outputs,
                                   int64_t size) {
    struct Window w;
    if (p->adaptive) {
        w.start = index * size / outputs;
        w.stop = ((index + 1) * size + outputs - 1) / outputs;
        w.count = w.stop - w.start;
        return w;
    }
    const int64_t start = index * axis->stride - axis->before,
                  stop = at_most(start + axis->kernel, size + axis->before);
    w.start = at_least(start, 0);
    w.stop = at_least(w.start, at_most(stop, size));
    w.count = p->include_pad ? stop - start : w.stop - w.start;
    return w;
}

// Sums per channel of some pixels, WIDE channels at a time. Each 16-bit word holds two channels: `words` sums the words
// modulo 2^16, and `upper` sums their high bytes. Both channels' sums follow from these two while they are below 2^16;
// then they are added to the 32-bit totals.
#if defined(VECTORS)
enum { HELD = 257 };  // pixels summed in 16 bits; HELD * 255 is below 2^16
struct Sums {
    Words words, upper;
    Ints total[4];
    int64_t held;
};

// Add the 16-bit sums to the totals.
static inline void spread_sums(struct Sums* s) {
    const Words even = s->words - (s->upper << 8), none = {};
    const VectorU8 low = unpack_low((VectorU8)even, (VectorU8)s->upper),
                   high = unpack_high((VectorU8)even, (VectorU8)s->upper);
    s->total[0] += (Ints)unpack_low(low, (VectorU8)none), s->total[1] += (Ints)unpack_high(low, (VectorU8)none);
    s->total[2] += (Ints)unpack_low(high, (VectorU8)none), s->total[3] += (Ints)unpack_high(high, (VectorU8)none);
    s->words = s->upper = none, s->held = 0;
}

// Add `count` pixels whose addresses are `stride` bytes from each other.
static inline void sum_pixels(struct Sums* s, const uint8_t* from, int64_t count, int64_t stride) {
    while (count) {
        if (s->held == HELD) spread_sums(s);
        const int64_t some = at_most(count, HELD - s->held);
        for (int64_t i = 0; i < some; ++i, from += stride) {
            const Words x = (Words)load_u8(from, WIDE);
            s->words += x, s->upper += x >> 8;
        }
        s->held += some, count -= some;
    }
}

// Store the totals in the order of channels.
static inline void store_sums(struct Sums* s, int32_t* to) {
    spread_sums(s);
    for (int j = 0; j < 4; ++j)
        for (int lane = 0; lane < WIDE / 16; ++lane)
            memcpy(to + 16 * lane + 4 * j, (const char*)&s->total[j] + 16 * lane, 16);
}

// Requantize: clamp(rne((sum - real) * factor) + zero_point, low, high). `real` is the sum of the zero points.
static inline void finish_sums(struct Sums* s, int32_t real, float factor, const struct Limits* q, uint8_t* to,
                               int64_t count) {
    const struct PackConstants f = pack_constants(q, UNBOUNDED_STEPS);
    Floats steps[4];
    spread_sums(s);
    for (int j = 0; j < 4; ++j) steps[j] = __builtin_convertvector(s->total[j] - real, Floats) * floats(factor);
    store_u8(to, round_and_pack(steps, &f), count);
}
#else
struct Sums {
    int32_t total[WIDE];
};

// Add `count` pixels whose addresses are `stride` bytes from each other.
static inline void sum_pixels(struct Sums* s, const uint8_t* from, int64_t count, int64_t stride) {
    for (int64_t i = 0; i < count; ++i, from += stride)
        for (int l = 0; l < WIDE; ++l) s->total[l] += from[l];
}

static inline void store_sums(struct Sums* s, int32_t* to) { memcpy(to, s->total, sizeof s->total); }

static inline void finish_sums(struct Sums* s, int32_t real, float factor, const struct Limits* q, uint8_t* to,
                               int64_t count) {
    for (int64_t l = 0; l < at_most(count, WIDE); ++l)
        to[l] = (uint8_t)requantize(s->total[l] - real, factor, q->zero_point, q->low, q->high);
}
#endif

// Return the multiplier for a divisor of `count`, see pool_multipliers of numerics/scales.py.
static inline float factor_of(const struct Pool* p, int64_t count) {
    return p->factors ? p->factors[p->fixed_divisor ? 0 : count - 1] : (float)(p->ratio / (double)count);
}

// Average pooling in which threads share rows of the output and blocks of WIDE channels.
static inline void avg_pool_rows(const struct Pool* p, int thread, int threads) {
    const int64_t channels = p->in.pixel, parts = (channels + WIDE - 1) / WIDE;
    const int64_t units = p->out.images * p->out.height * parts;
    for (int64_t u = shard_begin(units, thread, threads); u < shard_begin(units, thread + 1, threads); ++u) {
        const int64_t c = u % parts * WIDE, r = u / parts, i = r / p->out.height, y = r % p->out.height,
                      n = i / p->depth_out;
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

// Sum rows first to last (exclusive) of an image per channel. If whole pixels fill a vector, several are summed at
// once.
static inline void sum_rows(const struct Image* in, int64_t first, int64_t last, int32_t* to) {
    const int64_t channels = in->pixel, fit = WIDE / channels;
    const int64_t pixels = fit && WIDE % channels == 0 && in->width % fit == 0 ? fit : 1;
    for (int64_t c = 0; c < channels; c += WIDE) {
        int32_t total[WIDE];
        struct Sums sums = {};
        for (int64_t y = first; y < last; ++y)
            sum_pixels(&sums, at(in, 0, y, 0) + c, in->width / pixels, pixels * channels);
        store_sums(&sums, total);
        for (int64_t l = channels; l < pixels * channels; ++l) total[l % channels] += total[l];
        memcpy(to + c, total, sizeof *total * (size_t)at_most(WIDE, channels - c));
    }
}

// Average pooling over one whole image: each thread sums some of the rows, probably those that it has written, and then
// requantizes some of the channels.
static inline void mean_of_image(const struct Pool* p, struct IntaglioBarrier* barrier, int thread, int threads) {
    enum { SOME = 16 };
    const int64_t channels = p->in.pixel, pixels = p->in.height * p->in.width, parts = (channels + SOME - 1) / SOME;
    const int shares = threads < p->shares ? threads : (int)p->shares;
    const struct Limits* q = p->limits;
    const float factor = factor_of(p, pixels);
    if (thread < shares)
        sum_rows(&p->in, shard_begin(p->in.height, thread, shares), shard_begin(p->in.height, thread + 1, shares),
                 p->sums + thread * channels);
    intaglio_barrier_wait(barrier, threads);
    for (int64_t c = shard_begin(parts, thread, threads) * SOME; c < shard_begin(parts, thread + 1, threads) * SOME;
         c += SOME) {
        int32_t total[SOME] = {0};
        for (int64_t s = 0; s < shares; ++s)  // entries past the last channel are read, but not used
            for (int l = 0; l < SOME; ++l) total[l] += p->sums[s * channels + c + l];
        for (int64_t l = 0; l < at_most(SOME, channels - c); ++l)
            p->out.base[c + l] =
                (uint8_t)requantize(total[l] - (int32_t)pixels * p->zero_in, factor, q->zero_point, q->low, q->high);
    }
}

LIBRARY void avg_pool(const struct Pool* p, struct IntaglioBarrier* barrier, int thread, int threads) {
    if (p->sums && p->in.images == 1 && p->in.image >= SHARED_BYTES)
        mean_of_image(p, barrier, thread, threads);
    else
        avg_pool_rows(p, thread, threads);
}
