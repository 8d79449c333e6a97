// An activation as the second operand of a matrix product: packing into panels, and multiplication.

#pragma once

#include "base/functions.h"
#include "products/heads.h"
#include "base/vectors.h"

enum { PACKED_AHEAD = 48 };  // lines of an operand, along depth or columns, between those packed and those prefetched

// A matrix of quantized values with zero point 128, `depth` by `columns`, with any strides in bytes. Packing gives
// panels of int8 as of constant weights, [panel][depth / 4][columns of the panel, in blocks of 16][4], padded with
// zeros.
struct Operand {
    const uint8_t* base;
    int64_t depth_stride, column_stride, depth, columns;
};

// Return four consecutive values of column c, from depth d on, as int8.
static inline uint32_t load_four_u8(const struct Operand* o, int64_t d, int64_t c) {
    uint32_t found = 0;
    for (int64_t i = 0; i < 4 && d + i < o->depth; ++i)
        found |= (uint32_t)(o->base[(d + i) * o->depth_stride + c * o->column_stride] ^ 128) << (8 * i);
    return found;
}

#if defined(__AVX512BW__)
// Transpose 16 by 16 dwords.
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
        const __m512i a = _mm512_shuffle_i32x4(x[i], x[4 + i], 0x88),
                      b = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0x88);
        const __m512i c = _mm512_shuffle_i32x4(x[i], x[4 + i], 0xdd),
                      d = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0xdd);
        y[i] = _mm512_shuffle_i32x4(a, b, 0x88), y[8 + i] = _mm512_shuffle_i32x4(a, b, 0xdd);
        y[4 + i] = _mm512_shuffle_i32x4(c, d, 0x88), y[12 + i] = _mm512_shuffle_i32x4(c, d, 0xdd);
    }
    for (int i = 0; i < 16; ++i) x[i] = y[i];
}

// Pack 16 columns whose values are contiguous along depth, 64 values of each column at a time.
static inline void pack_lines(const struct Operand* o, int64_t column, int64_t width, int8_t* to) {
    for (int64_t d = 0; d < o->depth; d += 64) {
        const int64_t left = o->depth - d < 64 ? o->depth - d : 64;
        const __mmask64 there = ~0ull >> (64 - left);
        const __m512i flip = _mm512_maskz_set1_epi8(there, (char)128);
        __m512i x[16];
        for (int i = 0; i < 16; ++i)  // keys of a cache come from memory
            __builtin_prefetch(o->base + (column + PACKED_AHEAD + i) * o->column_stride + d);
        for (int i = 0; i < 16; ++i)
            x[i] = column + i < o->columns
                       ? _mm512_xor_si512(_mm512_maskz_loadu_epi8(there, o->base + (column + i) * o->column_stride + d),
                                          flip)
                       : _mm512_setzero_si512();
        transpose16(x);
        for (int i = 0; 4 * i < left; ++i) _mm512_storeu_si512(to + (d / 4 + i) * 4 * width, x[i]);
    }
}
#else
#if defined(__AVX2__)
// Transpose 8 by 8 dwords.
static inline void transpose8(__m256i* x) {
    __m256i y[8];
    for (int i = 0; i < 8; i += 2) {
        y[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; ++j) {
            x[i + 2 * j] = _mm256_unpacklo_epi64(y[i + j], y[i + 2 + j]);
            x[i + 2 * j + 1] = _mm256_unpackhi_epi64(y[i + j], y[i + 2 + j]);
        }
    for (int i = 0; i < 4; ++i) {
        y[i] = _mm256_permute2x128_si256(x[i], x[4 + i], 0x20);
        y[4 + i] = _mm256_permute2x128_si256(x[i], x[4 + i], 0x31);
    }
    for (int i = 0; i < 8; ++i) x[i] = y[i];
}

// Pack 8 columns that exist, 32 values of each column at a time, and return how many values were packed.
static inline int64_t pack_eight_lines(const struct Operand* o, int64_t column, int64_t width, int8_t* to) {
    const uint8_t* from = o->base + column * o->column_stride;
    int64_t d = 0;
    for (; d + 32 <= o->depth; d += 32) {
        __m256i x[8];
        for (int i = 0; i < 8; ++i)  // keys of a cache come from memory
            __builtin_prefetch(from + (PACKED_AHEAD + i) * o->column_stride + d);
        for (int i = 0; i < 8; ++i)
            x[i] = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(from + i * o->column_stride + d)),
                                    _mm256_set1_epi8((char)128));
        transpose8(x);
        for (int i = 0; i < 8; ++i) _mm256_storeu_si256((__m256i*)(to + (d / 4 + i) * 4 * width), x[i]);
    }
    return d;
}
#endif

