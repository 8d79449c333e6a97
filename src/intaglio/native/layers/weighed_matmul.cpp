// A 1x1 convolution with scaled input channels, see weighed_matmul.h.

#include "layers/weighed_matmul.h"

enum {
#if defined(__AMX_INT8__)
    WEIGHED_BYTES = 1 << 18,  // of scaled pixels per thread, at least those of the tallest tile
#else
    WEIGHED_BYTES = 1 << 16,
#endif
    BEHIND = 64  // bytes past them that may be read
};

LIBRARY void matmul_weighed(struct Matmul* m, const struct Pair* weighed, int thread, int threads) {
    uint8_t made[WEIGHED_BYTES + BEHIND] __attribute__((aligned(64)));
    const int64_t pixels = m->out.images * m->out.height * m->out.width, pixel = m->in.pixel;
    if (!pixels) return;
    const int64_t tiles = (pixels + m->rows - 1) / m->rows, least = pixels / tiles, longer = pixels % tiles;
    if ((pixels < m->split_channels_below || tiles < threads) && pixels * pixel <= WEIGHED_BYTES) {
        if (first_unit(m, tiles, thread, threads) == first_unit(m, tiles, thread + 1, threads)) return;
        weigh_pixels(weighed, 0, pixels, made);
        m->in.base = made, m->shares = 0;  // threads without a panel have returned
        matmul(m, thread, threads);
        return;
    }
    struct Sharing s = enter_step(m->shares, nanoseconds_of(m, pixels, m->panels * m->panel_bytes), thread, threads);
    while (next_piece(&s)) {
        const int64_t first = first_item(&s, tiles, 0), last = first_item(&s, tiles, 1);
        const int64_t most = WEIGHED_BYTES / ((least + (longer > 0)) * pixel),
                      chunks = (last - first + most - 1) / most;
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            const int64_t begin = first + chunk * (last - first) / chunks,
                          end = first + (chunk + 1) * (last - first) / chunks;
            const int64_t x = begin * least + (begin < longer ? begin : longer),
                          stop = end * least + (end < longer ? end : longer);
            weigh_pixels(weighed, x, stop - x, made);
            m->in.base = made - x * pixel;
            for (int64_t panel = 0; panel < m->panels; ++panel) matmul_span(m, panel, begin, end, tiles, pixels);
        }
    }
}
