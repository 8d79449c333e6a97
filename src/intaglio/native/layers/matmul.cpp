// Loops around the microkernels of convolutions and linear layers, see matmul.h.

#include "layers/matmul.h"

#include "layers/widened.h"
#include "layers/winograd.h"

// Return the levels of the cache that kernels with few rows prefetch weights into: two on processors of Intel, see
// TWO_LEVELS of kernels/tile_spec.py, and one on others. Kernels for AMX prefetch weights only if the layer is
// a single tile, for which this is two.
#if defined(__AMX_INT8__)
static inline int prefetched_levels(const struct Matmul* m, int64_t tiles) { return m->flat && tiles == 1 ? 2 : 1; }
#elif defined(__AVX512VNNI__)
#include <cpuid.h>

static inline int prefetched_levels(const struct Matmul*, int64_t) {
    static int answer;  // 0 before the first call: the instruction takes as long as a small step
    int known = __atomic_load_n(&answer, __ATOMIC_RELAXED);
    if (known == 0) {
        unsigned leaves, vendor[3];
        const int read = __get_cpuid(0, &leaves, &vendor[0], &vendor[2], &vendor[1]);
        known = read && !memcmp(vendor, "GenuineIntel", sizeof vendor) ? 2 : 1;
        __atomic_store_n(&answer, known, __ATOMIC_RELAXED);
    }
    return known;
}
#else
static inline int prefetched_levels(const struct Matmul*, int64_t) { return 1; }
#endif

// Return how many lines from line y on a tile takes as its parts; `left` tiles remain, one for each line.
static inline int32_t lines_of_tile(const struct Matmul* m, int64_t tiles, int64_t width, int64_t y, int64_t left) {
    if (m->flat || tiles > 1 || width > LINE_PIXELS || m->lines < 2) return 1;
    const int64_t same_image = m->out.height - y, most = m->lines < left ? m->lines : left;
    return (int32_t)(most < same_image ? most : same_image);
}

// Let a tile have lines of `width` pixels as its parts. `staged`: its results follow each other.
static inline void take_lines(const struct Matmul* m, struct Tile* t, int64_t width, int staged) {
    t->part_rows = width;
    t->a_skip = m->in.line * m->stride_y - width * t->a_pixel;
    t->out_skip = staged ? 0 : m->out.line - width * t->out_pixel;
    t->residual_skip = m->residual.line - width * t->residual_pixel;
    t->remainder_skip = m->remainder.line - width * t->remainder_pixel;
    t->residual_remainder_skip = m->residual_remainder.line - width * t->residual_remainder_pixel;
}

// Let the next tile have pixels of one line again.
static inline void leave_lines(struct Tile* t) {
    t->part_rows = t->a_skip = t->out_skip = 0;
    t->residual_skip = t->remainder_skip = t->residual_remainder_skip = 0;
}

