// Products of few queries with the keys and values of a head, which are read in place. A step of a decoder reads every
// key and value once, or once for each of few heads, and packing them would take more instructions than the products.

#pragma once

#include "products/operand.h"

#if defined(__AVX512VNNI__)
enum {
    FEW_ROWS = 8,   // rows of queries with the same keys and values, at most
    FEW_READS = 4,  // heads that read the same keys and values for several queries, at most
#if defined(__AMX_INT8__)
    SCORED_ROWS = FEW_ROWS,  // with more rows, keys are packed
#else
    SCORED_ROWS = 3,
#endif
    MAX_PARTS = 3 * FEW_ROWS,
    KEYS_OF_GROUP = 16,  // keys whose scores fill a vector
    KEYS_OF_BLOCK = 64,  // keys whose values stay in the first-level cache while all rows are multiplied
    KEYS_AHEAD = 64      // keys, and values, between those that are multiplied and those that are prefetched
};

// Queries minus their zero point, -255..255, as sums of rows of int8. Row r of the queries is part r plus all further
// parts that belong to it; few have any.
struct SignedQueries {
    int8_t parts[MAX_PARTS][MAX_HEAD_WIDTH] __attribute__((aligned(64)));  // padded with zeros
    int64_t row_of[MAX_PARTS], count, rows, depth;
    int32_t constants[FEW_ROWS];  // the zero point of the keys, 128, times minus the sum of the row
};

// Return the mask of up to 64 values of a row of `length`, from `first` on.
static inline __mmask64 values_there(int64_t length, int64_t first) {
    return length - first < 64 ? ~0ull >> (64 - (length - first)) : ~0ull;
}

// Divide rows of queries into parts.
static inline void divide_queries(const uint8_t* q, int64_t q_step, int64_t rows, int64_t depth, int32_t zero,
                                  struct SignedQueries* s) {
    const int64_t vectors = (depth + 63) / 64 * 2;
    __m512i left[FEW_ROWS][MAX_HEAD_WIDTH / 32];  // what no part has yet, in 16 bits
    s->count = 0, s->rows = rows, s->depth = depth;
    for (int64_t r = 0; r < rows; ++r) {
        __m512i sums = _mm512_setzero_si512();
        for (int64_t i = 0; i < vectors; ++i) {
            const __mmask32 there = (__mmask32)(32 * i < depth ? values_there(depth, 32 * i) : 0);
            const __m512i bytes = _mm512_maskz_loadu_epi8(there, q + r * q_step + 32 * i);
            const __m512i x = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(bytes));
            left[r][i] = _mm512_maskz_sub_epi16(there, x, _mm512_set1_epi16((short)zero));
            sums = _mm512_add_epi32(sums, _mm512_madd_epi16(left[r][i], _mm512_set1_epi16(1)));
        }
        s->constants[r] = -128 * _mm512_reduce_add_epi32(sums);
    }
    for (int round = 0; round < 3; ++round)
        for (int64_t r = 0; r < rows; ++r) {
            int64_t any = round == 0;
            for (int64_t i = 0; i < vectors; ++i) any |= _mm512_test_epi16_mask(left[r][i], left[r][i]);
            if (!any) continue;
            for (int64_t i = 0; i < vectors; ++i) {
                const __m256i part = _mm512_cvtsepi16_epi8(left[r][i]);
                _mm256_store_si256((__m256i*)(s->parts[s->count] + 32 * i), part);
                left[r][i] = _mm512_sub_epi16(left[r][i], _mm512_cvtepi8_epi16(part));
            }
            s->row_of[s->count++] = r;
        }
}

// Return the sum of the lanes of each of 16 vectors.
static inline __m512i lane_sums(const __m512i* x) {
    __m512i y[8], z[4], w[2];
    for (int i = 0; i < 8; ++i)
        y[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]),
                                _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]));
    for (int i = 0; i < 4; ++i)
        z[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(y[2 * i], y[2 * i + 1]),
                                _mm512_unpackhi_epi64(y[2 * i], y[2 * i + 1]));
    for (int i = 0; i < 2; ++i)
        w[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(z[2 * i], z[2 * i + 1], 0x88),
                                _mm512_shuffle_i32x4(z[2 * i], z[2 * i + 1], 0xdd));
    return _mm512_add_epi32(_mm512_shuffle_i32x4(w[0], w[1], 0x88), _mm512_shuffle_i32x4(w[0], w[1], 0xdd));
}

