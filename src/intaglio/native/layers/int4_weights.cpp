// Linear layers with 4-bit weights, see int4_weights.h.

#include "layers/int4_weights.h"

#include "base/functions.h"
#include "base/vectors.h"

enum {
#if defined(__AMX_INT8__)
    STREAMS = 4,            // parts of the next panel that are prefetched side by side, see `Streaming` of kernels
    EXPANDED_AHEAD = 8192,  // bytes between its beginning and the weights that are prefetched
    CHUNK_BYTES = 1 << 20   // activations that stay in the second-level cache while all panels are multiplied by them
#else
    EXPANDED_AHEAD = 2048,  // bytes between the weights that are expanded and those that are prefetched
    CHUNK_BYTES = 1 << 30
#endif
};
static_assert(FLOATS == WIDE / 4, "a vector has 4 input channels of each output channel");
typedef uint32_t Spread __attribute__((vector_size(WIDE)));  // a multiple in each 32-bit lane
typedef uint16_t BytePairs __attribute__((vector_size(WIDE)));
typedef uint8_t AllBytes __attribute__((vector_size(WIDE)));

// Expand 32 input channels of some output channels: 4 steps, which begin every `step_bytes`, to 8 steps of 4 channels.
static inline void expand_group(const uint8_t* from, Spread multiples, int64_t step_bytes, int8_t* to) {
    // A product has no carry from the low byte to the high one: 15 * 15 < 256.
    const BytePairs multiple = (BytePairs)(multiples | multiples << 16);
    const AllBytes zero = (AllBytes)(multiple * 0x0808);
    for (int64_t step = 0; step < INT4_GROUP / 8; ++step, from += step_bytes, to += 2 * step_bytes) {
        BytePairs both;
#if !defined(__AMX_INT8__)
        __builtin_prefetch(from + EXPANDED_AHEAD);
#endif
        memcpy(&both, from, WIDE);
        const AllBytes low = (AllBytes)((both & 0x0f0f) * multiple) - zero,
                       high = (AllBytes)((both >> 4 & 0x0f0f) * multiple) - zero;
        memcpy(to, &low, WIDE), memcpy(to + step_bytes, &high, WIDE);
    }
}

// Expand a panel of `lines` lines and `blocks` of 16 output channels to [step of 4 input channels][output channel][4].
static void expand_int4(const uint8_t* from, int64_t lines, int64_t blocks, int8_t* to) {
    const int64_t step_bytes = 64 * blocks, group_bytes = INT4_GROUP / 8 * step_bytes;
#if defined(__AMX_INT8__)
    const int64_t line_bytes = INT4_MULTIPLES * blocks + 2 * group_bytes, part = lines * line_bytes / STREAMS;
    const uint8_t* ahead = from + lines * line_bytes + EXPANDED_AHEAD;
#endif
    for (int64_t line = 0; line < lines; ++line, from += 2 * group_bytes, to += 4 * group_bytes) {
#if defined(__AMX_INT8__)
        for (int64_t i = 0; i < line_bytes / STREAMS; i += 64)
            for (int64_t stream = 0; stream < STREAMS; ++stream) __builtin_prefetch(ahead + stream * part + i, 0, 2);
        ahead += line_bytes / STREAMS;
#endif
        const uint8_t* multiples = from;
        from += INT4_MULTIPLES * blocks;
        for (int64_t channel = 0; channel < 16 * blocks; channel += FLOATS) {
            const uint8_t* first = from + 4 * channel;
            int8_t* const result = to + 4 * channel;
            Bytes bytes;
            memcpy(&bytes, multiples + channel, FLOATS);
            const Spread both = (Spread)widened(bytes);
            expand_group(first, both & 15, step_bytes, result);
            expand_group(first + group_bytes, both >> 4, step_bytes, result + 2 * group_bytes);
        }
    }
}

LIBRARY void matmul_int4(const struct Matmul* m, const struct Int4Weights* w, int thread, int threads) {
    const int64_t pixels = m->out.images * m->out.height * m->out.width;
    const int64_t lines = m->flat ? 1 : m->out.images * m->out.height, width = m->flat ? pixels : m->out.width;
    struct Matmul one = *m;
    if (pixels <= w->rows || !w->expands) {
        one.kernels = w->kernels, one.last_kernels = w->last_kernels, one.rows = w->rows, one.widened_kernels = 0;
        if (pixels <= w->rows) one.split_channels_below = pixels + 1;
        matmul(&one, thread, threads);
        return;
    }
    struct Share* const shares = threads > w->sharers ? 0 : m->shares;
    if (threads > w->sharers) threads = (int)w->sharers;
    if (thread >= threads || !pixels) return;
    int8_t* const expanded = (int8_t*)(w->scratch + thread * w->scratch_bytes);
    one.tile.b = expanded, one.panel_bytes = 0;
    const int64_t tiles = (width + m->rows - 1) / m->rows, total = lines * tiles;
    const int64_t chunks = (total * m->rows * m->tile.a_pixel + CHUNK_BYTES - 1) / CHUNK_BYTES;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t begin = total * chunk / chunks, some = total * (chunk + 1) / chunks - begin;
        struct Sharing s = enter_step(shares, nanoseconds_of(m, some * m->rows, 0), thread, threads);
        while (next_piece(&s)) {
            const int64_t own = first_unit(m, some, s.owner, threads), end = first_unit(m, some, s.owner + 1, threads),
                          last = piece_end(&s, own, end, some);
            for (int64_t unit = piece_begin(&s, own, end, some); unit < last;) {
                const int64_t panel = unit / some, first = unit % some, count = at_most(last - unit, some - first);
                const int64_t channels =
                    __builtin_popcountll((unsigned long long)(panel == m->panels - 1 ? m->last_mask : m->mask));
                expand_int4((const uint8_t*)m->tile.b + panel * m->panel_bytes, m->tile.run * 4 / INT4_CHANNELS,
                            (channels + 15) / 16, expanded);
                matmul_span(&one, panel, begin + first, begin + first + count, tiles, width);
                unit += count;
            }
        }
    }
}