// Compute tiles first to last (exclusive) of one panel. The tiles of a line have nearly equal heights, so that none is
// a thin remainder.
LIBRARY void matmul_span(const struct Matmul* m, int64_t panel, int64_t first, int64_t last, int64_t tiles,
                         int64_t width) {
    struct Tile t = m->tile;
    if (!t.levels) t.levels = prefetched_levels(m, tiles);
    const int last_panel = panel == m->panels - 1;
    const TileKernel* kernels = last_panel ? m->last_kernels : m->kernels;
    const int64_t channel = panel * m->blocks * 16;
    const int64_t offset = m->first_channel ? m->first_channel[panel] : 0;
    t.b += panel * m->panel_bytes, t.ahead = m->panel_bytes;
    t.bias += channel;
    t.factor += channel;
    if (t.residual_factor) t.residual_factor += channel;
    if (t.row_bias) t.row_bias += channel;
    t.mask = last_panel ? m->last_mask : m->mask;
    const int32_t least = (int32_t)(width / tiles), longer = (int32_t)(width % tiles),
                  per_image = (int32_t)m->out.height;
    const int64_t channels = __builtin_popcountll((unsigned long long)t.mask), out_pixel = t.out_pixel;
    struct Activation own = m->activation;
    const struct Activation* activation = own.run ? &own : 0;
    if (own.gain) own.gain += channel;
    float real[(WARM + TILE_BYTES) / sizeof(float)] __attribute__((aligned(64)));
    if (activation) {
        t.out_pixel = (channels + 15) / 16 * 64;
        if (channels % 16) memset(real, 0, sizeof real);  // kernels do not write lanes past the last channel
    }
    const struct Epilogue* epilogue = m->epilogue.take ? &m->epilogue : 0;
    uint8_t quantized[WARM + TILE_BYTES] __attribute__((aligned(64)));
    if (epilogue && !activation) t.out_pixel = (channels + 15) / 16 * 16 * epilogue->bytes;
    uint8_t* const warmed = activation ? quantized : (uint8_t*)real;
    const int64_t warmed_pixel = activation ? (channels + 15) / 16 * 16 : t.out_pixel;
    const int64_t held = activation || epilogue ? t.out_pixel : channels * m->out_bytes;
    const int32_t warm = (int32_t)(WARM / (m->rows * held)) + 1;
    const int staged = m->table.look_up || activation || epilogue;
    int32_t line = (int32_t)(first / tiles), i = (int32_t)(first % tiles);
    for (int64_t done = first; done < last;) {
        const int64_t n = m->flat ? 0 : line / per_image, y = m->flat ? 0 : line % per_image;
        const uint8_t* a = at(&m->in, n, y * m->stride_y - m->top, -m->left) + offset;
        uint8_t* out = at(&m->out, n, y, 0) + channel * m->out_bytes;
        const uint8_t* other = m->residual.base ? at(&m->residual, n, y, 0) + channel : 0;
        const int64_t x = (int64_t)i * least + (i < longer ? i : longer);
        t.a = a + x * t.a_pixel;
        int64_t pixel = m->first_row + line * width + x;
        t.out = out + x * out_pixel;
        t.residual = other + x * t.residual_pixel;
        if (t.row_bias) t.row_scale = m->tile.row_scale + pixel;
        if (m->remainder.base) t.remainder = at(&m->remainder, n, y, 0) + channel + x * t.remainder_pixel;
        if (m->residual_remainder.base)
            t.residual_remainder = at(&m->residual_remainder, n, y, 0) + channel + x * t.residual_remainder_pixel;
        while (i < tiles && done < last) {
            const int32_t equal = (i < longer ? longer : (int32_t)tiles) - i;
            const int32_t left = done + equal < last ? equal : (int32_t)(last - done);
            const int32_t height = least + (i < longer), count = staged && left > warm ? warm : left;
            const int32_t lines = lines_of_tile(m, tiles, width, y, last - done), pixels = height * count;
            uint8_t* first_pixel = t.out;
            t.count = count;
            if (activation || epilogue) t.out = (uint8_t*)real;
            if (lines > 1) take_lines(m, &t, width, activation || epilogue);
            kernels[lines > 1 ? LINE_PIXELS * lines : height](&t);
            if (lines > 1) leave_lines(&t);
            if (activation || epilogue) t.out = first_pixel + pixels * out_pixel;
            if (epilogue) first_pixel = warmed;
            const int64_t stride = epilogue ? warmed_pixel : out_pixel,
                          to_line = epilogue ? pixels * warmed_pixel : m->out.line;
            for (int32_t l = 0; l < lines; ++l) {
                uint8_t* to = first_pixel + l * to_line;
                if (activation)
                    activation->run(activation, real + l * pixels * t.out_pixel / 4, t.out_pixel / 4, pixels, to,
                                    stride, channels);
                if (m->table.look_up) m->table.look_up(to, pixels, stride, channels, m->table.entries);
            }
            if (epilogue) epilogue->take(epilogue->run, warmed, warmed_pixel, pixel, lines * pixels, channel, channels);
            pixel += lines * pixels;
            i += count, done += count + lines - 1, line += lines - 1;
        }
        i = 0;
        ++line;
    }
}

