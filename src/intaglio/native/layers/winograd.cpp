// Convolutions of 3x3 taps by Winograd's method, see winograd.h.

#include "layers/winograd.h"

#include "base/intrinsics.h"

#if defined(__AVX2__)
enum {
    POSITIONS = 16,         // products of a square of 2 by 2 results
    MOST_SQUARES = 96,      // of a chunk: a part of a line of squares, a line, or some lines
    CACHED = 30,            // of a chunk of more than one line, so that their products stay in the first-level cache
    TOGETHER = 6,           // squares whose sums are in registers
    TRANSFORMED = 1 << 17,  // sums of inputs of a chunk
    PANEL_CHANNELS = 16,    // input channels of a vector, and output channels of a panel
    SQUARE = 4 * PANEL_CHANNELS  // sums of products of a square
};

// Return the number of input channels. The taps of a row may be one run of bytes.
static inline int64_t inputs_of(const struct Matmul* m) { return 4 * m->tile.run * m->tile.taps / 3; }

// Return the number of squares of a line.
static inline int64_t squares_of_line(const struct Matmul* m) { return (m->out.width + 1) / 2; }

// Return the largest number of squares of a chunk.
static inline int64_t squares_of_chunk(const struct Matmul* m) {
    return at_most(MOST_SQUARES, TRANSFORMED / (POSITIONS * inputs_of(m))) / TOGETHER * TOGETHER;
}

// Squares of an image that are computed together.
struct Chunk {
    int64_t image, line, lines;  // lines of squares, the first and their number
    int64_t column, across;      // squares of a line, the first and their number
    int64_t begin, end;          // tiles of each line of results, the first and the one behind the last
};

// Sums of inputs of a chunk: [position][square][input channel], `stride` from position to position.
static __attribute__((noinline)) void transform_inputs(const struct Matmul* m, const struct Chunk* s, int64_t stride,
                                                       int16_t* to) {
    const int64_t channels = inputs_of(m);
    for (int64_t y = s->line; y < s->line + s->lines; ++y)
        for (int64_t x = s->column; x < s->column + s->across; ++x, to += channels) {
            const uint8_t* from[4][4];
            for (int64_t i = 0; i < 4; ++i)  // results outside of the image read the last line or column again
                for (int64_t j = 0; j < 4; ++j)
                    from[i][j] = at(&m->in, s->image, at_most(2 * y + i, m->out.height + 1) - m->top,
                                    at_most(2 * x + j, m->out.width + 1) - m->left);
            for (int64_t c = 0; c < channels; c += PANEL_CHANNELS) {
                __m256i d[4][4], e[4][4];
                for (int i = 0; i < 4; ++i)
                    for (int j = 0; j < 4; ++j)
                        d[i][j] = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(from[i][j] + c)));
                for (int j = 0; j < 4; ++j) {
                    e[0][j] = _mm256_sub_epi16(d[0][j], d[2][j]), e[1][j] = _mm256_add_epi16(d[1][j], d[2][j]);
                    e[2][j] = _mm256_sub_epi16(d[2][j], d[1][j]), e[3][j] = _mm256_sub_epi16(d[1][j], d[3][j]);
                }
                for (int i = 0; i < 4; ++i) {
                    int16_t* place = to + 4 * i * stride + c;
                    const __m256i found[4] = {_mm256_sub_epi16(e[i][0], e[i][2]), _mm256_add_epi16(e[i][1], e[i][2]),
                                              _mm256_sub_epi16(e[i][2], e[i][1]), _mm256_sub_epi16(e[i][1], e[i][3])};
                    for (int j = 0; j < 4; ++j) _mm256_storeu_si256((__m256i*)(place + j * stride), found[j]);
                }
            }
        }
}

// Sums of products of a square and the output channels of a panel.
struct SquareSums {
    __m256i low, high;
};

// Add the products of two input channels of a square.
static inline __attribute__((always_inline)) void add_products(struct SquareSums& sums, const int16_t* inputs,
                                                               __m256i low, __m256i high) {
    int32_t pair;
    memcpy(&pair, inputs, sizeof pair);
    const __m256i both = _mm256_set1_epi32(pair);
    sums.low = _mm256_add_epi32(sums.low, _mm256_madd_epi16(both, low));
    sums.high = _mm256_add_epi32(sums.high, _mm256_madd_epi16(both, high));
}

