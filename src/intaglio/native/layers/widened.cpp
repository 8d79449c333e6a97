// Products of widened input, see widened.h.

#include "layers/widened.h"

enum { WIDENED_BYTES = 1 << 16 };  // of input that is widened at a time

// Widen values to 16 bits, four at a time: first the two at even places, which kernels multiply first, then the others.
static __attribute__((noinline)) void widen(const uint8_t* from, int64_t bytes, uint64_t* to) {
    for (int64_t i = 0; i < bytes / 4; ++i) {
        uint32_t four;
        memcpy(&four, from + 4 * i, sizeof four);
        to[i] = (uint64_t)(four & 0x00ff00ff) | (uint64_t)(four & 0xff00ff00) << 24;
    }
}

// A range of bytes of the input.
struct Extent {
    const uint8_t* from;
    int64_t bytes;
};

// Return the input of tiles first to last (exclusive): that of whole lines if they lie in several lines.
static struct Extent input_of(const struct Matmul* m, int64_t first, int64_t last, int64_t tiles, int64_t width) {
    const struct Tile* t = &m->tile;
    int64_t reach = (t->tap_rows - 1) * t->a_row + (t->taps - 1) * t->a_tap + 4 * t->run;
    if (m->first_channel) {
        int64_t furthest = 0;
        for (int64_t panel = 0; panel < m->panels; ++panel) furthest = at_least(furthest, m->first_channel[panel]);
        reach += furthest;
    }
    const int64_t begin = m->flat ? 0 : first / tiles, end = m->flat ? 0 : (last - 1) / tiles, height = m->out.height;
    const int64_t x = begin == end ? pixel_of_tile(first - begin * tiles, tiles, width) : 0,
                  end_x = begin == end ? pixel_of_tile(last - end * tiles, tiles, width) : width;
    const uint8_t *from = at(&m->in, begin / height, begin % height * m->stride_y - m->top, -m->left) + x * t->a_pixel,
                  *to = at(&m->in, end / height, end % height * m->stride_y - m->top, -m->left);
    return (struct Extent){from, to - from + (end_x - 1) * t->a_pixel + reach};
}

// Return whether every step of 4 values begins a multiple of 4 bytes behind the first one. `widen` changes the order of
// the values within 4 bytes.
static int keeps_steps(const struct Matmul* m) {
    int64_t all = m->tile.a_pixel;
    if (m->tile.taps > 1) all |= m->tile.a_tap;
    if (!m->flat || m->tile.tap_rows > 1) all |= m->in.line | m->in.image | m->tile.a_row;
    for (int64_t panel = 0; m->first_channel && panel < m->panels; ++panel) all |= m->first_channel[panel];
    return all % 4 == 0;
}

LIBRARY int can_widen(const struct Matmul* m) {
    const int64_t pixels = m->out.images * m->out.height * m->out.width, width = m->flat ? pixels : m->out.width;
    if (!m->widened_kernels || pixels < m->rows || !keeps_steps(m)) return 0;
    return input_of(m, 0, 1, (width + m->rows - 1) / m->rows, width).bytes <= WIDENED_BYTES;
}

LIBRARY void matmul_widened(const struct Matmul* m, int thread, int threads) {
    const int64_t pixels = m->out.images * m->out.height * m->out.width;
    const int64_t lines = m->flat ? 1 : m->out.images * m->out.height, width = m->flat ? pixels : m->out.width;
    const int64_t tiles = (width + m->rows - 1) / m->rows, total = lines * tiles;
    // This thread computes the tiles from `start` of panel `low` to `stop` (exclusive) of panel `high`. Of the panels
    // between them it computes all tiles, or those from `start` to `stop` if threads divide pixels.
    const int shares_panels = pixels < m->split_channels_below || total < threads;
    int64_t low = 0, high = m->panels - 1, start = 0, stop = 0;
    if (shares_panels) {
        const int64_t first = first_unit(m, total, thread, threads), last = first_unit(m, total, thread + 1, threads);
        if (first == last) return;
        low = first / total, high = (last - 1) / total, start = first % total, stop = (last - 1) % total + 1;
    }
    uint64_t widened[WIDENED_BYTES / 4] __attribute__((aligned(64)));
    struct Matmul w = *m;
    w.kernels = m->widened_kernels, w.last_kernels = m->widened_last_kernels, w.first_channel = 0;
    w.in.pixel *= 2, w.in.line *= 2, w.in.image *= 2;
    w.tile.a_pixel *= 2, w.tile.a_row *= 2, w.tile.a_tap *= 2;
    const int64_t most = at_most(m->chunk_bytes / 2, WIDENED_BYTES);
    struct Share* const shares = shares_panels ? 0 : m->shares;
    struct Sharing s = enter_step(shares, nanoseconds_of(m, pixels, 0), thread, threads);
    while (next_piece(&s)) {
        if (!shares_panels) start = first_item(&s, total, 0), stop = first_item(&s, total, 1);
        const int64_t begin = shares_panels && low < high ? 0 : start, end = shares_panels && low < high ? total : stop;
        for (int64_t first = begin, last; first < end; first = last) {
            last = end;
            while (last - first > 1 && input_of(m, first, last, tiles, width).bytes > most) last -= (last - first) / 2;
            const struct Extent of = input_of(m, first, last, tiles, width);
            widen(of.from, of.bytes, widened);
            uint8_t* const base = (uint8_t*)widened - 2 * (of.from - m->in.base);
            for (int64_t panel = low; panel <= high; ++panel) {
                const int64_t from = panel == low ? at_least(first, start) : first,
                              to = panel == high ? at_most(last, stop) : last;
                w.in.base = base + (m->first_channel ? 2 * m->first_channel[panel] : 0);
                if (from < to) matmul_span(&w, panel, from, to, tiles, width);
            }
        }
    }
}
