// Quantized attention, see attention.h.

#include "sequences/attention.h"

#include "products/operand.h"
#include "sequences/few_queries.h"

enum {
#if defined(__AMX_INT8__)
    // Keys that a tile register holds. A product over a number of keys without a large divisor would take many steps.
    // Probabilities of further keys are 0, whatever is read behind the values.
    KEYS_OF_STEP = PANEL,
    TILED_ROWS = 5  // fewer rows are multiplied without tile registers, 4 of them up to 256 keys
#else
    KEYS_OF_STEP = 4,
    TILED_ROWS = 1
#endif
};

// Scratch memory of one thread. All parts are whole cache lines.
struct AttentionScratch {
    struct Operand k, v;
    int8_t *packed_k, *packed_v;
    int32_t* terms;                    // zero-point term of each key
    float *mask, *scores, *sums;       // [keys]; [QUERY_BLOCK][keys]; [QUERY_BLOCK][values of a head]
    uint8_t* probabilities;            // [QUERY_BLOCK][keys]: quantized probabilities
    int64_t row, sums_row, score_row;  // number of keys, of values, and of keys with a line more, padded
    const uint8_t* masked;             // the row that `mask` was computed from
    int64_t masked_keys;               // its keys in `mask`
};

// Divide the scratch memory of a thread, in the order of attention_scratch in ops/products/attention.py.
static inline struct AttentionScratch attention_scratch(const struct Attention* a, int thread) {
    struct AttentionScratch s = {};
    s.row = (a->keys + PANEL - 1) / PANEL * PANEL, s.sums_row = (a->width + 15) / 16 * 16, s.score_row = s.row + 16;
    uint8_t* at = a->scratch + thread * a->scratch_bytes;
    s.packed_k = (int8_t*)at, at += s.row * ((a->depth + 3) / 4 * 4);
    s.packed_v = (int8_t*)at, at += s.row * s.sums_row;
    s.terms = (int32_t*)at, at += 4 * s.row;
    s.mask = (float*)at, at += 4 * s.row;
    s.scores = (float*)at, at += 4 * s.score_row * QUERY_BLOCK;
    s.probabilities = at, at += s.row * QUERY_BLOCK;
    s.sums = (float*)at;
    return s;
}

// Return whether up to `most` rows of queries have the same keys: one query of several heads, which read keys and
// values once, or some queries of one head, if not too many heads read the same ones again.
static inline int has_few_rows(const struct Attention* a, int64_t most) {
    return a->queries == 1 ? a->shared <= most : a->queries <= most && a->shared <= FEW_READS;
}

// Return whether values, or keys, are read in place.
static inline int reads_in_place(const struct Attention* a) { return has_few_rows(a, FEW_ROWS); }
static inline int scores_in_place(const struct Attention* a) { return has_few_rows(a, SCORED_ROWS); }

