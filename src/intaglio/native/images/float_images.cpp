// Pooling and sampling of images of floats, see float_images.h and ops/images/float_images.py.

#include "images/float_images.h"

enum { CHANNELS_AT_ONCE = 64 };

// Positions along an axis that one output reads, `step` apart, and their number for the mean.
struct Span {
    int64_t start, stop, step, count;
};

static inline struct Span span_of(const struct FloatPoolAxis* a, int64_t i) {
    if (a->adaptive) {
        const int64_t start = i * a->size / a->result, stop = ((i + 1) * a->size + a->result - 1) / a->result;
        return (struct Span){start, stop, 1, stop - start};
    }
    const int64_t begin = i * a->stride - a->before, behind = begin + (a->kernel - 1) * a->dilation + 1;
    const int64_t skipped = begin < 0 ? (-begin + a->dilation - 1) / a->dilation : 0;
    const int64_t start = begin + skipped * a->dilation, stop = at_most(behind, a->size);
    const int64_t padded = at_most(begin + a->kernel, a->size + a->before) - begin;
    return (struct Span){start, stop, a->dilation, a->include_pad ? padded : at_least(stop - start, 0)};
}

// Reduce the windows of one output for `count` channels, `step` elements apart.
static inline void pool_channels(const struct FloatPool* p, const float* from, int64_t step, int64_t count,
                                 const struct Span* spans, float* found) {
    const struct Span *z = spans, *y = spans + 1, *x = spans + 2;
    for (int64_t c = 0; c < count; ++c) found[c] = p->maximum ? -__builtin_inff() : 0;
    for (int64_t i = z->start; i < z->stop; i += z->step)
        for (int64_t j = y->start; j < y->stop; j += y->step)
            for (int64_t k = x->start; k < x->stop; k += x->step) {
                const float* tap = from + i * p->in.axis[0] + j * p->in.axis[1] + k * p->in.axis[2];
                if (p->maximum)
                    for (int64_t c = 0; c < count; ++c) {
                        const float value = tap[c * step];
                        found[c] = value > found[c] || value != value ? value : found[c];
                    }
                else
                    for (int64_t c = 0; c < count; ++c) found[c] += tap[c * step];
            }
}

LIBRARY void pool_f32(const struct FloatPool* p, int thread, int threads) {
    const struct FloatPoolAxis *z = p->axes, *y = p->axes + 1, *x = p->axes + 2;
    const int64_t rows = p->images * z->result * y->result;
    for (int64_t r = shard_begin(rows, thread, threads); r < shard_begin(rows, thread + 1, threads); ++r) {
        const int64_t row = r % y->result, depth = r / y->result % z->result, n = r / y->result / z->result;
        struct Span spans[FLOAT_AXES] = {span_of(z, depth), span_of(y, row), {}};
        for (int64_t column = 0; column < x->result; ++column) {
            spans[2] = span_of(x, column);
            const int64_t elements = p->divisor ? p->divisor : spans[0].count * spans[1].count * spans[2].count;
            const float divisor = p->maximum ? 1 : (float)elements;
            for (int64_t c = 0; c < p->channels; c += CHANNELS_AT_ONCE) {
                float found[CHANNELS_AT_ONCE];
                const int64_t count = at_most(p->channels - c, CHANNELS_AT_ONCE);
                const float* from = p->in.base + offset_of(&p->in, n, c, 0, 0, 0);
                if (p->in.channel == 1)
                    pool_channels(p, from, 1, count, spans, found);
                else
                    pool_channels(p, from, p->in.channel, count, spans, found);
                float* to = p->out.base + offset_of(&p->out, n, c, depth, row, column);
                for (int64_t i = 0; i < count; ++i) to[i * p->out.channel] = found[i] / divisor;
            }
        }
    }
}

// The pixels before and behind a place along an axis, and their weights.
struct Neighbours {
    int64_t at[2];
    float weight[2];
};

static inline struct Neighbours neighbours_of(float place, int64_t size, int border, int align) {
    const float count = (float)size;
    float at = align ? (place + 1) * 0.5f * (count - 1) : ((place + 1) * count - 1) * 0.5f;
    if (border) {
        at = at > 0 ? at : 0;
        at = at < count - 1 ? at : count - 1;
    }
    if (!(at > -0x1p30f && at < 0x1p30f)) return (struct Neighbours){{-2, -1}, {1, 0}};
    int64_t below = (int64_t)at;
    below -= at < (float)below;
    return (struct Neighbours){{below, below + 1}, {(float)below + 1 - at, at - (float)below}};
}

LIBRARY void grid_sample(const struct GridSample* g, int thread, int threads) {
    const int64_t rows = g->images * g->result[0];
    for (int64_t r = shard_begin(rows, thread, threads); r < shard_begin(rows, thread + 1, threads); ++r) {
        const int64_t n = r / g->result[0], row = r % g->result[0];
        for (int64_t column = 0; column < g->result[1]; ++column) {
            const float* place = g->grid + n * g->grid_stride[0] + row * g->grid_stride[1] + column * g->grid_stride[2];
            const struct Neighbours x = neighbours_of(place[0], g->size[1], g->border, g->align);
            const struct Neighbours y = neighbours_of(place[g->grid_stride[3]], g->size[0], g->border, g->align);
            float* to = g->out.base + offset_of(&g->out, n, 0, 0, row, column);
            for (int64_t c = 0; c < g->channels; ++c) to[c * g->out.channel] = 0;
            for (int i = 0; i < 2; ++i)
                for (int j = 0; j < 2; ++j) {
                    if (y.at[i] < 0 || y.at[i] >= g->size[0] || x.at[j] < 0 || x.at[j] >= g->size[1]) continue;
                    const float* from = g->in.base + offset_of(&g->in, n, 0, 0, y.at[i], x.at[j]);
                    const float weight = y.weight[i] * x.weight[j];
                    for (int64_t c = 0; c < g->channels; ++c)
                        to[c * g->out.channel] = to[c * g->out.channel] + from[c * g->in.channel] * weight;
                }
        }
    }
}
