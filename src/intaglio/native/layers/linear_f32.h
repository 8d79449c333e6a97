// Weight-only quantized linear layers: activations are float32, weights are stored as int8 or float16. Bit for bit
// `linear` of numerics/float_math.py. Weights are converted to float32 in registers, so that memory is read only for
// their stored bits. Weights of groups of inputs also get their scale and offset there. Compile with -ffp-contract=off.
#pragma once

#include "elementwise/loops.h"
#include "base/run.h"

enum { PANEL_F32 = 64 };                  // outputs of a panel of weights
enum { TALLEST = FLOATS == 16 ? 6 : 2 };  // rows that a weight is multiplied by while it is in a register
enum { BLOCK = 8 * TALLEST };             // rows in a thread's unit of work

// y = x @ weight.T * scales + bias with x f32[rows, inputs] and y f32[rows, outputs]. `weight` consists of whole
// panels, the last one padded with zeros. `scales` and `bias`, f32[outputs], may be null. Of weights in groups,
// `steps` has the scales and, if there are any, the offsets.
struct FloatLinear {
    const float* x;
    const void* weight;  // [panel][input][PANEL_F32], int8 or float16
    const float *scales, *bias;
    const float* steps;  // [panel][group of inputs][scale, offset][PANEL_F32]
    float* y;
    int64_t rows, inputs, outputs, group;
    struct Share* shares;  // of the threads; null: each computes its own part
};

// Convert int8 weights to float32.
static inline __attribute__((always_inline)) Reals reals_at(const int8_t* from) {
#if defined(__AVX512F__)
    return (Reals)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    return (Reals)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    typedef int8_t VectorU8 __attribute__((vector_size(FLOATS)));
    VectorU8 quantized;
    memcpy(&quantized, from, sizeof quantized);
    return __builtin_convertvector(quantized, Reals);
#endif
}

// Convert float16 weights to float32, exactly. Without an instruction for it, exponents increase by 112, those of
// infinities and NaN by 224; subnormals get the exponent of 2^-14, and 2^-14 is subtracted again.
static inline __attribute__((always_inline)) Reals reals_at(const uint16_t* from) {
#if defined(__AVX512F__)
    return (Reals)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
    return (Reals)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    Halves halves;
    memcpy(&halves, from, sizeof halves);
    const RealBits bits = __builtin_convertvector(halves, RealBits), magnitude = (bits & 0x7fff) << 13;
    const RealBits moved = magnitude + (magnitude < 31 << 23 ? (RealBits){} + (112 << 23) : (RealBits){} + (224 << 23));
    const Reals small = (Reals)(magnitude + (113 << 23)) - 0x1p-14f;
    return (Reals)((magnitude < 1 << 23 ? (RealBits)small : moved) | (bits & 0x8000) << 16);
#endif
}

// Compute ROWS rows of ACROSS vectors of outputs, the first of which is `output`. STEPS is 0 for weights without
// groups, 1 for groups with scales, and 2 for groups with scales and offsets.
template <int ROWS, int ACROSS, int STEPS, typename Element>
static inline __attribute__((always_inline)) void float_tile(const struct FloatLinear* q, int64_t row, int64_t output) {
    const int64_t panel = output / PANEL_F32 * PANEL_F32, group = STEPS ? q->group : q->inputs;
    const Element* weight = (const Element*)q->weight + panel * q->inputs + (output - panel);
    const float* steps = STEPS ? q->steps + panel * ((q->inputs + group - 1) / group) * STEPS + (output - panel) : 0;
    const float* x = q->x + row * q->inputs;
    Reals sums[ROWS][ACROSS] = {};
    for (int64_t first = 0; first < q->inputs; first += group, steps += STEPS * PANEL_F32) {
        const int64_t last = first + group < q->inputs ? first + group : q->inputs;
        Reals scales[ACROSS], offsets[ACROSS];
        if constexpr (STEPS > 0)
#pragma GCC unroll 8
            for (int v = 0; v < ACROSS; ++v) scales[v] = read_f32(steps + v * FLOATS, 1, FLOATS);
        if constexpr (STEPS > 1)
#pragma GCC unroll 8
            for (int v = 0; v < ACROSS; ++v) offsets[v] = read_f32(steps + PANEL_F32 + v * FLOATS, 1, FLOATS);
        for (int64_t k = first; k < last; ++k, weight += PANEL_F32)
#pragma GCC unroll 8
            for (int v = 0; v < ACROSS; ++v) {
                Reals each = reals_at(weight + v * FLOATS);
                if constexpr (STEPS > 0) each = each * scales[v];
                if constexpr (STEPS > 1) each = each + offsets[v];
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; ++i) sums[i][v] = sums[i][v] + each * x[i * q->inputs + k];
            }
    }
