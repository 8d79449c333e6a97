// Nearest, linear and bilinear upsampling, see resize.h.

#include "images/resize.h"

#include "base/numerics.h"
#include "base/vectors.h"

// Copy the pixel that the grids select to each output. A row that has the same source as the row before it is a copy of
// that row.
LIBRARY void upsample_nearest(const struct Image* in, const struct Image* out, int64_t depth_in, int64_t depth_out,
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

enum { BLENDED = 2048 };  // interpolated values of a row that are kept, so that two rows stay in the first-level cache

// Some neighbouring results of a row: all channels of some pixels, or some channels of one pixel.
struct ResultSpan {
    int64_t pixel, end, channel, channels;
};

// Interpolate values of a row between columns, minus the zero point: [pixel][channel]. Vectors may reach into the next
// pixel of the row, whose values are written after them.
static void blend_columns(const struct Blend* b, const uint8_t* row, const struct ResultSpan* s, float* to) {
    const int64_t channels = b->in.pixel;
    for (int64_t x = s->pixel; x < s->end; ++x, to += s->channels) {
        const struct Between columns = between(&b->column, x);
        const uint8_t *left = row + columns.below * channels + s->channel,
                      *right = row + columns.above * channels + s->channel;
        const float* w = columns.weight;
#if defined(VECTORS)
        enum { QUARTER = WIDE / 4 };
        const uint8_t* end = row + b->in.width * channels;
        const Floats zero = origin(b->zero_in), w0 = floats(w[0]), w1 = floats(w[1]);
        for (int64_t c = 0; c < s->channels; c += WIDE) {
            const VectorU8 a0 = deinterleave(load_u8(left + c, end - left - c)),
                           a1 = deinterleave(load_u8(right + c, end - right - c));
            for (int j = 0; j < 4 && c + j * QUARTER < s->channels; ++j) {
                const Floats x0 = widen_quarter(a0, j) - zero, x1 = widen_quarter(a1, j) - zero;
                store_floats(to + c + j * QUARTER, x0 * w0 + x1 * w1);
            }
        }
#else
        for (int64_t c = 0; c < s->channels; ++c)
            to[c] = (float)(left[c] - b->zero_in) * w[0] + (float)(right[c] - b->zero_in) * w[1];
#endif
    }
}

// Interpolate between two rows of such values, and quantize the results. `row`: the row of results.
static void blend_rows(const struct Blend* b, const float* above, const float* below, const float* v,
                       const struct ResultSpan* s, uint8_t* row) {
    const struct Limits* q = b->limits;
    const int64_t channels = b->out.pixel, count = (s->end - s->pixel) * s->channels;
    const float factor = b->factor[0];
    uint8_t* to = row + s->pixel * channels + s->channel;
#if defined(VECTORS)
    // Vectors may reach into the pixels after these, whose results are written later, but not into channels that are
    // there already.
    const int64_t free = s->channels == channels ? (b->out.width - s->pixel) * channels : count;
    const struct PackConstants f = pack_constants(q, UNBOUNDED_STEPS);
    const Floats v0 = floats(v[0]), v1 = floats(v[1]);
    for (int64_t i = 0; i < count; i += WIDE) {
        Floats steps[4];
        for (int j = 0; j < 4; ++j) {
            const Floats top = load_floats(above + i + j * WIDE / 4), bottom = load_floats(below + i + j * WIDE / 4);
            steps[j] = (top * v0 + bottom * v1) * floats(factor);
        }
        store_u8(to + i, interleave(round_and_pack(steps, &f)), free - i);
    }
#else
    for (int64_t i = 0; i < count; ++i)
        to[i] = (uint8_t)round_clamp_i32((above[i] * v[0] + below[i] * v[1]) * factor, q->zero_point, q->low, q->high);
#endif
}

// The results of a row and of the rows after it often lie between the same two rows, whose columns are interpolated
// once.
static void upsample_span(const struct Blend* b, const struct ResultSpan* s, int thread, int threads) {
    float blended[2][BLENDED + WIDE] __attribute__((aligned(64))) = {};
    const uint8_t* held[2] = {0, 0};
    FOR_EACH_ROW(&b->out) {
        const struct Between rows = between(&b->row, y);
        const uint8_t* wanted[2] = {at(&b->in, n, rows.below, 0), at(&b->in, n, rows.above, 0)};
        int place[2];
        place[0] = held[1] == wanted[0] || held[0] == wanted[1];
        place[1] = wanted[0] == wanted[1] ? place[0] : !place[0];
        for (int i = 0; i < 2; ++i) {
            if (held[place[i]] == wanted[i]) continue;
            held[place[i]] = wanted[i];
            blend_columns(b, wanted[i], s, blended[place[i]]);
        }
        blend_rows(b, blended[place[0]], blended[place[1]], rows.weight, s, at(&b->out, n, y, 0));
    }
}

LIBRARY void upsample_linear(const struct Blend* b, int thread, int threads) {
    const int64_t channels = b->out.pixel, width = b->out.width;
    struct ResultSpan s;
    for (s.channel = 0; s.channel < channels; s.channel += s.channels) {
        s.channels = at_most(BLENDED, channels - s.channel);
        const int64_t together = s.channels == channels ? BLENDED / channels : 1;
        for (s.pixel = 0; s.pixel < width; s.pixel = s.end) {
            s.end = at_most(s.pixel + together, width);
            upsample_span(b, &s, thread, threads);
        }
    }
}