// Multiply the inputs of `TOGETHER` squares at one position by the weights of a panel. The sums are variables, and not
// an array, which g++ 12 would keep in memory.
static __attribute__((noinline)) void multiply_squares(const int16_t* inputs, int64_t channels, const int16_t* weights,
                                                       int32_t* to) {
    struct SquareSums a = {}, b = {}, c = {}, d = {}, e = {}, f = {};
    const int16_t* others = inputs + 3 * channels;
    for (int64_t i = 0; i < channels; i += 2, weights += 32, inputs += 2, others += 2) {
        const __m256i low = _mm256_loadu_si256((const __m256i*)weights),
                      high = _mm256_loadu_si256((const __m256i*)(weights + 16));
        add_products(a, inputs, low, high);
        add_products(b, inputs + channels, low, high);
        add_products(c, inputs + 2 * channels, low, high);
        add_products(d, others, low, high);
        add_products(e, others + channels, low, high);
        add_products(f, others + 2 * channels, low, high);
    }
    const struct SquareSums all[TOGETHER] = {a, b, c, d, e, f};
    memcpy(to, all, sizeof all);
}

// Add up the sums of products of a chunk: [line][pixel][output channel]. `stride`: from position to position.
static __attribute__((noinline)) void transform_sums(const int32_t* from, const struct Chunk* s, int64_t stride,
                                                     int32_t* to) {
    const int64_t across = s->across;
    for (int64_t line = 0; line < s->lines; ++line)
        for (int64_t x = 0; x < across; ++x, from += PANEL_CHANNELS)
            for (int64_t half = 0; half < PANEL_CHANNELS; half += 8) {
                __m256i e[2][4];
                for (int64_t j = 0; j < 4; ++j) {
                    __m256i sum[4];
                    for (int64_t i = 0; i < 4; ++i)
                        sum[i] = _mm256_loadu_si256((const __m256i*)(from + (4 * i + j) * stride + half));
                    e[0][j] = _mm256_add_epi32(sum[0], _mm256_add_epi32(sum[1], sum[2]));
                    e[1][j] = _mm256_sub_epi32(_mm256_sub_epi32(sum[1], sum[2]), sum[3]);
                }
                for (int64_t i = 0; i < 2; ++i) {
                    int32_t* place = to + ((2 * line + i) * 2 * across + 2 * x) * PANEL_CHANNELS + half;
                    const __m256i left = _mm256_add_epi32(e[i][0], _mm256_add_epi32(e[i][1], e[i][2])),
                                  right = _mm256_sub_epi32(_mm256_sub_epi32(e[i][1], e[i][2]), e[i][3]);
                    _mm256_storeu_si256((__m256i*)place, _mm256_srai_epi32(left, 2));
                    _mm256_storeu_si256((__m256i*)(place + PANEL_CHANNELS), _mm256_srai_epi32(right, 2));
                }
            }
}

LIBRARY int can_transform(const struct Matmul* m) { return m->transformed && m->out.height && m->out.width; }

// Memory of a thread.
struct Scratch {
    int16_t inputs[TRANSFORMED] __attribute__((aligned(64)));
    int32_t products[POSITIONS * MOST_SQUARES * PANEL_CHANNELS] __attribute__((aligned(64)));
    int32_t sums[MOST_SQUARES * SQUARE] __attribute__((aligned(64)));
};

