// Products of two activations: the second operand is packed while the program runs, then the kernels of constant weights
// multiply. Attention keeps the scores of a few queries in cache from one product to the other.
#pragma once

#include "program.h"

enum { QUERIES = 24, PANEL = 64, WIDEST_HEAD = 256 };   // rows at once, as in plan/scratch_memory.py; columns; values, as in ops/attention.py

// Kernels with results in float: `table[blocks * (rows + 1) + height]`, panels of up to `blocks` times 16 columns.
struct FloatKernels {
    const TileKernel* table;
    int64_t blocks, rows;
};

// -- packing --------------------------------------------------------------------------------------------------------------

// Levels with zero point 128, `depth` by `columns`, any distances apart -> panels of weights, [panel][depth / 4][columns of
// the panel, whole blocks][4], zeros where there is nothing.
struct Operand {
    const uint8_t* base;
    int64_t depth_apart, column_apart, depth, columns;
};

static inline uint32_t four_levels(const struct Operand* o, int64_t d, int64_t c) {
    uint32_t found = 0;
    for (int64_t i = 0; i < 4 && d + i < o->depth; ++i)
        found |= (uint32_t)(o->base[(d + i) * o->depth_apart + c * o->column_apart] ^ 128) << (8 * i);
    return found;
}

#if defined(__AVX512BW__)
// 16 rows of 16 dwords -> its columns.
static inline void transpose16(__m512i* x) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + 2 + j]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + 2 + j]);
        }
    for (int i = 0; i < 4; ++i) {
        const __m512i a = _mm512_shuffle_i32x4(x[i], x[4 + i], 0x88), b = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0x88);
        const __m512i c = _mm512_shuffle_i32x4(x[i], x[4 + i], 0xdd), d = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0xdd);
        y[i] = _mm512_shuffle_i32x4(a, b, 0x88), y[8 + i] = _mm512_shuffle_i32x4(a, b, 0xdd);
        y[4 + i] = _mm512_shuffle_i32x4(c, d, 0x88), y[12 + i] = _mm512_shuffle_i32x4(c, d, 0xdd);
    }
    for (int i = 0; i < 16; ++i) x[i] = y[i];
}

// 16 columns whose levels lie side by side, 64 of each at a time.
static inline void pack_lines(const struct Operand* o, int64_t column, int64_t width, int8_t* to) {
    for (int64_t d = 0; d < o->depth; d += 64) {
        const int64_t left = o->depth - d < 64 ? o->depth - d : 64;
        const __mmask64 there = ~0ull >> (64 - left);
        const __m512i flip = _mm512_maskz_set1_epi8(there, (char)128);
        __m512i x[16];
        for (int i = 0; i < 16; ++i)
            x[i] = column + i < o->columns
                ? _mm512_xor_si512(_mm512_maskz_loadu_epi8(there, o->base + (column + i) * o->column_apart + d), flip)
                : _mm512_setzero_si512();
        transpose16(x);
        for (int i = 0; 4 * i < left; ++i) _mm512_storeu_si512(to + (d / 4 + i) * 4 * width, x[i]);
    }
}
#else
static inline void pack_lines(const struct Operand* o, int64_t column, int64_t width, int8_t* to) {
    for (int64_t c = 0; c < 16; ++c)
        for (int64_t d = 0; d < o->depth; d += 4) {
            uint32_t levels = 0;
            if (column + c < o->columns && d + 4 <= o->depth) {
                memcpy(&levels, o->base + (column + c) * o->column_apart + d, sizeof levels);
                levels ^= 0x80808080;
            } else if (column + c < o->columns) {
                levels = four_levels(o, d, column + c);
            }
            memcpy(to + d * width + 4 * c, &levels, sizeof levels);
        }
}
#endif

// Four levels of each of some columns that lie side by side.
static inline void pack_quads(const struct Operand* o, int64_t d, int64_t column, int64_t width, int8_t* to) {
    const int64_t columns = o->columns - column < width ? o->columns - column : width;
    const uint8_t* row = o->base + d * o->depth_apart + column;
    uint32_t quads[PANEL] = {};
    if (d + 4 <= o->depth) {
        const uint8_t *second = row + o->depth_apart, *third = second + o->depth_apart, *fourth = third + o->depth_apart;
        for (int64_t c = 0; c < columns; ++c)
            quads[c] = (row[c] | (uint32_t)second[c] << 8 | (uint32_t)third[c] << 16 | (uint32_t)fourth[c] << 24) ^ 0x80808080;
    } else {
        for (int64_t c = 0; c < columns; ++c) quads[c] = four_levels(o, d, column + c);
    }
    memcpy(to, quads, (size_t)(4 * width));
}

