// Resizing of images of floats, see float_resize.h and ops/images/float_images.py.

#include "images/float_resize.h"

#include <string.h>

enum { RESIZE_TAPS = 4, COLUMNS_AT_ONCE = 256, VALUES_AT_ONCE = 1024 };

// Positions that one output reads along an axis, and their weights.
struct Taps {
    int64_t at[RESIZE_TAPS];
    float weight[RESIZE_TAPS];
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

// Some neighbouring results of a line: one channel of some columns, or some channels of some pixels, whose channels are
// next to each other.
struct Results {
    int64_t column, columns, channels, count;  // count: values, columns * channels
    int taps;
    int64_t at[RESIZE_TAPS][COLUMNS_AT_ONCE];
    float weight[RESIZE_TAPS][COLUMNS_AT_ONCE];
};

static void find_taps(const struct FloatResize* r, struct Results* s) {
    s->count = s->columns * s->channels;
    for (int64_t x = 0; x < s->columns; ++x) {
        const struct Taps one = taps_of(r, 2, s->column + x);
        s->taps = one.count;
        for (int k = 0; k < one.count; ++k) s->at[k][x] = one.at[k], s->weight[k][x] = one.weight[k];
    }
}

// Add values times weights in their order.
static inline void weighted_sum(const float* const* from, const float* w, int terms, int64_t count, float* to) {
    if (terms == 1)
        for (int64_t i = 0; i < count; ++i) to[i] = from[0][i] * w[0];
    else if (terms == 2)
        for (int64_t i = 0; i < count; ++i) to[i] = from[0][i] * w[0] + from[1][i] * w[1];
    else
        for (int64_t i = 0; i < count; ++i)
            to[i] = from[0][i] * w[0] + from[1][i] * w[1] + from[2][i] * w[2] + from[3][i] * w[3];
}

// Interpolate a line of the source between columns.
static void interpolate_line(const struct FloatResize* r, const struct Results* s, const float* line, float* to) {
    const int64_t step = r->in.axis[2];
    if (s->channels == 1) {
        for (int k = 0; k < s->taps; ++k)
            for (int64_t x = 0; x < s->columns; ++x) {
                const float term = line[s->at[k][x] * step] * s->weight[k][x];
                to[x] = k ? to[x] + term : term;
            }
        return;
    }
    for (int64_t x = 0; x < s->columns; ++x) {
        const float* from[RESIZE_TAPS] = {};
        float weight[RESIZE_TAPS] = {};
        for (int k = 0; k < s->taps; ++k) from[k] = line + s->at[k][x] * step, weight[k] = s->weight[k][x];
        weighted_sum(from, weight, s->taps, s->channels, to + x * s->channels);
    }
}

// Interpolated lines of the source. Lines that a result reads together, at most four of each of four depths, have
// places of their own. The next lines of results often read the same ones.
struct KeptLines {
    const float* line[RESIZE_TAPS][RESIZE_TAPS];
    float values[RESIZE_TAPS][RESIZE_TAPS][VALUES_AT_ONCE];
};

// Compute some results of one line from the lines of the source that begin at `plane`.
static inline void resize_line(const struct FloatResize* r, const struct Results* s, struct KeptLines* kept,
                               const float* plane, const struct Taps* z, const struct Taps* y, float* to) {
    float depths[RESIZE_TAPS][VALUES_AT_ONCE];
    const float *lines[RESIZE_TAPS] = {}, *sums[RESIZE_TAPS] = {};
    for (int d = 0; d < z->count; ++d) {
        for (int j = 0; j < y->count; ++j) {
            const int64_t a = z->at[d] % RESIZE_TAPS, b = y->at[j] % RESIZE_TAPS;
            const float* line = plane + z->at[d] * r->in.axis[0] + y->at[j] * r->in.axis[1];
            if (kept->line[a][b] != line) interpolate_line(r, s, line, kept->values[a][b]);
            kept->line[a][b] = line, lines[j] = kept->values[a][b];
        }
        weighted_sum(lines, y->weight, y->count, s->count, z->count == 1 ? to : depths[d]);  // a single weight is 1
        sums[d] = depths[d];
    }
    if (z->count > 1) weighted_sum(sums, z->weight, z->count, s->count, to);
}

// Compute some columns of this thread's lines. With `pixels`, a line has all channels from `channel` on that `s` has.
static void resize_lines(const struct FloatResize* r, const struct Results* s, int pixels, int64_t channel, int thread,
                         int threads) {
    const int64_t height = r->axes[1].result, deep = r->axes[0].result, planes = pixels ? 1 : r->channels;
    const int64_t step = r->out.axis[2], lines = r->images * planes * deep * height;
    const int contiguous = s->channels == 1 ? step == 1 : step == s->channels || s->columns == 1;
    struct KeptLines kept;
    memset(kept.line, 0, sizeof kept.line);
    float found[VALUES_AT_ONCE];
    for (int64_t i = shard_begin(lines, thread, threads); i < shard_begin(lines, thread + 1, threads); ++i) {
        const int64_t row = i % height, depth = i / height % deep, plane = i / height / deep;
        const int64_t n = plane / planes, c = channel + plane % planes;
        const struct Taps z = taps_of(r, 0, depth), y = taps_of(r, 1, row);
        float* to = r->out.base + offset_of(&r->out, n, c, depth, row, s->column);
        resize_line(r, s, &kept, r->in.base + offset_of(&r->in, n, c, 0, 0, 0), &z, &y, contiguous ? to : found);
        if (contiguous) continue;
        for (int64_t x = 0; x < s->columns; ++x)
            memcpy(to + x * step, found + x * s->channels, sizeof(float) * (size_t)s->channels);
    }
}

LIBRARY void resize_f32(const struct FloatResize* r, int thread, int threads) {
    const int pixels = r->channels > 1 && r->in.channel == 1 && r->out.channel == 1;
    const int64_t width = r->axes[2].result, channels = pixels ? r->channels : 1;
    struct Results s;
    for (int64_t channel = 0; channel < channels; channel += s.channels) {
        s.channels = at_most(VALUES_AT_ONCE, channels - channel);
        const int64_t together = at_most(VALUES_AT_ONCE / s.channels, COLUMNS_AT_ONCE);
        for (s.column = 0; s.column < width; s.column += s.columns) {
            s.columns = at_most(together, width - s.column);
            find_taps(r, &s);
            resize_lines(r, &s, pixels, channel, thread, threads);
        }
    }
}