// Pack what is read of K and V of one head, unless it is read in place; a column is a key of K, and a value of V.
static inline void pack_heads(const struct Attention* a, struct AttentionScratch* s, int64_t image, int64_t head) {
    s->k = (struct Operand){head_of(&a->k, image, head), 1, a->k.row, a->depth, a->keys};
    s->v = (struct Operand){head_of(&a->v, image, head), a->v.row, 1, a->keys, a->width};
    if (!reads_in_place(a)) pack_operand(&s->v, a->kernels.blocks, s->packed_v);
    if (scores_in_place(a)) return;
    pack_operand(&s->k, a->kernels.blocks, s->packed_k);
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

// Return what a value of the mask adds to a score, which is an exponent of 2. See mask_powers of
// numerics/attention_math.py.
static inline float mask_power(float x) {
    const float wide = x * 1.44269502162933349609375f, bounded = wide > -0x1.fffffep127f ? wide : -0x1.fffffep127f;
    return x == MINUS_INFINITY ? x : bounded;
}

// What a mask says about the scores of one query: floats that are added to them, or bytes that are 0 for the keys that
// are left out, or nothing.
struct MaskRow {
    const float* added;
    const uint8_t* allowed;
};

// Return one row of the mask, for the first keys. Floats are kept for queries that share the row.
static __attribute__((noinline)) struct MaskRow mask_row(const struct Attention* a, struct AttentionScratch* s,
                                                         const uint8_t* from, int64_t keys) {
    const int64_t stride = a->mask_stride[3];
    if (a->mask_bytes == 1 && stride == 1) return (struct MaskRow){0, from};
    const struct MaskRow row = {s->mask, 0};
    if (s->masked == from && s->masked_keys >= keys) return row;
    s->masked = from, s->masked_keys = keys;
    if (a->mask_bytes == 1) {
        for (int64_t j = 0; j < keys; ++j) s->mask[j] = from[j * stride] ? 0.0f : MINUS_INFINITY;
    } else if (stride == 4) {
        memcpy(s->mask, from, (size_t)(4 * keys));
        for (int64_t j = 0; j < keys; ++j) s->mask[j] = mask_power(s->mask[j]);
    } else {
        for (int64_t j = 0; j < keys; ++j) {
            float x;
            memcpy(&x, from + j * stride, sizeof x);
            s->mask[j] = mask_power(x);
        }
    }
    return row;
}

// Return 0 for each key that a mask allows, else -inf.
static inline Reals exponents_of(const uint8_t* allowed) {
    Bytes bytes;
    memcpy(&bytes, allowed, sizeof bytes);
    return widened(bytes) != 0 ? all_lanes(0.0f) : all_lanes(MINUS_INFINITY);
}

// Add an exponent to some scores, and return the larger of them and of those before.
static inline Reals largest_sum(float* x, Reals exponents, Reals most) {
    const Reals sum = load_reals(x) + exponents;
    store_reals(x, sum);
    return sum > most ? sum : most;
}

// Add the mask to a row of scores and return the largest. Scores past the last key become -inf, up to a multiple of 16.
static inline float largest_score(float* x, struct MaskRow mask, int64_t keys) {
    const int64_t padded = (keys + 15) / 16 * 16, whole = keys / 16 * 16;
    for (int64_t j = keys; j < padded; ++j) x[j] = MINUS_INFINITY;
    Reals most = all_lanes(MINUS_INFINITY);
    if (mask.allowed) {
        uint8_t last[16] = {};  // nothing is read behind the mask
        memcpy(last, mask.allowed + whole, (size_t)(keys - whole));
        for (int64_t j = 0; j < whole; j += FLOATS) most = largest_sum(x + j, exponents_of(mask.allowed + j), most);
        for (int64_t j = whole; j < padded; j += FLOATS)
            most = largest_sum(x + j, exponents_of(last + j - whole), most);
    } else if (mask.added) {
        for (int64_t j = 0; j < padded; j += FLOATS) most = largest_sum(x + j, load_reals(mask.added + j), most);
    } else {
        for (int64_t j = 0; j < padded; j += FLOATS) {
            const Reals score = load_reals(x + j);
            most = score > most ? score : most;
        }
    }
    return largest(most);
}

// Return 255 * 2^f for |f| <= 1/2.
static inline Reals probability_polynomial(Reals f) {
    const Reals total = (0x1.c232b0p+3f * f + 0x1.eeed58p+5f) * f + 0x1.61902ap+7f;
    return total * f + 0x1.fdf69cp+7f;
}

// Quantize the probabilities of a row of scores, see quantize_probabilities of numerics/attention_math.py, and return
// the sum of the quantized values. Scores are read and values written up to a multiple of 16. NaN converts to the
// smallest int32, which saturates to 0.
static inline int32_t quantize_probabilities(const float* x, float top, int64_t keys, uint8_t* probabilities) {
    int64_t j = 0;
    int32_t sum = 0;
#if defined(__AVX512VNNI__)
    __m512i sums = _mm512_setzero_si512();
    for (; j + 64 <= keys; j += 64) {
        __m512i words[4];
        for (int i = 0; i < 4; ++i) {
            const __m512 power = _mm512_sub_ps(_mm512_loadu_ps(x + j + 16 * i), _mm512_set1_ps(top));
            const __m512 n = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            words[i] =
                _mm512_cvtps_epi32(_mm512_scalef_ps((__m512)probability_polynomial((Reals)_mm512_sub_ps(power, n)), n));
        }
        const __m512i low = _mm512_packs_epi32(words[0], words[1]), high = _mm512_packs_epi32(words[2], words[3]);
        const __m512i bytes = interleave(_mm512_packus_epi16(low, high));
        _mm512_storeu_si512(probabilities + j, bytes);
        sums = _mm512_dpbusd_epi32(sums, bytes, _mm512_set1_epi8(1));
    }
    sum = _mm512_reduce_add_epi32(sums);
#endif
    RealBits lane_sums = {};
    for (; j < keys; j += 16) {
        RealBits words[16 / FLOATS];
        for (int i = 0; i < 16 / FLOATS; ++i) {
            const Reals power = at_least(load_reals(x + j + i * FLOATS) - top, -12.0f), rounded = add_magic(power);
            const RealBits total = (RealBits)probability_polynomial(power - magic_to_f32(rounded));
            lane_sums += words[i] =
                magic_to_i32(add_magic((Reals)(total + (magic_to_i32(rounded) << 23))));  // times 2^n
        }
        narrow16(words, probabilities + j);
    }
    for (int i = 0; i < FLOATS; ++i) sum += lane_sums[i];
    return sum;
}

// Multiply rows of floats, each by its factor. Reads floats up to a multiple of 16 columns.
static inline void scale_block(const float* from, int64_t from_row, int64_t rows, const float* factor, uint8_t* to,
                               int64_t to_row, int64_t columns) {
    for (int64_t r = 0; r < rows; ++r, from += from_row, to += to_row)
        for (int64_t c = 0; c < columns; c += FLOATS) {
            const Reals x = load_reals(from + c) * factor[r];
            memcpy(to + 4 * c, &x, c + FLOATS <= columns ? sizeof x : (size_t)(4 * (columns - c)));
        }
}

// Return the number of keys of a query: all, or with a causal mask those up to its own position.
static inline int64_t own_keys(const struct Attention* a, int64_t query) {
    return a->causal && query < a->keys ? query + 1 : a->keys;
}

static inline int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }

