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

// Interpolate channel c of two pixels, minus the zero point.
static inline float blend(const uint8_t* a, const uint8_t* b, int64_t c, const float* weight, int32_t zero) {
    return (float)(a[c] - zero) * weight[0] + (float)(b[c] - zero) * weight[1];
}

LIBRARY void upsample_linear(const struct Blend* b, int thread, int threads) {
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
            const struct PackConstants f = pack_constants(q, UNBOUNDED_STEPS);
            const Floats zero = origin(b->zero_in), w0 = floats(w[0]), w1 = floats(w[1]), v0 = floats(v[0]),
                         v1 = floats(v[1]);
            for (int64_t c = 0; c < channels; c += WIDE) {
                const VectorU8 a0 = load_u8(above + left + c, channels - c),
                               a1 = load_u8(above + right + c, channels - c);
                const VectorU8 b0 = load_u8(below + left + c, channels - c),
                               b1 = load_u8(below + right + c, channels - c);
                Floats steps[4];
                for (int j = 0; j < 4; ++j) {
                    const Floats top = (widen_quarter(a0, j) - zero) * w0 + (widen_quarter(a1, j) - zero) * w1;
                    const Floats bottom = (widen_quarter(b0, j) - zero) * w0 + (widen_quarter(b1, j) - zero) * w1;
                    steps[j] = (top * v0 + bottom * v1) * floats(factor);
                }
                store_u8(to + c, round_and_pack(steps, &f), channels - c);
            }
#else
            for (int64_t c = 0; c < channels; ++c) {
                const float top = blend(above + left, above + right, c, w, b->zero_in);
                const float bottom = blend(below + left, below + right, c, w, b->zero_in);
                to[c] = (uint8_t)round_clamp_i32((top * v[0] + bottom * v[1]) * factor, q->zero_point, q->low, q->high);
            }
#endif
        }
    }
}
