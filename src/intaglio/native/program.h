// What every generated program is made of: images in memory, loops over tiles, pooling, moves, borders.
// Geometry is data here; channels, taps and tiles arrive as constants from the generated text, which the compiler sees.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

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
};

// An NHWC tensor; `base` is the first pixel inside the halo, `pixel` the bytes of one pixel.
struct Image {
    uint8_t* base;
    int64_t images, height, width, pixel, halo, line, image;
};

static inline struct Image image(uint8_t* start, int64_t images, int64_t height, int64_t width, int64_t pixel, int64_t halo) {
    struct Image i = {start, images, height, width, pixel, halo, (width + 2 * halo) * pixel, 0};
    i.image = (height + 2 * halo) * i.line;
    i.base += halo * i.line + halo * pixel;
    return i;
}

static inline uint8_t* at(const struct Image* i, int64_t n, int64_t y, int64_t x) {
    return i->base + n * i->image + y * i->line + x * i->pixel;
}

static inline int64_t share(int64_t total, int thread, int threads) { return total * thread / threads; }

// This thread's part of the frame around each image gets the zero point.
static inline void fill_halo(const struct Image* i, uint8_t level, int thread, int threads) {
    const int64_t rows = i->height + 2 * i->halo, side = i->halo * i->pixel;
    for (int64_t r = share(i->images * rows, thread, threads); r < share(i->images * rows, thread + 1, threads); ++r) {
        const int64_t y = r % rows - i->halo;
        uint8_t* line = at(i, r / rows, y, -i->halo);
        if (y < 0 || y >= i->height) {
            memset(line, level, (size_t)i->line);
        } else {
            memset(line, level, (size_t)side);
            memset(line + i->line - side, level, (size_t)side);
        }
    }
}

// Bounds and zero points of a requantization, in the widths kernels want them.
struct Limits {
    int16_t zero_point16[32];
    uint8_t low8[64], high8[64];
    int32_t zero_point, low, high, other_zero_point;
    float convertible_low, convertible_high;
};

// One call of a microkernel: `rows` output pixels by blocks of 16 channels. Strides in bytes; `run` in 4-byte steps.
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
    int64_t mask;              // channels of the last block
};

typedef void (*TileKernel)(const struct Tile*);

// A convolution or linear layer over one pair of images.
struct Matmul {
    struct Image in, out, other;
    int64_t stride_y, stride_x, top, left;
    struct Tile tile;                      // everything that does not change from call to call
    int64_t panels, blocks, panel_bytes, out_bytes;
    const int32_t* first_channel;          // per panel, of the input; null when it is always 0
    int64_t flat;                          // every output pixel's taps follow the last one's
    int64_t rows;                          // tallest tile
    int64_t last_mask;
    const TileKernel* kernels;             // by tile height, full panels
    const TileKernel* last_kernels;        // by tile height, the last panel
    int64_t split_channels_below;          // fewer output pixels than this: threads share panels, not pixels
    int64_t chunk_bytes;                   // input that stays in cache while all panels pass over it
};

// Tiles first..last of one panel. Heights are nearly equal, so no tile is a thin rest.
static __attribute__((noinline)) void matmul_span(const struct Matmul* m, int64_t panel, int64_t first, int64_t last, int64_t tiles, int64_t width) {
    struct Tile t = m->tile;
    const int last_panel = panel == m->panels - 1;
    const TileKernel* kernels = last_panel ? m->last_kernels : m->kernels;
    const int64_t channel = panel * m->blocks * 16;
    const int64_t offset = m->first_channel ? m->first_channel[panel] : 0;
    t.b += panel * m->panel_bytes;
    t.bias += channel;
    t.factor += channel;
    if (t.other_factor) t.other_factor += channel;
    if (last_panel) t.mask = m->last_mask;
    const int32_t least = (int32_t)(width / tiles), longer = (int32_t)(width % tiles), per_image = (int32_t)m->out.height;
    int32_t line = (int32_t)(first / tiles), i = (int32_t)(first % tiles);
    for (int64_t done = first; done < last;) {
        const int64_t n = m->flat ? 0 : line / per_image, y = m->flat ? 0 : line % per_image;
        const uint8_t* a = at(&m->in, n, y * m->stride_y - m->top, -m->left) + offset;
        uint8_t* out = at(&m->out, n, y, 0) + channel * m->out_bytes;
        const uint8_t* other = m->other.base ? at(&m->other, n, y, 0) + channel : 0;
        for (; i < tiles && done < last; ++i, ++done) {
            const int64_t x = (int64_t)i * least + (i < longer ? i : longer);
            t.a = a + x * t.a_pixel;
            t.out = out + x * t.out_pixel;
            t.other = other + x * t.other_pixel;
            kernels[least + (i < longer)](&t);
        }
        i = 0;
        ++line;
    }
}