static __attribute__((noinline)) void pack_operand(const struct Operand* o, int64_t blocks, int8_t* to) {
    for (int64_t first = 0; first < o->columns; first += 16 * blocks) {
        const int64_t left = (o->columns - first + 15) / 16 * 16, width = left < 16 * blocks ? left : 16 * blocks;
        if (o->depth_apart == 1) {
            for (int64_t c = 0; c < width; c += 16) pack_lines(o, first + c, width, to + 4 * c);
        } else if (o->column_apart == 1) {
            for (int64_t d = 0; d < o->depth; d += 4) pack_quads(o, d, first, width, to + d * width);
        } else {
            for (int64_t d = 0; d < o->depth; d += 4)
                for (int64_t c = 0; c < width; ++c) {
                    const uint32_t quad = first + c < o->columns ? four_levels(o, d, first + c) : 0;
                    memcpy(to + d * width + 4 * c, &quad, sizeof quad);
                }
        }
        to += (o->depth + 3) / 4 * 4 * width;
    }
}

// The zero point of what is multiplied by a packed operand: -zero times the sum of each column.
static __attribute__((noinline)) void column_terms(const struct Operand* o, int64_t blocks, const int8_t* packed, int32_t zero, int32_t* terms) {
    for (int64_t first = 0; first < o->columns; first += 16 * blocks) {
        const int64_t left = (o->columns - first + 15) / 16 * 16, width = left < 16 * blocks ? left : 16 * blocks;
        for (int64_t c = 0; c < width; c += 16) {
            int32_t sums[16] = {};
            for (int64_t d = 0; d < o->depth; d += 4) {
                const int8_t* quads = packed + d * width + 4 * c;
#if defined(__AVX512VNNI__)
                _mm512_storeu_si512(sums, _mm512_dpbusd_epi32(_mm512_loadu_si512(sums), _mm512_set1_epi8(1), _mm512_loadu_si512(quads)));
#else
                for (int i = 0; i < 16; ++i) sums[i] += quads[4 * i] + quads[4 * i + 1] + quads[4 * i + 2] + quads[4 * i + 3];
#endif
            }
            for (int i = 0; i < 16; ++i) terms[first + c + i] = -zero * sums[i];
        }
        packed += (o->depth + 3) / 4 * 4 * width;
    }
}

// Rows times the first `columns` of a packed operand, whose panels are `steps` long where this product takes as many or
// fewer of its own: t has rows, factor, run and result. All of the last block is written, or with `exact` what it has.
static inline void multiply(const struct FloatKernels* k, const struct Tile* product, const struct Operand* o, int64_t columns, int64_t rows, int exact) {
    const int64_t tiles = (rows + k->rows - 1) / k->rows, least = rows / tiles, longer = rows % tiles;
    const int64_t panel_bytes = (o->depth + 3) / 4 * 64 * k->blocks;
    struct Tile t = *product;
    t.ahead = panel_bytes;
    for (int64_t first = 0; first < columns; first += 16 * k->blocks) {
        const int64_t whole = (o->columns - first + 15) / 16, blocks = whole < k->blocks ? whole : k->blocks;
        const int64_t last = columns - first - 16 * (blocks - 1);
        const TileKernel* kernels = k->table + blocks * (k->rows + 1);
        t.a = product->a, t.out = product->out + 4 * first;
        t.mask = exact && last < 16 ? (1ll << (16 * (blocks - 1) + last)) - 1 : (int64_t)(~0ull >> (64 - 16 * blocks));
        t.count = longer;
        if (longer) kernels[least + 1](&t);
        t.count = tiles - longer;
        kernels[least](&t);
        t.b += panel_bytes, t.bias += 16 * k->blocks;
    }
}

static const int32_t NO_TERMS[WIDEST_HEAD] = {};