// Compute the products of all parts and 16 keys, of which those behind `last` are read as `last`.
static inline void group_products(const struct SignedQueries* s, const uint8_t* k, int64_t k_row, int64_t first,
                                  int64_t last, __m512i* sums) {
    const uint8_t* keys[KEYS_OF_GROUP];
    for (int64_t i = 0; i < KEYS_OF_GROUP; ++i) keys[i] = k + (first + i < last ? first + i : last) * k_row;
    for (int64_t p = 0; p < s->count; ++p) {
        __m512i x[KEYS_OF_GROUP] = {};
        for (int64_t d = 0; d < s->depth; d += 64) {
            const __mmask64 there = values_there(s->depth, d);
            const __m512i part = _mm512_load_si512(s->parts[p] + d);
            for (int i = 0; i < KEYS_OF_GROUP; ++i)
                x[i] = _mm512_dpbusd_epi32(x[i], _mm512_maskz_loadu_epi8(there, keys[i] + d), part);
        }
        sums[p] = lane_sums(x);
    }
}

// Write the scores of 16 keys from the products of all parts.
static inline void store_scores(const struct SignedQueries* s, __m512i* sums, float factor, float* scores,
                                int64_t score_row) {
    for (int64_t p = s->rows; p < s->count; ++p) sums[s->row_of[p]] = _mm512_add_epi32(sums[s->row_of[p]], sums[p]);
    for (int64_t r = 0; r < s->rows; ++r) {
        const __m512i exact = _mm512_add_epi32(sums[r], _mm512_set1_epi32(s->constants[r]));
        _mm512_storeu_ps(scores + r * score_row, _mm512_mul_ps(_mm512_cvtepi32_ps(exact), _mm512_set1_ps(factor)));
    }
}

#if defined(__AMX_INT8__)
enum { TILE_PARTS = 16, TILE_CHUNKS = MAX_HEAD_WIDTH / 64 };

// Memory operand of `ldtilecfg`.
struct TileShapes {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

// Registers 0 and 1: products of 16 keys each; 2 and 3: 64 values of these keys; 4 to 7: 64 values of all parts each.
static inline void load_query_tiles(const struct SignedQueries* s) {
    struct TileShapes shapes = {};
    shapes.palette = 1;
    for (int i = 0; i < 8; ++i) shapes.rows[i] = 16, shapes.bytes[i] = i == 2 || i == 3 ? 64 : (uint16_t)(4 * s->count);
    uint8_t values[TILE_CHUNKS][64 * TILE_PARTS] __attribute__((aligned(64)));  // [chunk][quad of values][part][4]
    for (int64_t quad = 0; quad < s->depth / 4; ++quad)
        for (int64_t p = 0; p < s->count; ++p)
            memcpy(values[quad / 16] + 4 * (quad % 16 * s->count + p), s->parts[p] + 4 * quad, 4);
    const int64_t stride = 4 * s->count;
    __asm__ volatile("" ::: "memory");  // the intrinsics do not say that they read memory
    _tile_loadconfig(&shapes);
    _tile_loadd(4, values[0], stride);
    if (s->depth > 64) _tile_loadd(5, values[1], stride);
    if (s->depth > 128) _tile_loadd(6, values[2], stride);
    if (s->depth > 192) _tile_loadd(7, values[3], stride);
}

// Multiply the values of 16 keys from `first` on, and all values of 16 keys. The instructions need numbers of registers
// in their text.
#define KEY_TILE(sums, keys, parts, first)   \
    if (depth > first) {                     \
        _tile_loadd(keys, k + first, k_row); \
        _tile_dpbusd(sums, keys, parts);     \
    }
#define KEY_TILES(sums, keys)                         \
    _tile_zero(sums);                                 \
    KEY_TILE(sums, keys, 4, 0)                        \
    KEY_TILE(sums, keys, 5, 64)                       \
    KEY_TILE(sums, keys, 6, 128)                      \
    KEY_TILE(sums, keys, 7, 192)                      \
    _tile_stored(sums, products[sums], 4 * s->count); \
    k += KEYS_OF_GROUP * k_row;

// Return the products of a part and 16 keys, [key][part] in memory.
static inline __m512i products_of_part(const int32_t* products, int64_t parts, int64_t part) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_i32gather_epi32(_mm512_mullo_epi32(lanes, _mm512_set1_epi32((int)parts)), products + part, 4);
}