static __attribute__((noinline)) void matmul(const struct Matmul* m, int thread, int threads) {
    const int64_t pixels = m->out.images * m->out.height * m->out.width;
    const int64_t lines = m->flat ? 1 : m->out.images * m->out.height, width = m->flat ? pixels : m->out.width;
    if (!pixels) return;
    const int64_t tiles = (width + m->rows - 1) / m->rows, total = lines * tiles;
    if (pixels < m->split_channels_below || total < threads) {
        const int64_t first = share(m->panels * total, thread, threads), last = share(m->panels * total, thread + 1, threads);
        for (int64_t unit = first; unit < last;) {
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

// -- 16 levels at a time --------------------------------------------------------------------------------------------

// clamp(rne(steps) + zero_point) of 16 products in float, stored as 16 levels.
#if defined(__AVX512BW__) && defined(__AVX512VL__)
static inline __m512 centred16(const uint8_t* from, int32_t zero) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(wide, _mm512_set1_epi32(zero)));
}

static inline void finish16(__m512 steps, const struct Limits* q, uint8_t* to) {
    steps = _mm512_max_ps(steps, _mm512_set1_ps(q->convertible_low));
    steps = _mm512_min_ps(steps, _mm512_set1_ps(q->convertible_high));
    __m512i level = _mm512_add_epi32(_mm512_cvtps_epi32(steps), _mm512_set1_epi32(q->zero_point));
    level = _mm512_min_epi32(_mm512_max_epi32(level, _mm512_set1_epi32(q->low)), _mm512_set1_epi32(q->high));
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(level));
}
#endif

// -- pooling ----------------------------------------------------------------------------------------------------------

struct Pool {
    struct Image in, out;
    int64_t kernel_y, kernel_x, stride_y, stride_x, top, left, dilation_y, dilation_x;
    int64_t include_pad, fixed_divisor, adaptive;
    int32_t zero_in;
    const float* factors;      // by divisor, from 1; only one when the divisor is fixed
    const struct Limits* limits;
};

enum { LANES = 64 };           // channels pooled at a time

static inline int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most_of(int64_t a, int64_t b) { return a > b ? a : b; }

static inline void max_pool(const struct Pool* p, int thread, int threads) {
    const int64_t rows = p->out.images * p->out.height, channels = p->in.pixel;
    for (int64_t r = share(rows, thread, threads); r < share(rows, thread + 1, threads); ++r) {
        const int64_t n = r / p->out.height, y0 = r % p->out.height * p->stride_y - p->top;
        for (int64_t x = 0; x < p->out.width; ++x) {
            const int64_t x0 = x * p->stride_x - p->left;
            uint8_t* out = at(&p->out, n, r % p->out.height, x);
            for (int64_t c = 0; c < channels; c += LANES) {
                const int64_t lanes = least_of(LANES, channels - c);
                uint8_t best[LANES] = {0};
                for (int64_t ky = 0; ky < p->kernel_y; ++ky) {
                    const int64_t y = y0 + ky * p->dilation_y;
                    if (y < 0 || y >= p->in.height) continue;
                    for (int64_t kx = 0; kx < p->kernel_x; ++kx) {
                        const int64_t column = x0 + kx * p->dilation_x;
                        if (column < 0 || column >= p->in.width) continue;
                        const uint8_t* in = at(&p->in, n, y, column) + c;
                        if (lanes == LANES)
                            for (int l = 0; l < LANES; ++l) best[l] = in[l] > best[l] ? in[l] : best[l];
                        else
                            for (int64_t l = 0; l < lanes; ++l) best[l] = in[l] > best[l] ? in[l] : best[l];
                    }
                }
                memcpy(out + c, best, (size_t)lanes);
            }
        }
    }
}

// Window of one output along one axis: what it reads, and what it divides by.
struct Window { int64_t start, stop, count; };

static inline struct Window window(const struct Pool* p, int64_t index, int64_t outputs, int64_t size, int64_t kernel,
                                   int64_t stride, int64_t pad) {
    struct Window w;
    if (p->adaptive) {
        w.start = index * size / outputs;
        w.stop = ((index + 1) * size + outputs - 1) / outputs;
        w.count = w.stop - w.start;
        return w;
    }
    const int64_t start = index * stride - pad, stop = least_of(start + kernel, size + pad);
    w.start = most_of(start, 0);
    w.stop = most_of(w.start, least_of(stop, size));
    w.count = p->include_pad ? stop - start : w.stop - w.start;
    return w;
}