static inline Reals load_reals(const float* from) {
    Reals x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline void store_reals(float* to, Reals x) { memcpy(to, &x, sizeof x); }

// Rows of floats, each times its factor -> levels; floats up to a multiple of 16 are read.
static __attribute__((noinline)) void rows_to_levels(const float* from, int64_t from_row, int64_t rows, const float* factor, const struct Limits* q, uint8_t* to, int64_t to_row, int64_t columns) {
    const float least = (float)(q->low - q->zero_point), most = (float)(q->high - q->zero_point);
    const int32_t zero_point = q->zero_point;
    for (int64_t r = 0; r < rows; ++r, from += from_row, to += to_row) {
        int64_t c = 0;
#if defined(__AVX512BW__)
        const struct Finish f = finishing(q, UNKNOWN);
        for (; c + 64 <= columns; c += 64) {
            __m512 steps[4];
            for (int i = 0; i < 4; ++i) steps[i] = _mm512_mul_ps(_mm512_loadu_ps(from + c + 16 * i), _mm512_set1_ps(factor[r]));
            _mm512_storeu_si512(to + c, gather(pack(steps, &f)));
        }
#endif
        for (; c < columns; c += 16) {
            RealBits words[16 / FLOATS];
            uint8_t levels[16];
            for (int i = 0; i < 16 / FLOATS; ++i)
                words[i] = whole(shifted(least_of(most_of(load_reals(from + c + i * FLOATS) * factor[r], least), most))) + zero_point;
            narrow16(words, levels);
            memcpy(to + c, levels, c + 16 <= columns ? 16 : (size_t)(columns - c));
        }
    }
}

// -- attention ------------------------------------------------------------------------------------------------------------

// Levels [batch, head, row, value], values side by side. Strides in bytes.
struct Heads {
    uint8_t* base;
    int64_t batch, head, row;
};

static inline uint8_t* head_of(const struct Heads* h, int64_t image, int64_t head) { return h->base + image * h->batch + head * h->head; }

struct Attention {
    struct Heads q, k, v, out;
    const uint8_t* mask;               // null, or of `mask_bytes`: 1, false where a key is excluded, or 4, floats that are added
    int64_t mask_bytes, mask_apart[4]; // bytes along batch, head, query, key; 0 where it broadcasts
    int64_t batch, heads, shared;      // so many heads have one K and V
    int64_t queries, keys, depth, width, causal;
    int32_t zero_q;
    float factor, ratio;               // product -> score; s_v / s_out
    const struct Limits* limits;
    struct FloatKernels kernels;
    uint8_t* scratch;                  // `sharers` times `scratch_bytes`
    int64_t scratch_bytes, sharers;
};

// What one thread has for itself; all lines are whole.
struct AttentionScratch {
    struct Operand k, v;
    int8_t *packed_k, *packed_v;
    int32_t* terms;                    // of keys
    float *mask, *scores, *sums;       // of keys; QUERIES by keys; QUERIES by values
    uint8_t* levels;                   // QUERIES by keys
    int64_t row, sums_row;             // keys and values, padded
    const uint8_t* masked;             // what `mask` is made of
};

static inline struct AttentionScratch attention_scratch(const struct Attention* a, int thread) {
    struct AttentionScratch s = {};
    s.row = (a->keys + PANEL - 1) / PANEL * PANEL, s.sums_row = (a->width + 15) / 16 * 16;
    uint8_t* at = a->scratch + thread * a->scratch_bytes;
    s.packed_k = (int8_t*)at, at += s.row * ((a->depth + 3) / 4 * 4);
    s.packed_v = (int8_t*)at, at += s.row * s.sums_row;
    s.terms = (int32_t*)at, at += 4 * s.row;
    s.mask = (float*)at, at += 4 * s.row;
    s.scores = (float*)at, at += 4 * s.row * QUERIES;
    s.levels = at, at += s.row * QUERIES;
    s.sums = (float*)at;
    return s;
}

// K by columns of keys, V by columns of values.
static inline void pack_heads(const struct Attention* a, struct AttentionScratch* s, int64_t image, int64_t head) {
    s->k = (struct Operand){head_of(&a->k, image, head), 1, a->k.row, a->depth, a->keys};
    s->v = (struct Operand){head_of(&a->v, image, head), a->v.row, 1, a->keys, a->width};
    pack_operand(&s->k, a->kernels.blocks, s->packed_k);
    pack_operand(&s->v, a->kernels.blocks, s->packed_v);
    column_terms(&s->k, a->kernels.blocks, s->packed_k, a->zero_q, s->terms);
}

static const float MINUS_INFINITY = -__builtin_inff();

static inline float largest(Reals x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int i = 1; i < FLOATS; ++i) most = x[i] > most ? x[i] : most;
    return most;
#endif
}