#pragma GCC unroll 8
    for (int v = 0; v < ACROSS; ++v) {
        const int64_t first = output + v * FLOATS, left = q->outputs - first,
                      count = left < FLOATS ? left : (int64_t)FLOATS;
        if (count <= 0) break;
        // Multiplying by 1 and adding -0 change no bit.
        const Reals scale = q->scales ? read_f32(q->scales + first, 1, count) : all_lanes(1.0f);
        const Reals bias = q->bias ? read_f32(q->bias + first, 1, count) : all_lanes(-0.0f);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
            write_f32(q->y + (row + i) * q->outputs + first, 1, count, sums[i][v] * scale + bias);
    }
}

// Compute up to ROWS rows of a panel. A single row is computed for more outputs at once, so that additions wait for
// each other less.
template <int ROWS, int STEPS, typename Element>
static inline void float_rows(const struct FloatLinear* q, int64_t row, int64_t rows, int64_t panel) {
    enum { ACROSS = ROWS == 1 && FLOATS < 16 ? 8 : 4 };
    if (rows < ROWS) {
        if constexpr (ROWS > 1) float_rows<ROWS - 1, STEPS, Element>(q, row, rows, panel);
        return;
    }
    for (int64_t output = panel; output < panel + PANEL_F32 && output < q->outputs; output += ACROSS * FLOATS)
        float_tile<ROWS, ACROSS, STEPS, Element>(q, row, output);
}

// Compute this thread's part of the layer. A unit of work is a block of rows of a panel; units of the same panel follow
// each other.
template <int STEPS, typename Element>
static inline void float_linear(const struct FloatLinear* q, int thread, int threads) {
    const int64_t blocks = (q->rows + BLOCK - 1) / BLOCK, units = blocks * ((q->outputs + PANEL_F32 - 1) / PANEL_F32);
    const int64_t products = q->rows * q->inputs * q->outputs;
    struct Sharing s = enter_step(q->shares, products / FLOAT_PRODUCTS_PER_NS, thread, threads);
    while (next_piece(&s)) {
        const int64_t end = first_item(&s, units, 1);
        for (int64_t unit = first_item(&s, units, 0); unit < end; ++unit) {
            const int64_t first = unit % blocks * BLOCK, last = first + BLOCK < q->rows ? first + BLOCK : q->rows;
            for (int64_t row = first; row < last; row += TALLEST)
                float_rows<TALLEST, STEPS, Element>(q, row, last - row < TALLEST ? last - row : (int64_t)TALLEST,
                                                    unit / blocks * PANEL_F32);
        }
    }
}

// Compute this thread's part of the layers of all groups of rows, each with a weight, scales and a bias of its own. The
// last row of group g is the one before `ends[g * step]`, see ops/products/grouped_linear.py.
template <typename Element>
static inline void float_linear_groups(const struct FloatLinear* q, const int64_t* ends, int64_t step, int64_t groups,
                                       int thread, int threads) {
    const int64_t columns = (q->outputs + PANEL_F32 - 1) / PANEL_F32 * PANEL_F32;
    struct FloatLinear one = *q;
    int64_t first = 0;
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t given = ends[group * step], end = given < first ? first : given > q->rows ? q->rows : given;
        one.x = q->x + first * q->inputs, one.y = q->y + first * q->outputs, one.rows = end - first;
        float_linear<0, Element>(&one, thread, threads);
        one.weight = (const Element*)one.weight + columns * q->inputs;
        if (one.scales) one.scales += q->outputs;
        if (one.bias) one.bias += q->outputs;
        first = end;
    }
    const int64_t left = q->rows - first, begin = first + shard_begin(left, thread, threads),
                  end = first + shard_begin(left, thread + 1, threads);
    memset(q->y + begin * q->outputs, 0, (size_t)((end - begin) * q->outputs) * sizeof(float));
}