static inline void avg_pool(const struct Pool* p, int thread, int threads) {
    const int64_t channels = p->in.pixel, parts = (channels + LANES - 1) / LANES;
    const int64_t units = p->out.images * p->out.height * parts;
    const struct Limits* q = p->limits;
    for (int64_t u = share(units, thread, threads); u < share(units, thread + 1, threads); ++u) {
        const int64_t c = u % parts * LANES, r = u / parts, n = r / p->out.height, y = r % p->out.height;
        const int64_t lanes = least_of(LANES, channels - c);
        const struct Window rows = window(p, y, p->out.height, p->in.height, p->kernel_y, p->stride_y, p->top);
        for (int64_t x = 0; x < p->out.width; ++x) {
            const struct Window columns = window(p, x, p->out.width, p->in.width, p->kernel_x, p->stride_x, p->left);
            int32_t sum[LANES] = {0};
            for (int64_t iy = rows.start; iy < rows.stop; ++iy)
                for (int64_t ix = columns.start; ix < columns.stop; ++ix) {
                    const uint8_t* in = at(&p->in, n, iy, ix) + c;
                    if (lanes == LANES)
                        for (int l = 0; l < LANES; ++l) sum[l] += in[l];
                    else
                        for (int64_t l = 0; l < lanes; ++l) sum[l] += in[l];
                }
            const int32_t real = (int32_t)((rows.stop - rows.start) * (columns.stop - columns.start)) * p->zero_in;
            const float factor = p->factors[p->fixed_divisor ? 0 : rows.count * columns.count - 1];
            uint8_t* out = at(&p->out, n, y, x) + c;
            int64_t l = 0;
#if defined(__AVX512BW__) && defined(__AVX512VL__)
            for (; l + 16 <= lanes; l += 16) {
                const __m512i centred = _mm512_sub_epi32(_mm512_loadu_si512(sum + l), _mm512_set1_epi32(real));
                finish16(_mm512_mul_ps(_mm512_cvtepi32_ps(centred), _mm512_set1_ps(factor)), q, out + l);
            }
#endif
            for (; l < lanes; ++l)
                out[l] = (uint8_t)requantize(sum[l] - real, factor, q->zero_point, q->low, q->high);
        }
    }
}

// -- levels to levels -------------------------------------------------------------------------------------------------

// Rows of pixels of equal geometry, one thread's share: `each(in, other, out, bytes)` for every row.
#define FOR_EACH_ROW(out_image)                                                                           \
    for (int64_t r_ = share((out_image)->images * (out_image)->height, thread, threads),                  \
                 end_ = share((out_image)->images * (out_image)->height, thread + 1, threads),            \
                 n = 0, y = 0;                                                                            \
         r_ < end_ && (n = r_ / (out_image)->height, y = r_ % (out_image)->height, 1); ++r_)

// Two operands with their zero points and factors; a product has one factor, the first.
struct Pair {
    struct Image a, b, out;
    int32_t zero_a;
    const float *factor_a, *factor_b;
    const struct Limits* limits;
};

static inline void add_line(const struct Pair* p, const uint8_t* a, const uint8_t* b, uint8_t* to, int64_t count) {
    const struct Limits* q = p->limits;
    int64_t i = 0;
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const __m512 factor_a = _mm512_set1_ps(p->factor_a[0]), factor_b = _mm512_set1_ps(p->factor_b[0]);
    for (; i + 16 <= count; i += 16)
        finish16(_mm512_add_ps(_mm512_mul_ps(centred16(a + i, p->zero_a), factor_a),
                               _mm512_mul_ps(centred16(b + i, q->other_zero_point), factor_b)), q, to + i);
#endif
    for (; i < count; ++i)
        to[i] = (uint8_t)add_requantize(a[i] - p->zero_a, p->factor_a[0], b[i] - q->other_zero_point, p->factor_b[0],
                                        q->zero_point, q->low, q->high);
}