// numerics.mask_powers of one.
static inline float mask_power(float x) {
    const float wide = x * 1.44269502162933349609375f, bounded = wide > -0x1.fffffep127f ? wide : -0x1.fffffep127f;
    return x == MINUS_INFINITY ? x : bounded;
}

// One row of the mask as floats to add. Kept while rows are the same.
static __attribute__((noinline)) const float* mask_row(const struct Attention* a, struct AttentionScratch* s, const uint8_t* from) {
    if (s->masked == from) return s->mask;
    const int64_t apart = a->mask_apart[3];
    s->masked = from;
    if (a->mask_bytes == 1) {
        for (int64_t j = 0; j < a->keys; ++j) s->mask[j] = from[j * apart] ? 0.0f : MINUS_INFINITY;
    } else if (apart == 4) {
        memcpy(s->mask, from, (size_t)(4 * a->keys));
        for (int64_t j = 0; j < a->keys; ++j) s->mask[j] = mask_power(s->mask[j]);
    } else {
        for (int64_t j = 0; j < a->keys; ++j) {
            float x;
            memcpy(&x, from + j * apart, sizeof x);
            s->mask[j] = mask_power(x);
        }
    }
    return s->mask;
}

// The largest score of a row, the mask added; behind the last one -infinity, up to a multiple of 16.
static inline float largest_score(float* x, const float* mask, int64_t keys) {
    const int64_t padded = (keys + 15) / 16 * 16;
    for (int64_t j = keys; j < padded; ++j) x[j] = MINUS_INFINITY;
    Reals most = every_lane(MINUS_INFINITY);
    if (mask)
        for (int64_t j = 0; j < padded; j += FLOATS) {
            const Reals sum = load_reals(x + j) + load_reals(mask + j);
            store_reals(x + j, sum);
            most = sum > most ? sum : most;
        }
    else
        for (int64_t j = 0; j < padded; j += FLOATS) {
            const Reals score = load_reals(x + j);
            most = score > most ? score : most;
        }
    return largest(most);
}

// 255 * 2^f.
static inline Reals level_terms(Reals f) {
    const Reals total = (0x1.c232b0p+3f * f + 0x1.eeed58p+5f) * f + 0x1.61902ap+7f;
    return total * f + 0x1.fdf69cp+7f;
}

// numerics.probability_levels of a row of scores; their sum. Scores up to a multiple of 16 are read, as many levels
// written. What is no number converts to the least integer, which saturates to 0.
static inline int32_t row_levels(const float* x, float top, int64_t keys, uint8_t* levels) {
    int64_t j = 0;
    int32_t sum = 0;
#if defined(__AVX512VNNI__)
    __m512i sums = _mm512_setzero_si512();
    for (; j + 64 <= keys; j += 64) {
        __m512i words[4];
        for (int i = 0; i < 4; ++i) {
            const __m512 power = _mm512_sub_ps(_mm512_loadu_ps(x + j + 16 * i), _mm512_set1_ps(top));
            const __m512 n = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            words[i] = _mm512_cvtps_epi32(_mm512_scalef_ps((__m512)level_terms((Reals)_mm512_sub_ps(power, n)), n));
        }
        const __m512i low = _mm512_packs_epi32(words[0], words[1]), high = _mm512_packs_epi32(words[2], words[3]);
        const __m512i bytes = gather(_mm512_packus_epi16(low, high));
        _mm512_storeu_si512(levels + j, bytes);
        sums = _mm512_dpbusd_epi32(sums, bytes, _mm512_set1_epi8(1));
    }
    sum = _mm512_reduce_add_epi32(sums);
#endif
    RealBits rest = {};
    for (; j < keys; j += 16) {
        RealBits words[16 / FLOATS];
        for (int i = 0; i < 16 / FLOATS; ++i) {
            const Reals power = most_of(load_reals(x + j + i * FLOATS) - top, -12.0f), rounded = shifted(power);
            const RealBits total = (RealBits)level_terms(power - integral(rounded));
            rest += words[i] = whole(shifted((Reals)(total + (whole(rounded) << 23))));   // times 2^n
        }
        narrow16(words, levels + j);
    }
    for (int i = 0; i < FLOATS; ++i) sum += rest[i];
    return sum;
}

