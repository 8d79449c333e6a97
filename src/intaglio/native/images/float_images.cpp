// Pooling, resizing and sampling of images of floats, see float_images.h and ops/images/float_images.py.

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

static inline int64_t offset_of(const struct FloatImage* x, int64_t image, int64_t channel, int64_t depth, int64_t row,
                                int64_t column) {
    return image * x->image + channel * x->channel + depth * x->axis[0] + row * x->axis[1] + column * x->axis[2];
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

// Positions that one output reads along an axis, and their weights.
struct Taps {
    int64_t at[4];
    float weight[4];
    int count;
};

static inline float far_weight(float x) {
    const float a = -0.75f;
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a;
}

static inline float near_weight(float x) {
    const float a = -0.75f;
    return ((a + 2) * x - (a + 3)) * x * x + 1;
}

static inline struct Taps cubic_taps(const struct Grid* g, int64_t i) {
    float place = (float)i;
    if (g->align) {
        place = place * (g->result > 1 ? (float)(g->size - 1) / (float)(g->result - 1) : 0.0f);
    } else {
        const float step = g->step != 0 ? g->step : (float)g->size / (float)g->result;
        place = step * (place + 0.5f) - 0.5f;
    }
    int64_t below = (int64_t)place;
    below -= place < (float)below;
    const float over = place - (float)below;
    struct Taps found = {
        {}, {far_weight(over + 1), near_weight(over), near_weight(1 - over), far_weight(1 - over + 1)}, 4};
    for (int t = 0; t < 4; ++t) found.at[t] = at_most(at_least(below - 1 + t, 0), g->size - 1);
    return found;
}

static inline struct Taps taps_of(const struct FloatResize* r, int axis, int64_t i) {
    const struct Grid* g = r->axes + axis;
    if (axis < FLOAT_AXES - r->count) return (struct Taps){{0}, {1}, 1};
    if (r->mode == RESIZE_NEAREST) return (struct Taps){{nearest_at(g, i)}, {1}, 1};
    if (r->mode == RESIZE_CUBIC) return cubic_taps(g, i);
    const struct Between b = between(g, i);
    return (struct Taps){{b.below, b.above}, {b.weight[0], b.weight[1]}, 2};
}

// Interpolate one channel, from the columns to the depths.
static inline float interpolate(const float* from, const struct FloatImage* x, const struct Taps* z,
                                const struct Taps* y, const struct Taps* w) {
    float depths = 0;
    for (int i = 0; i < z->count; ++i) {
        float rows = 0;
        for (int j = 0; j < y->count; ++j) {
            const float* line = from + z->at[i] * x->axis[0] + y->at[j] * x->axis[1];
            float columns = line[w->at[0] * x->axis[2]] * w->weight[0];
            for (int k = 1; k < w->count; ++k) columns = columns + line[w->at[k] * x->axis[2]] * w->weight[k];
            rows = j ? rows + columns * y->weight[j] : columns * y->weight[j];
        }
        depths = i ? depths + rows * z->weight[i] : rows * z->weight[i];
    }
    return depths;
}

LIBRARY void resize_f32(const struct FloatResize* r, int thread, int threads) {
    const int64_t height = r->axes[1].result, deep = r->axes[0].result, rows = r->images * deep * height;
    for (int64_t line = shard_begin(rows, thread, threads); line < shard_begin(rows, thread + 1, threads); ++line) {
        const int64_t row = line % height, depth = line / height % deep, n = line / height / deep;
        const struct Taps z = taps_of(r, 0, depth), y = taps_of(r, 1, row);
        for (int64_t column = 0; column < r->axes[2].result; ++column) {
            const struct Taps x = taps_of(r, 2, column);
            const float* from = r->in.base + offset_of(&r->in, n, 0, 0, 0, 0);
            float* to = r->out.base + offset_of(&r->out, n, 0, depth, row, column);
            for (int64_t c = 0; c < r->channels; ++c)
                to[c * r->out.channel] = interpolate(from + c * r->in.channel, &r->in, &z, &y, &x);
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