// Rows of queries that have the same keys: queries `first`, `first + each`, ... of one head, or with `each` 0 the query
// `first` of several heads.
struct QueryRows {
    const uint8_t *q, *mask;  // of the first row; no mask: null
    uint8_t* out;
    int64_t q_step, mask_step, out_step, rows, first, each;  // bytes between rows; number of rows
};

// Return the rows of queries `first` to `last` (exclusive) of one head.
static inline struct QueryRows rows_of_head(const struct Attention* a, int64_t image, int64_t head, int64_t first,
                                            int64_t last) {
    const uint8_t* mask = a->mask ? a->mask + image * a->mask_stride[0] + head * a->mask_stride[1] : 0;
    return (struct QueryRows){head_of(&a->q, image, head) + first * a->q.row,
                              mask ? mask + first * a->mask_stride[2] : 0,
                              head_of(&a->out, image, head) + first * a->out.row,
                              a->q.row,
                              a->mask_stride[2],
                              a->out.row,
                              last - first,
                              first,
                              1};
}

// Return the only query of several heads as rows.
static inline struct QueryRows rows_of_heads(const struct Attention* a, int64_t image, int64_t head, int64_t count) {
    struct QueryRows rows = rows_of_head(a, image, head, 0, 1);
    rows.q_step = a->q.head, rows.mask_step = a->mask_stride[1], rows.out_step = a->out.head;
    rows.rows = count, rows.each = 0;
    return rows;
}

// Return the position behind the last byte from `begin` to `end` (exclusive) that is not zero, or `begin` if all are.
static inline int64_t end_of_nonzero(const uint8_t* bytes, int64_t begin, int64_t end) {
    uint64_t words[8];
    for (; end - begin >= 64; end -= 64) {
        memcpy(words, bytes + end - 64, 64);
        if (words[0] | words[1] | words[2] | words[3] | words[4] | words[5] | words[6] | words[7]) break;
    }
    for (; end - begin >= 8; end -= 8) {
        memcpy(words, bytes + end - 8, 8);
        if (words[0]) break;
    }
    while (end > begin && !bytes[end - 1]) --end;
    return end;
}

// Return how many of the first `keys` keys the rows need: those up to the last key that a bool mask allows for one of
// them. Later keys have probability 0. Causal masks leave out nearly half of all keys.
static inline int64_t allowed_keys(const struct Attention* a, const struct QueryRows* r, int64_t keys) {
    if (!r->mask || a->mask_bytes != 1 || a->mask_stride[3] != 1) return keys;
    int64_t end = 0;
    for (int64_t i = r->rows - 1; i >= 0; --i) end = end_of_nonzero(r->mask + i * r->mask_step, end, keys);
    return end;
}

// Write the scores of rows of queries with the same keys.
static inline void score(const struct Attention* a, struct AttentionScratch* s, const struct QueryRows* r,
                         int64_t keys) {
    if (scores_in_place(a)) {
        struct SignedQueries queries;
        divide_queries(r->q, r->q_step, r->rows, a->depth, a->zero_q, &queries);
        score_in_place(&queries, s->k.base, a->k.row, keys, a->factor, s->scores, s->score_row);
        return;
    }
    float factor[PANEL];
    for (int i = 0; i < PANEL; ++i) factor[i] = a->factor;
    struct Tile t = {};
    t.a = r->q, t.a_pixel = r->q_step;
    t.b = s->packed_k, t.tap_rows = t.taps = 1, t.run = (a->depth + 3) / 4;
    t.bias = s->terms, t.factor = factor, t.out = (uint8_t*)s->scores, t.out_pixel = 4 * s->score_row;
    multiply(&a->kernels, &t, &s->k, keys, r->rows, 0);
}