// Compute the results of a chunk from panel `low` to `high` (exclusive). A line has `tiles` tiles. The kernels of `w`
// read sums instead of inputs.
static void compute_chunk(const struct Matmul* m, struct Matmul* w, const struct Chunk* s, int64_t low, int64_t high,
                          int64_t tiles, struct Scratch* scratch) {
    const int64_t channels = inputs_of(m), count = s->lines * s->across, height = m->out.height, width = m->out.width;
    const int64_t squares = (count + TOGETHER - 1) / TOGETHER * TOGETHER, stride = squares * channels;
    const int64_t weights = POSITIONS * PANEL_CHANNELS * channels, line = 2 * s->line;
    transform_inputs(m, s, stride, scratch->inputs);
    w->in.line = 2 * s->across * w->in.pixel;
    w->in.base = (uint8_t*)scratch->sums - line * w->in.line - 2 * s->column * w->in.pixel;
    const int64_t first = s->image * height + line, last = s->image * height + at_most(line + 2 * s->lines, height);
    for (int64_t panel = low; panel < high; ++panel) {
        for (int64_t position = 0; position < POSITIONS; ++position)
            for (int64_t square = 0; square < count; square += TOGETHER)
                multiply_squares(scratch->inputs + position * stride + square * channels, channels,
                                 m->transformed + panel * weights + position * PANEL_CHANNELS * channels,
                                 scratch->products + (position * squares + square) * PANEL_CHANNELS);
        transform_sums(scratch->products, s, squares * PANEL_CHANNELS, scratch->sums);
        if (s->end - s->begin == tiles) {
            matmul_span(w, panel, first * tiles, last * tiles, tiles, width);
            continue;
        }
        for (int64_t y = first; y < last; ++y)
            matmul_span(w, panel, y * tiles + s->begin, y * tiles + s->end, tiles, width);
    }
}

LIBRARY void matmul_transformed(const struct Matmul* m, int thread, int threads) {
    const int64_t per_image = (m->out.height + 1) / 2, across = squares_of_line(m), most = squares_of_chunk(m);
    const int64_t lines = m->out.images * per_image, width = m->out.width;
    const int64_t tiles = (width + m->rows - 1) / m->rows, tallest = (width + tiles - 1) / tiles;
    const int shares_panels = m->out.images * m->out.height * width < m->split_channels_below || lines < threads;
    const int64_t low = shares_panels ? shard_begin(m->panels, thread, threads) : 0,
                  high = shares_panels ? shard_begin(m->panels, thread + 1, threads) : m->panels;
    if (low == high) return;
    // Parts of a line are whole tiles, so that neighbouring parts may share a square.
    const int64_t together = across <= most ? tiles : at_least((2 * most - 2) / tallest, 1);
    const int64_t parts = (tiles + together - 1) / together, some = at_least(at_most(CACHED, most) / across, 1);
    struct Scratch scratch;
    struct Matmul w = *m;
    w.kernels = m->sums_kernels, w.last_kernels = m->sums_last_kernels;
    w.stride_y = 1, w.top = w.left = 0;
    w.in.pixel = w.tile.a_pixel = PANEL_CHANNELS * sizeof(int32_t), w.in.image = 0;
    struct Chunk s = {};
    struct Share* const shares = shares_panels ? 0 : m->shares;
    struct Sharing pieces = enter_step(shares, nanoseconds_of(m, lines * 2 * width, 0), thread, threads);
    while (next_piece(&pieces)) {
        const int64_t first = shares_panels ? 0 : shard_begin(lines, pieces.owner, threads),
                      last = shares_panels ? lines : shard_begin(lines, pieces.owner + 1, threads);
        const int64_t end = piece_end(&pieces, first, last, some);
        for (int64_t line = piece_begin(&pieces, first, last, some); line < end; line += s.lines) {
            s.image = line / per_image, s.line = line % per_image;
            s.lines = at_most(at_most(some, end - line), per_image - s.line);
            for (int64_t part = 0; part < parts; ++part) {
                s.begin = shard_begin(tiles, part, parts), s.end = shard_begin(tiles, part + 1, parts);
                s.column = pixel_of_tile(s.begin, tiles, width) / 2;
                s.across = (pixel_of_tile(s.end, tiles, width) + 1) / 2 - s.column;
                compute_chunk(m, &w, &s, low, high, tiles, &scratch);
            }
        }
    }
}
#else
LIBRARY int can_transform(const struct Matmul* m) {
    (void)m;
    return 0;
}

LIBRARY void matmul_transformed(const struct Matmul* m, int thread, int threads) {
    (void)m, (void)thread, (void)threads;
}
#endif