// Pack 16 columns whose values are contiguous along depth.
static inline void pack_lines(const struct Operand* o, int64_t column, int64_t width, int8_t* to) {
    for (int64_t half = column; half < column + 16; half += 8, to += 32) {
        int64_t packed = 0;
#if defined(__AVX2__)
        if (half + 8 <= o->columns) packed = pack_eight_lines(o, half, width, to);
#endif
        for (int64_t c = 0; c < 8; ++c)
            for (int64_t d = packed; d < o->depth; d += 4) {
                uint32_t four = 0;
                if (half + c < o->columns && d + 4 <= o->depth) {
                    memcpy(&four, o->base + (half + c) * o->column_stride + d, sizeof four);
                    four ^= 0x80808080;
                } else if (half + c < o->columns) {
                    four = load_four_u8(o, d, half + c);
                }
                memcpy(to + d * width + 4 * c, &four, sizeof four);
            }
    }
}
#endif

// Pack four values of each of up to `width` columns. The columns are contiguous.
static inline void pack_quads(const struct Operand* o, int64_t d, int64_t column, int64_t width, int8_t* to) {
    const int64_t columns = o->columns - column < width ? o->columns - column : width;
    const uint8_t* row = o->base + d * o->depth_stride + column;
    int64_t c = 0;
    for (int i = 0; i < 4; ++i) __builtin_prefetch(row + (PACKED_AHEAD + i) * o->depth_stride);
    if (d + 4 <= o->depth) {
        const uint8_t *second = row + o->depth_stride, *third = second + o->depth_stride,
                      *fourth = third + o->depth_stride;
#if defined(__AVX2__) && !defined(__AVX512BW__)
        for (; c + 16 <= columns; c += 16) {
            __m128i x[4], y[4];
            for (int i = 0; i < 4; ++i)
                x[i] = _mm_xor_si128(_mm_loadu_si128((const __m128i*)(row + i * o->depth_stride + c)),
                                     _mm_set1_epi8((char)128));
            for (int i = 0; i < 4; i += 2) {
                y[i] = _mm_unpacklo_epi8(x[i], x[i + 1]);
                y[i + 1] = _mm_unpackhi_epi8(x[i], x[i + 1]);
            }
            for (int i = 0; i < 2; ++i) {
                _mm_storeu_si128((__m128i*)(to + 4 * c + 32 * i), _mm_unpacklo_epi16(y[i], y[2 + i]));
                _mm_storeu_si128((__m128i*)(to + 4 * c + 32 * i + 16), _mm_unpackhi_epi16(y[i], y[2 + i]));
            }
        }
#endif
        for (; c < columns; ++c) {
            const uint32_t four =
                (row[c] | (uint32_t)second[c] << 8 | (uint32_t)third[c] << 16 | (uint32_t)fourth[c] << 24) ^ 0x80808080;
            memcpy(to + 4 * c, &four, sizeof four);
        }
    }
    for (; c < width; ++c) {
        const uint32_t four = c < columns ? load_four_u8(o, d, column + c) : 0;
        memcpy(to + 4 * c, &four, sizeof four);
    }
}

// Pack a matrix into panels of up to 16 * `blocks` columns.
static __attribute__((noinline)) void pack_operand(const struct Operand* o, int64_t blocks, int8_t* to) {
    for (int64_t first = 0; first < o->columns; first += 16 * blocks) {
        const int64_t left = (o->columns - first + 15) / 16 * 16, width = left < 16 * blocks ? left : 16 * blocks;
        if (o->depth_stride == 1) {
            for (int64_t c = 0; c < width; c += 16) pack_lines(o, first + c, width, to + 4 * c);
        } else if (o->column_stride == 1) {
            for (int64_t d = 0; d < o->depth; d += 4) pack_quads(o, d, first, width, to + d * width);
        } else {
            for (int64_t d = 0; d < o->depth; d += 4)
                for (int64_t c = 0; c < width; ++c) {
                    const uint32_t quad = first + c < o->columns ? load_four_u8(o, d, first + c) : 0;
                    memcpy(to + d * width + 4 * c, &quad, sizeof quad);
                }
        }
        to += (o->depth + 3) / 4 * 4 * width;
    }
}

#if defined(__AVX2__)
// Return the sums of 8 columns of a packed operand whose steps of 4 values are `step` bytes apart. Pairs of up to 64
// steps are added in 16 bits.
static inline __m256i eight_column_sums(const int8_t* packed, int64_t depth, int64_t step) {
    __m256i sums = _mm256_setzero_si256();
    for (int64_t begin = 0; begin < depth; begin += 256) {
        const int64_t end = depth < begin + 256 ? depth : begin + 256;
        __m256i pairs = _mm256_setzero_si256();
        for (int64_t d = begin; d < end; d += 4, packed += step)
            pairs = _mm256_add_epi16(
                pairs, _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_loadu_si256((const __m256i*)packed)));
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return sums;
}
#endif