// Keys of a query, but for those a mask excludes.
static inline int64_t own_keys(const struct Attention* a, int64_t query) { return a->causal && query < a->keys ? query + 1 : a->keys; }

// Queries first..last of one head.
static __attribute__((noinline)) void attend(const struct Attention* a, struct AttentionScratch* s, int64_t image, int64_t head, int64_t first, int64_t last) {
    const int64_t rows = last - first, keys = own_keys(a, last - 1), steps = (keys + 3) / 4;
    float factor[PANEL], tops[QUERIES], shares[QUERIES];
    for (int i = 0; i < PANEL; ++i) factor[i] = a->factor;
    struct Tile t = {};
    t.a = head_of(&a->q, image, head) + first * a->q.row, t.a_pixel = a->q.row;
    t.b = s->packed_k, t.tap_rows = t.taps = 1, t.run = (a->depth + 3) / 4;
    t.bias = s->terms, t.factor = factor, t.out = (uint8_t*)s->scores, t.out_pixel = 4 * s->row;
    multiply(&a->kernels, &t, &s->k, keys, rows, 0);
    const uint8_t* mask = a->mask ? a->mask + image * a->mask_apart[0] + head * a->mask_apart[1] : 0;
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t query = first + i;
        tops[i] = largest_score(s->scores + i * s->row, mask ? mask_row(a, s, mask + query * a->mask_apart[2]) : 0, own_keys(a, query));
    }
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t own = own_keys(a, first + i), end = (own + 15) / 16 * 16;
        uint8_t* levels = s->levels + i * s->row;
        const int32_t sum = row_levels(s->scores + i * s->row, tops[i], own, levels);
        if (end < 4 * steps) memset(levels + end, 0, (size_t)(4 * steps - end));
        shares[i] = sum ? a->ratio / (float)sum : 0.0f;
    }
    if (steps) {
        for (int i = 0; i < PANEL; ++i) factor[i] = 1.0f;
        t.a = s->levels, t.a_pixel = s->row, t.b = s->packed_v, t.run = steps;
        t.bias = NO_TERMS, t.out = (uint8_t*)s->sums, t.out_pixel = 4 * s->sums_row;
        multiply(&a->kernels, &t, &s->v, a->width, rows, 0);
    } else {
        memset(s->sums, 0, (size_t)(4 * s->sums_row * rows));
    }
    uint8_t* out = head_of(&a->out, image, head) + first * a->out.row;
    rows_to_levels(s->sums, s->sums_row, rows, shares, a->limits, out, a->out.row, a->width);
}

// Threads share blocks of queries; each packs the keys and values it comes to need.
static __attribute__((noinline)) void attention(const struct Attention* a, int thread, int threads) {
    if (threads > a->sharers) threads = (int)a->sharers;
    if (thread >= threads) return;
    const int64_t blocks = (a->queries + QUERIES - 1) / QUERIES, total = a->batch * a->heads * blocks;
    struct AttentionScratch s = attention_scratch(a, thread);
    int64_t packed = -1;
    for (int64_t unit = share(total, thread, threads); unit < share(total, thread + 1, threads); ++unit) {
        const int64_t block = unit % blocks, head = unit / blocks % a->heads, image = unit / blocks / a->heads;
        const int64_t pair = image * a->heads + head / a->shared;
        if (pair != packed) pack_heads(a, &s, image, head / a->shared);
        packed = pair;
        attend(a, &s, image, head, a->queries * block / blocks, a->queries * (block + 1) / blocks);
    }
}

// -- matrix products ------------------------------------------------------------------------------------------------------