// Write the sums of values weighed with the probabilities of the first `4 * steps` keys, of which `keys` exist.
static inline void weigh(const struct Attention* a, struct AttentionScratch* s, int64_t rows, int64_t keys,
                         int64_t steps) {
    if (!steps) {
        memset(s->sums, 0, (size_t)(4 * s->sums_row * rows));
    } else if (reads_in_place(a)) {
        weigh_in_place(s->probabilities, s->row, rows, s->v.base, a->v.row, keys, a->width, s->sums, s->sums_row);
    } else {
        float factor[PANEL];
        for (int i = 0; i < PANEL; ++i) factor[i] = 1.0f;
        struct Tile t = {};
        t.a = s->probabilities, t.a_pixel = s->row, t.b = s->packed_v, t.tap_rows = t.taps = 1, t.run = steps;
        t.factor = factor, t.bias = NO_TERMS, t.out = (uint8_t*)s->sums, t.out_pixel = 4 * s->sums_row;
        multiply(&a->kernels, &t, &s->v, a->width, rows, 0);
    }
}

// Compute rows of queries with the same keys.
static __attribute__((noinline)) void attend(const struct Attention* a, struct AttentionScratch* s,
                                             const struct QueryRows* r) {
    const int64_t rows = r->rows, keys = allowed_keys(a, r, own_keys(a, r->first + (rows - 1) * r->each));
    const int64_t step = rows < TILED_ROWS ? 4 : KEYS_OF_STEP, steps = (keys + step - 1) / step * (step / 4);
    float tops[QUERY_BLOCK], shares[QUERY_BLOCK];
    score(a, s, r, keys);
    for (int64_t i = 0; i < rows; ++i) {
        const struct MaskRow mask = r->mask ? mask_row(a, s, r->mask + i * r->mask_step, keys) : (struct MaskRow){};
        tops[i] = largest_score(s->scores + i * s->score_row, mask, least(own_keys(a, r->first + i * r->each), keys));
    }
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t own = least(own_keys(a, r->first + i * r->each), keys), end = (own + 15) / 16 * 16;
        uint8_t* probabilities = s->probabilities + i * s->row;
        const int32_t sum = quantize_probabilities(s->scores + i * s->score_row, tops[i], own, probabilities);
        if (end < 4 * steps) memset(probabilities + end, 0, (size_t)(4 * steps - end));
        shares[i] = sum ? a->ratio / (float)sum : 0.0f;
    }
    weigh(a, s, rows, keys, steps);
    if (a->limits)
        quantize_block(s->sums, s->sums_row, rows, shares, a->limits, r->out, r->out_step, a->width);
    else
        scale_block(s->sums, s->sums_row, rows, shares, r->out, r->out_step, a->width);
}

// Compute this thread's part of the queries. A unit of work is a block of queries; each thread packs the keys and
// values that its blocks need. With one query, heads that share keys and values are computed together. Queries of one
// block are too little work to share; products of others take about twice the time of those of a layer.
LIBRARY void attention(const struct Attention* a, int thread, int threads) {
    struct Share* const shares = threads > a->sharers ? 0 : a->shares;
    if (threads > a->sharers) threads = (int)a->sharers;
    if (thread >= threads) return;
    const int64_t most = rows_of_block(&a->kernels), blocks = (a->queries + most - 1) / most,
                  total = a->batch * a->heads * blocks;
    const int64_t products = a->queries > most ? a->batch * a->heads * a->queries * a->keys * (a->depth + a->width) : 0;
    struct Sharing pieces = enter_step(shares, 2 * products / PRODUCTS_PER_NS, thread, threads);
    struct AttentionScratch s = attention_scratch(a, thread);
    int64_t packed = -1, count = 1;
    while (next_piece(&pieces)) {
        const int64_t end = first_item(&pieces, total, 1);
        for (int64_t unit = first_item(&pieces, total, 0); unit < end; unit += count) {
            const int64_t block = unit % blocks, head = unit / blocks % a->heads, image = unit / blocks / a->heads;
            const int64_t pair = image * a->heads + head / a->shared;
            if (pair != packed) pack_heads(a, &s, image, head / a->shared);
            packed = pair;
            struct QueryRows rows;
            if (a->queries == 1) {
                const int64_t sharing = a->shared - head % a->shared,
                              left = sharing < end - unit ? sharing : end - unit;
                count = left < most ? left : most;
                rows = rows_of_heads(a, image, head, count);
            } else {
                rows = rows_of_head(a, image, head, a->queries * block / blocks, a->queries * (block + 1) / blocks);
            }
            attend(a, &s, &rows);
        }
    }
}