// Compute the term of the first operand's zero point: -zero times the sum of each column of the packed operand.
static __attribute__((noinline)) void column_terms(const struct Operand* o, int64_t blocks, const int8_t* packed,
                                                   int32_t zero, int32_t* terms) {
    for (int64_t first = 0; first < o->columns; first += 16 * blocks) {
        const int64_t left = (o->columns - first + 15) / 16 * 16, width = left < 16 * blocks ? left : 16 * blocks;
#if defined(__AVX512VNNI__)
        for (int64_t c = 0; c < width; c += 64) {
            const int64_t vectors = width - c < 64 ? (width - c) / 16 : 4;
            __m512i sums[4] = {};
            for (int64_t d = 0; d < o->depth; d += 4)
                for (int64_t i = 0; i < vectors; ++i)
                    sums[i] = _mm512_dpbusd_epi32(sums[i], _mm512_set1_epi8(1),
                                                  _mm512_loadu_si512(packed + d * width + 4 * c + 64 * i));
            for (int64_t i = 0; i < vectors; ++i)
                _mm512_storeu_si512(terms + first + c + 16 * i, _mm512_mullo_epi32(sums[i], _mm512_set1_epi32(-zero)));
        }
#elif defined(__AVX2__)
        for (int64_t c = 0; c < width; c += 8)
            _mm256_storeu_si256(
                (__m256i*)(terms + first + c),
                _mm256_mullo_epi32(eight_column_sums(packed + 4 * c, o->depth, 4 * width), _mm256_set1_epi32(-zero)));
#else
        for (int64_t c = 0; c < width; c += 16) {
            int32_t sums[16] = {};
            for (int64_t d = 0; d < o->depth; d += 4) {
                const int8_t* quads = packed + d * width + 4 * c;
                for (int i = 0; i < 16; ++i)
                    sums[i] += quads[4 * i] + quads[4 * i + 1] + quads[4 * i + 2] + quads[4 * i + 3];
            }
            for (int i = 0; i < 16; ++i) terms[first + c + i] = -zero * sums[i];
        }
#endif
        packed += (o->depth + 3) / 4 * 4 * width;
    }
}

// Multiply `rows` rows by the first `columns` columns of a packed operand. `product` has the rows, the factors, the
// result and `run`, the depth of this product in steps of 4, which may be less than that of the panels. With `exact`
// only the columns that exist are written, otherwise all columns of the last block of 16.
static inline void multiply(const struct FloatKernels* k, const struct Tile* product, const struct Operand* o,
                            int64_t columns, int64_t rows, int exact) {
    const int64_t tiles = (rows + k->rows - 1) / k->rows, least = rows / tiles, longer = rows % tiles;
    const int64_t panel_bytes = (o->depth + 3) / 4 * 64 * k->blocks;
    struct Tile t = *product;
    struct TileSetup setup = {};
    t.ahead = panel_bytes, t.setup = &setup;
    for (int64_t first = 0; first < columns; first += 16 * k->blocks) {
        const int64_t whole = (o->columns - first + 15) / 16, blocks = whole < k->blocks ? whole : k->blocks;
        const int64_t last = columns - first - 16 * (blocks - 1);
        const TileKernel* kernels = k->table[blocks];
        t.a = product->a, t.out = product->out + 4 * first;
        t.mask = exact && last < 16 ? (1ll << (16 * (blocks - 1) + last)) - 1 : (int64_t)(~0ull >> (64 - 16 * blocks));
        t.count = longer;
        if (longer) kernels[least + 1](&t);
        t.count = tiles - longer;
        kernels[least](&t);
        t.b += panel_bytes, t.bias += 16 * k->blocks;
    }
    release_tiles(&setup);
}

static const int32_t NO_TERMS[MAX_HEAD_WIDTH] = {};

static inline Reals load_reals(const float* from) {
    Reals x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline void store_reals(float* to, Reals x) { memcpy(to, &x, sizeof x); }

// Quantize rows of floats, each multiplied by its factor. Reads floats up to a multiple of 16 columns.
static __attribute__((noinline)) void quantize_block(const float* from, int64_t from_row, int64_t rows,
                                                     const float* factor, const struct Limits* q, uint8_t* to,
                                                     int64_t to_row, int64_t columns) {
    const float least = (float)(q->low - q->zero_point), most = (float)(q->high - q->zero_point);
    const int32_t zero_point = q->zero_point;
    for (int64_t r = 0; r < rows; ++r, from += from_row, to += to_row) {
        int64_t c = 0;
#if defined(__AVX512BW__)
        const struct PackConstants f = pack_constants(q, UNBOUNDED_STEPS);
        for (; c + 64 <= columns; c += 64) {
            __m512 steps[4];
            for (int i = 0; i < 4; ++i)
                steps[i] = _mm512_mul_ps(_mm512_loadu_ps(from + c + 16 * i), _mm512_set1_ps(factor[r]));
            _mm512_storeu_si512(to + c, interleave(round_and_pack(steps, &f)));
        }
#endif
        for (; c < columns; c += 16) {
            RealBits words[16 / FLOATS];
            uint8_t quantized[16];
            for (int i = 0; i < 16 / FLOATS; ++i)
                words[i] = magic_to_i32(add_magic(
                               at_most(at_least(load_reals(from + c + i * FLOATS) * factor[r], least), most))) +
                           zero_point;
            narrow16(words, quantized);
            memcpy(to + c, quantized, c + 16 <= columns ? 16 : (size_t)(columns - c));
        }
    }
}