// [outer, inner, rows, depth] times [outer, inner, depth, columns]; strides in bytes, 0 where an operand broadcasts.
struct Product {
    struct Heads a, out;               // batches and heads are the outer axes
    const uint8_t* b;
    int64_t b_batch, b_head, depth_apart, column_apart;
    int64_t batch, heads, rows, depth, columns;
    int32_t zero_a;
    float factor;
    const struct Limits* limits;       // null: results stay in float
    const uint8_t* table;              // of results, or null
    struct FloatKernels kernels;
    uint8_t* scratch;
    int64_t scratch_bytes, sharers;
    struct Epilogue epilogue;          // `take` may be null; else nothing is written to `out`
};

// Some rows of one matrix, a panel of columns after the other.
static __attribute__((noinline)) void multiply_rows(const struct Product* p, const struct Operand* o, const int8_t* packed, const int32_t* terms, const uint8_t* a, uint8_t* out, int64_t pixel, int64_t rows) {
    float factor[PANEL], ones[QUERIES], real[QUERIES * PANEL] __attribute__((aligned(64)));
    for (int i = 0; i < PANEL; ++i) factor[i] = p->factor;
    for (int i = 0; i < QUERIES; ++i) ones[i] = 1.0f;
    struct Tile t = {};
    t.a = a, t.a_pixel = p->a.row, t.b = packed, t.tap_rows = t.taps = 1, t.run = (p->depth + 3) / 4;
    t.bias = terms, t.factor = factor, t.out = out, t.out_pixel = p->out.row;
    const struct Epilogue* epilogue = p->epilogue.take ? &p->epilogue : 0;
    if (!p->limits && !epilogue) {
        multiply(&p->kernels, &t, o, p->columns, rows, 1);
        return;
    }
    const int64_t panel = 16 * p->kernels.blocks;
    struct Operand one = *o;
    for (int64_t first = 0; first < p->columns; first += panel) {
        one.columns = p->columns - first < panel ? p->columns - first : panel;
        t.out = (uint8_t*)real, t.out_pixel = 4 * panel;
        multiply(&p->kernels, &t, &one, one.columns, rows, 0);
        uint8_t levels[QUERIES * PANEL], *to = epilogue ? levels : out + first;
        const int64_t apart = epilogue ? PANEL : p->out.row;
        if (p->limits) rows_to_levels(real, panel, rows, ones, p->limits, to, apart, one.columns);
        if (p->table) look_up_here(to, rows, apart, one.columns, p->table);
        if (epilogue) {
            const uint8_t* made = p->limits ? levels : (const uint8_t*)real;
            epilogue->take(epilogue->run, made, p->limits ? apart : 4 * panel, pixel, rows, first, one.columns);
        }
        t.b += (p->depth + 3) / 4 * 4 * panel, t.bias += panel;
    }
}

static __attribute__((noinline)) void product(const struct Product* p, int thread, int threads) {
    if (threads > p->sharers) threads = (int)p->sharers;
    if (thread >= threads) return;
    const int64_t blocks = (p->rows + QUERIES - 1) / QUERIES, total = p->batch * p->heads * blocks;
    int8_t* packed = (int8_t*)(p->scratch + thread * p->scratch_bytes);
    int32_t* terms = (int32_t*)(packed + (p->columns + PANEL - 1) / PANEL * PANEL * ((p->depth + 3) / 4 * 4));
    const uint8_t* of = 0;
    for (int64_t unit = share(total, thread, threads); unit < share(total, thread + 1, threads); ++unit) {
        const int64_t block = unit % blocks, head = unit / blocks % p->heads, image = unit / blocks / p->heads;
        const struct Operand o = {p->b + image * p->b_batch + head * p->b_head, p->depth_apart, p->column_apart, p->depth, p->columns};
        if (o.base != of) {
            pack_operand(&o, p->kernels.blocks, packed);
            column_terms(&o, p->kernels.blocks, packed, p->zero_a, terms);
        }
        of = o.base;
        const int64_t first = p->rows * block / blocks, last = p->rows * (block + 1) / blocks;
        multiply_rows(p, &o, packed, terms, head_of(&p->a, image, head) + first * p->a.row, head_of(&p->out, image, head) + first * p->out.row, (image * p->heads + head) * p->rows + first, last - first);
    }
}