static inline void mul_line(const struct Pair* p, const uint8_t* a, const uint8_t* b, uint8_t* to, int64_t count) {
    const struct Limits* q = p->limits;
    int64_t i = 0;
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    // A product of two differences of levels is below 2^17, so float32 holds it exactly.
    const __m512 factor = _mm512_set1_ps(p->factor_a[0]);
    for (; i + 16 <= count; i += 16) {
        const __m512 product = _mm512_mul_ps(centred16(a + i, p->zero_a), centred16(b + i, q->other_zero_point));
        finish16(_mm512_mul_ps(product, factor), q, to + i);
    }
#endif
    for (; i < count; ++i)
        to[i] = (uint8_t)requantize((a[i] - p->zero_a) * (b[i] - q->other_zero_point), p->factor_a[0], q->zero_point, q->low,
                                    q->high);
}

// Whole rows at once; pixel by pixel where an operand has one pixel for an image.
static inline void pair_levels(const struct Pair* p, void (*line)(const struct Pair*, const uint8_t*, const uint8_t*, uint8_t*, int64_t),
                               int thread, int threads) {
    const int one_a = p->a.height * p->a.width == 1, one_b = p->b.height * p->b.width == 1;
    const int64_t pixel = p->out.pixel;
    FOR_EACH_ROW(&p->out) {
        const uint8_t* a = at(&p->a, n, one_a ? 0 : y, 0);
        const uint8_t* b = at(&p->b, n, one_b ? 0 : y, 0);
        uint8_t* to = at(&p->out, n, y, 0);
        if (!one_a && !one_b)
            line(p, a, b, to, p->out.width * pixel);
        else
            for (int64_t x = 0; x < p->out.width; ++x)
                line(p, a + (one_a ? 0 : x * pixel), b + (one_b ? 0 : x * pixel), to + x * pixel, pixel);
    }
}

// A factor and an offset per channel: batch norm on its own.
static inline void affine_levels(const struct Image* in, const struct Image* out, int32_t zero, const float* factor,
                                 const float* offset, const struct Limits* q, int thread, int threads) {
    FOR_EACH_ROW(out) {
        for (int64_t x = 0; x < out->width; ++x) {
            const uint8_t* from = at(in, n, y, x);
            uint8_t* to = at(out, n, y, x);
            int64_t c = 0;
#if defined(__AVX512BW__) && defined(__AVX512VL__)
            for (; c + 16 <= out->pixel; c += 16)
                finish16(_mm512_add_ps(_mm512_mul_ps(centred16(from + c, zero), _mm512_loadu_ps(factor + c)),
                                       _mm512_loadu_ps(offset + c)), q, to + c);
#endif
            for (; c < out->pixel; ++c)
                to[c] = (uint8_t)finish((float)(from[c] - zero) * factor[c] + offset[c], q->zero_point, q->low, q->high);
        }
    }
}

// Channel c of the result is channel (c % groups) * (channels / groups) + c / groups of the input.
static inline void shuffle_levels(const struct Image* in, const struct Image* out, int64_t groups, int thread, int threads) {
    const int64_t each = in->pixel / groups;
    FOR_EACH_ROW(out) {
        for (int64_t x = 0; x < out->width; ++x) {
            const uint8_t* from = at(in, n, y, x);
            uint8_t* to = at(out, n, y, x);
            for (int64_t g = 0; g < groups; ++g)
                for (int64_t i = 0; i < each; ++i) to[i * groups + g] = from[g * each + i];
        }
    }
}