// Compute tiles `unit` to `last` (exclusive), counted through all panels.
static void multiply_units(const struct Matmul* m, int64_t unit, int64_t last, int64_t tiles, int64_t total,
                           int64_t width) {
    while (unit < last) {
        const int64_t panel = unit / total, begin = unit % total;
        const int64_t end = begin + (last - unit) < total ? begin + (last - unit) : total;
        matmul_span(m, panel, begin, end, tiles, width);
        unit += end - begin;
    }
}

LIBRARY void matmul(const struct Matmul* m, int thread, int threads) {
    if (can_transform(m)) {
        matmul_transformed(m, thread, threads);
        return;
    }
    if (can_widen(m)) {
        matmul_widened(m, thread, threads);
        return;
    }
    const int64_t pixels = m->out.images * m->out.height * m->out.width;
    const int64_t lines = m->flat ? 1 : m->out.images * m->out.height, width = m->flat ? pixels : m->out.width;
    if (!pixels) return;
    const int64_t tiles = (width + m->rows - 1) / m->rows, total = lines * tiles;
    struct Sharing s = enter_step(m->shares, nanoseconds_of(m, pixels, m->panels * m->panel_bytes), thread, threads);
    if (pixels < m->split_channels_below || total < threads) {
        while (next_piece(&s)) {
            const int64_t begin = first_unit(m, total, s.owner, threads),
                          end = first_unit(m, total, s.owner + 1, threads);
            multiply_units(m, piece_begin(&s, begin, end, total), piece_end(&s, begin, end, total), tiles, total,
                           width);
        }
        return;
    }
    const int64_t bytes = (width + tiles - 1) / tiles * m->tile.a_pixel * m->stride_y;
    const int64_t chunk = m->chunk_bytes / bytes > 1 ? m->chunk_bytes / bytes : 1;
    while (next_piece(&s)) {
        const int64_t first = shard_begin(total, s.owner, threads), last = shard_begin(total, s.owner + 1, threads),
                      spans = (last - first + chunk - 1) / chunk * m->panels, stop = piece_end(&s, 0, spans, 1);
        for (int64_t span = piece_begin(&s, 0, spans, 1); span < stop; ++span) {
            const int64_t begin = first + span / m->panels * chunk, end = begin + chunk < last ? begin + chunk : last;
            matmul_span(m, span % m->panels, begin, end, tiles, width);
        }
    }
}

// Write zeros to rows first to last (exclusive).
static void clear_rows(const struct Matmul* m, int64_t first, int64_t last) {
    static const float zeros[64] __attribute__((aligned(64))) = {};
    for (int64_t panel = 0; panel < m->panels; ++panel) {
        const int64_t mask = panel == m->panels - 1 ? m->last_mask : m->mask, channel = panel * m->blocks * 16,
                      channels = __builtin_popcountll((unsigned long long)mask);
        if (m->epilogue.take) {
            m->epilogue.take(m->epilogue.run, (const uint8_t*)zeros, 0, first, last - first, channel, channels);
            continue;
        }
        for (int64_t row = first; row < last; ++row)
            memset(at(&m->out, 0, 0, row) + 4 * channel, 0, (size_t)(4 * channels));
    }
}

LIBRARY void matmul_groups(const struct Matmul* m, const struct RowGroups* g, int thread, int threads) {
    const int64_t rows = m->out.images * m->out.height * m->out.width;
    struct Matmul one = *m;
    one.out.images = one.out.height = 1;
    int64_t first = 0;
    for (int64_t group = 0; group < g->count; ++group) {
        const int64_t given = g->ends[group * g->step], end = given < first ? first : given > rows ? rows : given;
        one.first_row = first, one.out.width = end - first;
        one.in.base = m->in.base + first * m->tile.a_pixel;
        if (m->out.base) one.out.base = m->out.base + first * m->tile.out_pixel;
        matmul(&one, thread, threads);
        one.tile.b += g->weight_bytes, one.tile.bias += g->columns, one.tile.factor += g->factors;
        if (one.tile.row_bias) one.tile.row_bias += g->columns;
        first = end;
    }
    clear_rows(m, first + shard_begin(rows - first, thread, threads),
               first + shard_begin(rows - first, thread + 1, threads));
}