// Compute the scores of all whole groups of 16 keys, and return their number.
static inline int64_t score_tiles(const struct SignedQueries* s, const uint8_t* k, int64_t k_row, int64_t keys,
                                  float factor, float* scores, int64_t score_row) {
    const int64_t depth = s->depth, whole = keys / KEYS_OF_GROUP * KEYS_OF_GROUP;
    if (s->count > TILE_PARTS || depth % 64) return 0;
    int32_t products[2][KEYS_OF_GROUP * TILE_PARTS] __attribute__((aligned(64)));
    load_query_tiles(s);
    for (int64_t j = 0; j < whole;) {
        const int64_t groups = whole - j < 2 * KEYS_OF_GROUP ? 1 : 2;
        for (int64_t i = 0; i < groups * KEYS_OF_GROUP; ++i)
            for (int64_t d = 0; d < depth; d += 64) __builtin_prefetch(k + (KEYS_AHEAD + i) * k_row + d);
        KEY_TILES(0, 2)
        if (groups == 2) {
            KEY_TILES(1, 3)
        }
        __asm__ volatile("" ::: "memory");
        for (int64_t g = 0; g < groups; ++g, j += KEYS_OF_GROUP) {
            __m512i sums[TILE_PARTS];
            for (int64_t p = 0; p < s->count; ++p) sums[p] = products_of_part(products[g], s->count, p);
            store_scores(s, sums, factor, scores + j, score_row);
        }
    }
    _tile_release();
    return whole;
}
#else
static inline int64_t score_tiles(const struct SignedQueries*, const uint8_t*, int64_t, int64_t, float, float*,
                                  int64_t) {
    return 0;
}
#endif

// Compute the scores of up to SCORED_ROWS rows of queries and the first `keys` keys of a head, and of those behind them
// up to a multiple of 16.
static inline void score_in_place(const struct SignedQueries* s, const uint8_t* k, int64_t k_row, int64_t keys,
                                  float factor, float* scores, int64_t score_row) {
    int64_t j = score_tiles(s, k, k_row, keys, factor, scores, score_row);
    for (; j < keys; j += KEYS_OF_GROUP) {
        __m512i sums[MAX_PARTS];
        for (int64_t i = 0; i < KEYS_OF_GROUP; ++i)
            for (int64_t d = 0; d < s->depth; d += 64) __builtin_prefetch(k + (j + KEYS_AHEAD + i) * k_row + d);
        group_products(s, k, k_row, j, keys - 1, sums);
        store_scores(s, sums, factor, scores + j, score_row);
    }
}