// The channels of one operand of a concatenation.
static inline void join_levels(const struct Image* in, const struct Image* out, int64_t channel, int thread, int threads) {
    FOR_EACH_ROW(in) {
        const uint8_t* from = at(in, n, y, 0);
        uint8_t* to = at(out, n, y, 0) + channel;
        for (int64_t x = 0; x < in->width; ++x) memcpy(to + x * out->pixel, from + x * in->pixel, (size_t)in->pixel);
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

static inline void look_up(const struct Image* in, const struct Image* out, const uint8_t* table, int thread, int threads) {
    FOR_EACH_ROW(out) {
        const uint8_t* from = at(in, n, y, 0);
        uint8_t* to = at(out, n, y, 0);
        for (int64_t i = 0; i < out->width * out->pixel; ++i) to[i] = table[from[i]];
    }
}

// out[n, y, x, c] = in[n0 + sn*n, y0 + sy*y, x0 + sx*x, c0 + sc*c] where that lies inside, else `level`: slice and pad.
struct Move {
    struct Image in, out;
    int64_t n0, y0, x0, c0, sn, sy, sx, sc;
    uint8_t level;
};

static inline void move_levels(const struct Move* m, int thread, int threads) {
    FOR_EACH_ROW(&m->out) {
        const int64_t from_n = m->n0 + m->sn * n, from_y = m->y0 + m->sy * y;
        const int outside = from_n < 0 || from_n >= m->in.images || from_y < 0 || from_y >= m->in.height;
        for (int64_t x = 0; x < m->out.width; ++x) {
            const int64_t from_x = m->x0 + m->sx * x;
            uint8_t* to = at(&m->out, n, y, x);
            if (outside || from_x < 0 || from_x >= m->in.width) {
                memset(to, m->level, (size_t)m->out.pixel);
                continue;
            }
            const uint8_t* from = at(&m->in, from_n, from_y, from_x);
            if (m->sc == 1 && m->c0 >= 0 && m->c0 + m->out.pixel <= m->in.pixel) {
                memcpy(to, from + m->c0, (size_t)m->out.pixel);
                continue;
            }
            for (int64_t c = 0; c < m->out.pixel; ++c) {
                const int64_t from_c = m->c0 + m->sc * c;
                to[c] = from_c < 0 || from_c >= m->in.pixel ? m->level : from[from_c];
            }
        }
    }
}

// Logical (channels second) order of both is the same; memory order is each one's own.
static inline void reshape_levels(const struct Image* in, const struct Image* out, int thread, int threads) {
    const int64_t in_pixels = in->height * in->width, out_pixels = out->height * out->width;
    const int64_t in_size = in->pixel * in_pixels, total = out->images * out->pixel;
    for (int64_t u = share(total, thread, threads); u < share(total, thread + 1, threads); ++u) {
        const int64_t n = u / out->pixel, c = u % out->pixel;
        for (int64_t p = 0; p < out_pixels; ++p) {
            const int64_t logical = (n * out->pixel + c) * out_pixels + p, rest = logical % in_size;
            const int64_t pixel = rest % in_pixels;
            at(out, n, p / out->width, p % out->width)[c] =
                at(in, logical / in_size, pixel / in->width, pixel % in->width)[rest / in_pixels];
        }
    }
}

// -- borders ----------------------------------------------------------------------------------------------------------

struct Affine {
    float inverse, scale;
    int32_t zero_point, low, high;
};

#if defined(__AVX2__)
// By channels: the bytes of four pixels that came as dwords, moved together.
static const uint8_t pixel_order[4][16] = {{0, 4, 8, 12}, {0, 1, 4, 5, 8, 9, 12, 13}, {0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};
#endif

#if defined(__AVX512BW__) && defined(__AVX512VL__)
// 16 floats -> 16 levels in dwords; NaN gives the zero point. The clamp in float keeps the conversion defined.
static inline __m512i quantize16(__m512 x, const struct Affine* q) {
    const __m512 steps = _mm512_mul_ps(x, _mm512_set1_ps(q->inverse));
    const __mmask16 number = _mm512_cmp_ps_mask(steps, steps, _CMP_ORD_Q);
    const __m512 bounded = _mm512_min_ps(_mm512_max_ps(steps, _mm512_set1_ps(-1024.0f)), _mm512_set1_ps(1024.0f));
    const __m512i level = _mm512_add_epi32(_mm512_maskz_cvtps_epi32(number, bounded), _mm512_set1_epi32(q->zero_point));
    return _mm512_min_epi32(_mm512_max_epi32(level, _mm512_set1_epi32(q->low)), _mm512_set1_epi32(q->high));
}

// Up to 4 planes of floats -> interleaved levels; returns how many pixels it did, leaving the last 16 or fewer: its
// 16-byte stores reach into the pixels after those it makes.
static inline int64_t quantize_planes(const float* from, int64_t plane, int64_t width, int64_t channels, uint8_t* to,
                                      const struct Affine* q) {
    const __m512i shuffle = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)pixel_order[channels - 1]));
    int64_t x = 0;
    for (; x + 32 <= width; x += 16) {
        __m512i all = quantize16(_mm512_loadu_ps(from + x), q);
        for (int64_t c = 1; c < channels; ++c)
            all = _mm512_or_si512(all, _mm512_slli_epi32(quantize16(_mm512_loadu_ps(from + c * plane + x), q), (unsigned)(8 * c)));
        all = _mm512_shuffle_epi8(all, shuffle);
        uint8_t* out = to + x * channels;
        _mm_storeu_si128((__m128i*)out, _mm512_castsi512_si128(all));
        _mm_storeu_si128((__m128i*)(out + 4 * channels), _mm512_extracti32x4_epi32(all, 1));
        _mm_storeu_si128((__m128i*)(out + 8 * channels), _mm512_extracti32x4_epi32(all, 2));
        _mm_storeu_si128((__m128i*)(out + 12 * channels), _mm512_extracti32x4_epi32(all, 3));
    }
    return x;
}

