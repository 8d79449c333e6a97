// Linear layers with 4-bit weights, see int4_weights.h.

#include "products/int4_weights.h"

// 16-bit lanes, each of which has two bytes of an output channel.
typedef uint16_t BytePairs __attribute__((vector_size(64)));
typedef uint8_t AllBytes __attribute__((vector_size(64)));

enum { EXPANDED_AHEAD = 2048 };  // bytes between the weights that are expanded and those that are prefetched

// Expand a panel of `lines` lines and `blocks` of 16 output channels to [step of 4 input channels][output channel][4].
static void expand_int4(const uint8_t* from, int64_t lines, int64_t blocks, int8_t* to) {
    const int64_t step_bytes = 64 * blocks;
    for (int64_t line = 0; line < lines; ++line) {
        const uint8_t* step = from + INT4_LINE;
        for (int half = 0; half < 2; ++half) {
            uint16_t multiples[2 * 16 * 4] __attribute__((aligned(64)));
            for (int64_t c = 0; c < 16 * blocks; ++c)
                multiples[2 * c] = multiples[2 * c + 1] = half ? from[c] >> 4 : from[c] & 15;
            for (int64_t i = 0; i < 4; ++i, to += 2 * step_bytes)
                for (int64_t block = 0; block < blocks; ++block, step += 64) {
                    BytePairs both, multiple;
                    __builtin_prefetch(step + EXPANDED_AHEAD);
                    memcpy(&both, step, 64), memcpy(&multiple, multiples + 32 * block, 64);
                    // A product has no carry from the low byte to the high one: 15 * 15 < 256.
                    const AllBytes zero = (AllBytes)(multiple * 0x0808),
                                   low = (AllBytes)((both & 0x0f0f) * multiple) - zero,
                                   high = (AllBytes)((both >> 4 & 0x0f0f) * multiple) - zero;
                    memcpy(to + 64 * block, &low, 64), memcpy(to + step_bytes + 64 * block, &high, 64);
                }
        }
        from += INT4_LINE + 8 * step_bytes;
    }
}

LIBRARY void matmul_int4(const struct Matmul* m, const struct Int4Weights* w, int thread, int threads) {
    const int64_t pixels = m->out.images * m->out.height * m->out.width;
    const int64_t lines = m->flat ? 1 : m->out.images * m->out.height, width = m->flat ? pixels : m->out.width;
    struct Matmul one = *m;
    if (pixels <= w->rows) {
        one.kernels = w->kernels, one.last_kernels = w->last_kernels, one.rows = w->rows;
        one.split_channels_below = pixels + 1;
        matmul(&one, thread, threads);
        return;
    }
    if (threads > w->sharers) threads = (int)w->sharers;
    if (thread >= threads || !pixels) return;
    int8_t* const expanded = (int8_t*)(w->scratch + thread * w->scratch_bytes);
    one.tile.b = expanded, one.panel_bytes = 0;
    const int64_t tiles = (width + m->rows - 1) / m->rows, total = lines * tiles;
    const int64_t bytes = (width + tiles - 1) / tiles * m->tile.a_pixel,
                  chunk = m->chunk_bytes / bytes > 1 ? m->chunk_bytes / bytes : 1;
    for (int64_t begin = 0; begin < total; begin += chunk) {
        const int64_t count = total - begin < chunk ? total - begin : chunk,
                      last = first_unit(m, count, thread + 1, threads);
        for (int64_t unit = first_unit(m, count, thread, threads); unit < last;) {
            const int64_t panel = unit / count, first = unit % count,
                          end = first + (last - unit) < count ? first + (last - unit) : count;
            const int64_t channels =
                __builtin_popcountll((unsigned long long)(panel == m->panels - 1 ? m->last_mask : m->mask));
            expand_int4((const uint8_t*)m->tile.b + panel * m->panel_bytes, m->tile.run * 4 / INT4_CHANNELS,
                        (channels + 15) / 16, expanded);
            matmul_span(&one, panel, begin + first, begin + end, tiles, width);
            unit += end - first;
        }
    }
}