// Add the products of up to `ROWS` rows of probabilities and 64 values of some keys to sums, of whose columns `columns`
// exist. Probabilities of keys behind the last are 0 up to a multiple of 4.
template <int ROWS>
static inline __attribute__((always_inline)) void add_values(const uint8_t* p, int64_t p_row, const uint8_t* v,
                                                             int64_t v_row, int64_t keys, __mmask64 there, int32_t* out,
                                                             int64_t out_row, int64_t columns) {
    __m512i sums[ROWS][4] = {};
    for (int64_t j = 0; j < keys; j += 4) {
        __m512i x[4], pairs[4], quads[4];
        for (int64_t i = 0; i < 4; ++i) {
            const uint8_t* row = v + (j + i < keys ? j + i : keys - 1) * v_row;
            __builtin_prefetch(row + KEYS_AHEAD * v_row);
            x[i] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(there, row), _mm512_set1_epi8((char)128));
        }
        for (int i = 0; i < 4; i += 2) {
            pairs[i] = _mm512_unpacklo_epi8(x[i], x[i + 1]);
            pairs[i + 1] = _mm512_unpackhi_epi8(x[i], x[i + 1]);
        }
        for (int i = 0; i < 2; ++i) {
            quads[2 * i] = _mm512_unpacklo_epi16(pairs[i], pairs[2 + i]);
            quads[2 * i + 1] = _mm512_unpackhi_epi16(pairs[i], pairs[2 + i]);
        }
        for (int r = 0; r < ROWS; ++r) {
            int32_t four;
            memcpy(&four, p + r * p_row + j, sizeof four);
            for (int i = 0; i < 4; ++i) sums[r][i] = _mm512_dpbusd_epi32(sums[r][i], _mm512_set1_epi32(four), quads[i]);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        // Vector i has columns 16 * lane + 4 * i of each 128-bit lane.
        const __m512i a = _mm512_shuffle_i32x4(sums[r][0], sums[r][1], 0x44),
                      b = _mm512_shuffle_i32x4(sums[r][0], sums[r][1], 0xee),
                      c = _mm512_shuffle_i32x4(sums[r][2], sums[r][3], 0x44),
                      d = _mm512_shuffle_i32x4(sums[r][2], sums[r][3], 0xee);
        const __m512i ordered[4] = {_mm512_shuffle_i32x4(a, c, 0x88), _mm512_shuffle_i32x4(a, c, 0xdd),
                                    _mm512_shuffle_i32x4(b, d, 0x88), _mm512_shuffle_i32x4(b, d, 0xdd)};
        for (int i = 0; 16 * i < columns; ++i) {
            int32_t* to = out + r * out_row + 16 * i;
            _mm512_storeu_si512(to, _mm512_add_epi32(_mm512_loadu_si512(to), ordered[i]));
        }
    }
}

// Multiply rows of probabilities by the values of the first `keys` keys of a head. Results are written up to a multiple
// of 16 columns.
static inline void weigh_in_place(const uint8_t* p, int64_t p_row, int64_t rows, const uint8_t* v, int64_t v_row,
                                  int64_t keys, int64_t width, float* out, int64_t out_row) {
    int32_t* const sums = (int32_t*)out;
    memset(sums, 0, (size_t)(4 * rows * out_row));
    for (int64_t j = 0; j < keys; j += KEYS_OF_BLOCK) {
        const int64_t some = keys - j < KEYS_OF_BLOCK ? keys - j : KEYS_OF_BLOCK;
        for (int64_t c = 0; c < width; c += 64)
            for (int64_t r = 0; r < rows; r += 4) {
                const uint8_t *probabilities = p + r * p_row + j, *values = v + j * v_row + c;
                int32_t* to = sums + r * out_row + c;
                const __mmask64 there = values_there(width, c);
                const int64_t left = width - c < 64 ? width - c : 64;
                switch (rows - r) {
                    case 1:
                        add_values<1>(probabilities, p_row, values, v_row, some, there, to, out_row, left);
                        break;
                    case 2:
                        add_values<2>(probabilities, p_row, values, v_row, some, there, to, out_row, left);
                        break;
                    case 3:
                        add_values<3>(probabilities, p_row, values, v_row, some, there, to, out_row, left);
                        break;
                    default:
                        add_values<4>(probabilities, p_row, values, v_row, some, there, to, out_row, left);
                }
            }
    }
    for (int64_t i = 0; i < rows * out_row; i += 16)
        _mm512_storeu_ps(out + i, _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + i)));
}
#else
enum { FEW_ROWS = 0, FEW_READS = 0, SCORED_ROWS = 0 };  // keys and values are packed
struct SignedQueries {
    int64_t rows;
};
static inline void divide_queries(const uint8_t*, int64_t, int64_t, int64_t, int32_t, struct SignedQueries*) {}
static inline void score_in_place(const struct SignedQueries*, const uint8_t*, int64_t, int64_t, float, float*,
                                  int64_t) {}
static inline void weigh_in_place(const uint8_t*, int64_t, int64_t, const uint8_t*, int64_t, int64_t, int64_t, float*,
                                  int64_t) {}
#endif