static inline int64_t quantize_line(const float* from, int64_t count, uint8_t* to, const struct Affine* q) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        _mm_storeu_si128((__m128i*)(to + i), _mm512_cvtepi32_epi8(quantize16(_mm512_loadu_ps(from + i), q)));
    return i;
}
#elif defined(__AVX2__)
// 8 floats -> 8 levels in dwords; NaN gives the zero point. The clamp in float keeps the conversion defined.
static inline __m256i quantize8(__m256 x, const struct Affine* q) {
    const __m256 steps = _mm256_mul_ps(x, _mm256_set1_ps(q->inverse));
    const __m256 number = _mm256_cmp_ps(steps, steps, _CMP_ORD_Q);
    const __m256 bounded = _mm256_min_ps(_mm256_max_ps(steps, _mm256_set1_ps(-1024.0f)), _mm256_set1_ps(1024.0f));
    const __m256i level = _mm256_add_epi32(_mm256_cvtps_epi32(_mm256_and_ps(number, bounded)), _mm256_set1_epi32(q->zero_point));
    return _mm256_min_epi32(_mm256_max_epi32(level, _mm256_set1_epi32(q->low)), _mm256_set1_epi32(q->high));
}

// As above, 8 pixels at a time; it leaves the last 16 or fewer, too.
static inline int64_t quantize_planes(const float* from, int64_t plane, int64_t width, int64_t channels, uint8_t* to,
                                      const struct Affine* q) {
    const __m256i shuffle = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)pixel_order[channels - 1]));
    int64_t x = 0;
    for (; x + 24 <= width; x += 8) {
        __m256i all = quantize8(_mm256_loadu_ps(from + x), q);
        for (int64_t c = 1; c < channels; ++c)
            all = _mm256_or_si256(all, _mm256_slli_epi32(quantize8(_mm256_loadu_ps(from + c * plane + x), q), (int)(8 * c)));
        all = _mm256_shuffle_epi8(all, shuffle);
        uint8_t* out = to + x * channels;
        _mm_storeu_si128((__m128i*)out, _mm256_castsi256_si128(all));
        _mm_storeu_si128((__m128i*)(out + 4 * channels), _mm256_extracti128_si256(all, 1));
    }
    return x;
}

static inline int64_t quantize_line(const float* from, int64_t count, uint8_t* to, const struct Affine* q) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const __m256i words = _mm256_packs_epi32(quantize8(_mm256_loadu_ps(from + i), q), quantize8(_mm256_loadu_ps(from + i + 8), q));
        const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
        _mm_storeu_si128((__m128i*)(to + i), _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
    }
    return i;
}
#else
static inline int64_t quantize_planes(const float* from, int64_t plane, int64_t width, int64_t channels, uint8_t* to,
                                      const struct Affine* q) {
    (void)from, (void)plane, (void)width, (void)channels, (void)to, (void)q;
    return 0;
}
static inline int64_t quantize_line(const float* from, int64_t count, uint8_t* to, const struct Affine* q) {
    (void)from, (void)count, (void)to, (void)q;
    return 0;
}
#endif

// float, any strides (elements; batch, channel, row, column) -> levels.
static inline void quantize_image(const float* from, const int64_t* strides, const struct Image* out, const struct Affine* q,
                                  int thread, int threads) {
    const int64_t channels = out->pixel;
    FOR_EACH_ROW(out) {
        const float* line = from + n * strides[0] + y * strides[2];
        uint8_t* to = at(out, n, y, 0);
        if (strides[1] == 1 || channels == 1) {
            for (int64_t x = 0; x < out->width; ++x) {
                const float* pixel = line + x * strides[3];
                for (int64_t c = quantize_line(pixel, channels, to, q); c < channels; ++c)
                    to[c] = (uint8_t)quantize(pixel[c * strides[1]], q->inverse, q->zero_point, q->low, q->high);
                to += channels;
            }
            continue;
        }
        int64_t done = 0;
        if (strides[3] == 1 && channels <= 4) done = quantize_planes(line, strides[1], out->width, channels, to, q);
        for (int64_t c = 0; c < channels; ++c)
            for (int64_t x = done; x < out->width; ++x)
                to[x * channels + c] =
                    (uint8_t)quantize(line[c * strides[1] + x * strides[3]], q->inverse, q->zero_point, q->low, q->high);
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
