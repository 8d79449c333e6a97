// Parts of generated elementwise loops and reductions, a SIMD vector at a time: loads and stores of every element type,
// functions that have the bits of numerics/float_math.py, and the iteration along a row. Compile with
// -ffp-contract=off; nothing is called from libm.
#pragma once

#include <string.h>

#include "base/clipping.h"
#include "base/functions.h"
#include "base/intrinsics.h"
#include "base/numerics.h"
#include "elementwise/float_functions.h"

enum { LANES = 16, GROUPS = LANES / FLOATS };  // partial results of a reduction; vectors that hold them
enum { STEP = 4 };                             // vectors computed side by side; their quantized values fill one vector
enum { STREAMED = 1 << 24 };                   // a float32 result of this many bytes is written past the caches
enum { PIECE = 1 << 14 };                      // elements in a thread's unit of work, in loops without a reduction

typedef uint16_t Halves __attribute__((vector_size(2 * FLOATS)));

// -- operands: `count` elements, every `stride`-th; lanes past them are read as 0 and not written ---------------------

#define OPERAND(name, Element, Vector)                                                                         \
    typedef Vector name##_anywhere __attribute__((aligned(1), may_alias));                                     \
    static inline __attribute__((always_inline)) Vector read_##name(const Element* from, int64_t stride,       \
                                                                    int64_t count) {                           \
        Vector all = {0};                                                                                      \
        if (stride == 1 && count == FLOATS) return *(const name##_anywhere*)from;                              \
        for (int64_t l = 0; l < count; ++l) all[l] = from[l * stride];                                         \
        return all;                                                                                            \
    }                                                                                                          \
    static inline __attribute__((always_inline)) void write_##name(Element* to, int64_t stride, int64_t count, \
                                                                   Vector all) {                               \
        if (stride == 1 && count == FLOATS)                                                                    \
            *(name##_anywhere*)to = all;                                                                       \
        else                                                                                                   \
            for (int64_t l = 0; l < count; ++l) to[l * stride] = all[l];                                       \
    }
OPERAND(f32, float, Reals)
OPERAND(bytes, uint8_t, Bytes)
OPERAND(halves, uint16_t, Halves)
OPERAND(i64, int64_t, Longs)
#undef OPERAND

// Return whether a result of `bytes` bytes is written past the caches. It is too large to be in a cache when it is read
// again, and cache lines that are written as a whole need not be read first.
static inline int is_streamed(const void* row, int64_t bytes) {
#if defined(__AVX2__)
    return bytes >= STREAMED && (uintptr_t)row % (4 * FLOATS) == 0;
#else
    return (void)row, (void)bytes, 0;
#endif
}
// Store COUNT vectors, past the caches if `streamed` and if there are STEP of them.
template <int COUNT>
static inline __attribute__((always_inline)) void stream_f32(float* to, int64_t count, const Reals* x, int streamed) {
#if defined(__AVX512F__)
    if (streamed && COUNT == STEP) {
        EACH _mm512_stream_ps(to + i * FLOATS, (__m512)x[i]);
        return;
    }
#elif defined(__AVX2__)
    if (streamed && COUNT == STEP) {
        EACH _mm256_stream_ps(to + i * FLOATS, (__m256)x[i]);
        return;
    }
#endif
    (void)streamed;
    EACH write_f32(to + i * FLOATS, 1, count, x[i]);
}
// Make all earlier streamed stores visible to other threads.
static inline void end_streams(void) {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

// Read and write booleans, one byte each, as lanes of 0 or -1.
static inline RealBits read_bool(const uint8_t* from, int64_t stride, int64_t count) {
    return widened(read_bytes(from, stride, count)) != 0;
}
static inline void write_bool(uint8_t* to, int64_t stride, int64_t count, RealBits x) {
    write_bytes(to, stride, count, narrowed(x & 1));
}
// Read and write quantized values as lanes of int32.
static inline RealBits read_u8(const uint8_t* from, int64_t stride, int64_t count) {
    return widened(read_bytes(from, stride, count));
}
static inline void write_u8(uint8_t* to, int64_t stride, int64_t count, RealBits x) {
    write_bytes(to, stride, count, narrowed(x));
}
// Read and write bfloat16 as lanes of float32. Values to write are rounded already.
static inline Reals read_bf16(const uint16_t* from, int64_t stride, int64_t count) {
    return (Reals)(__builtin_convertvector(read_halves(from, stride, count), RealBits) << 16);
}
static inline void write_bf16(uint16_t* to, int64_t stride, int64_t count, Reals x) {
    write_halves(to, stride, count, __builtin_convertvector(((RealBits)x >> 16) & 0xffff, Halves));
}

// Broadcast one element to all lanes.
static inline Reals all_f32(const float* from) { return all_lanes(*from); }
static inline Reals all_bf16(const uint16_t* from) { return (Reals)(((RealBits){} + *from) << 16); }
static inline RealBits all_bool(const uint8_t* from) { return ((RealBits){} + *from) != 0; }
static inline RealBits all_u8(const uint8_t* from) { return (RealBits){} + *from; }
static inline Longs all_integers(int64_t value) { return (Longs){} + value; }
static inline Longs all_i64(const int64_t* from) { return (Longs){} + *from; }

// -- quantized values -------------------------------------------------------------------------------------------------

static inline Reals dequantize_lanes(RealBits quantized, int32_t zero_point, float scale) {
    return __builtin_convertvector(quantized - zero_point, Reals) * scale;
}

// Dequantize with a zero point in float32, see dequantize_table of numerics/row_quantization.py.
static inline Reals dequantize_row(RealBits quantized, float scale, float zero_point) {
    return (__builtin_convertvector(quantized, Reals) - zero_point) * scale;
}

// Dequantize vector i of COUNT. With AVX512-VNNI and STEP vectors, vector i has every STEP-th value from the i-th on:
// an instruction then widens them and subtracts the zero point. `quantize_and_write` restores the order.
template <int COUNT>
static inline Reals read_interleaved(const uint8_t* from, int i, int64_t count, int32_t zero_point, float scale) {
#if defined(__AVX512VNNI__)
    if (COUNT == STEP) {
        const __m512i all = _mm512_loadu_si512(from), own = _mm512_set1_epi32(1 << (8 * i));
        return (Reals)_mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_set1_epi32(-zero_point), all, own)) * scale;
    }
#endif
    return dequantize_lanes(read_u8(from + i * FLOATS, 1, count), zero_point, scale);
}

// Quantize as quantize of numerics/rounding.py. The bounds are integers, so values may be clamped before they are
// rounded.
static inline RealBits quantize_lanes(Reals x, float inverse, int32_t zero_point, float least, float most) {
    const Reals steps = x * inverse, bounded = at_most(at_least(steps, least), most);
    return magic_to_i32(add_magic(steps == steps ? bounded : all_lanes(0.0f))) + zero_point;
}

// Quantize COUNT vectors and store them one after the other. STEP full vectors take a single store: values too low for
// int32 become the smallest int32, and packing saturates. `small`: no value is NaN or beyond 2^30 steps. `interleaved`:
// the vectors are in the order of read_interleaved.
template <int COUNT>
static inline __attribute__((always_inline)) void quantize_and_write(uint8_t* to, int64_t stride, int64_t count,
                                                                     const Reals* x, float inverse, int32_t zero_point,
                                                                     int32_t low, int32_t high, int small,
                                                                     int interleaved) {
#if defined(__AVX512VNNI__)
    if (COUNT == STEP && stride == 1) {
        __m512i steps[COUNT];
        EACH {
            const __m512 all = (__m512)(x[i] * inverse), lower = _mm512_min_ps(all, _mm512_set1_ps(32767.0f));
            steps[i] = small ? _mm512_cvtps_epi32(all)
                             : _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask(all, all, _CMP_ORD_Q), lower);
        }
        const __m512i zero = _mm512_set1_epi16((short)zero_point);
        const __m512i front = _mm512_adds_epi16(_mm512_packs_epi32(steps[0], steps[1 % COUNT]), zero);
        const __m512i back = _mm512_adds_epi16(_mm512_packs_epi32(steps[2 % COUNT], steps[3 % COUNT]), zero);
        const __m512i place = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
        const __m512i turn = _mm512_broadcast_i32x4(_mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0));
        __m512i packed = _mm512_packus_epi16(front, back);
        packed = interleaved ? _mm512_shuffle_epi8(packed, turn) : _mm512_permutexvar_epi32(place, packed);
        if (low > 0) packed = _mm512_max_epu8(packed, _mm512_set1_epi8((char)low));
        if (high < 255) packed = _mm512_min_epu8(packed, _mm512_set1_epi8((char)high));
        _mm512_storeu_si512(to, packed);
        return;
    }
#elif defined(__AVX2__)
    if (COUNT == STEP && stride == 1) {
        __m256i steps[COUNT];
        EACH {
            const __m256 all = (__m256)(x[i] * inverse), lower = _mm256_min_ps(all, _mm256_set1_ps(32767.0f));
            const __m256i number = (__m256i)_mm256_cmp_ps(all, all, _CMP_ORD_Q);
            steps[i] = small ? _mm256_cvtps_epi32(all) : _mm256_and_si256(_mm256_cvtps_epi32(lower), number);
        }
        const __m256i zero = _mm256_set1_epi16((short)zero_point);
        const __m256i front = _mm256_adds_epi16(_mm256_packs_epi32(steps[0], steps[1 % COUNT]), zero);
        const __m256i back = _mm256_adds_epi16(_mm256_packs_epi32(steps[2 % COUNT], steps[3 % COUNT]), zero);
        const __m256i place = _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0);
        __m256i packed = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(front, back), place);
        if (low > 0) packed = _mm256_max_epu8(packed, _mm256_set1_epi8((char)low));
        if (high < 255) packed = _mm256_min_epu8(packed, _mm256_set1_epi8((char)high));
        _mm256_storeu_si256((__m256i*)to, packed);
        return;
    }
#endif
    (void)small, (void)interleaved;
    EACH write_u8(to + i * FLOATS * stride, stride, count,
                  quantize_lanes(x[i], inverse, zero_point, (float)(low - zero_point), (float)(high - zero_point)));
}

// Add 1 to the counts of the first `count` lanes where x is clipped, see numerics/clip_counts.py.
static inline __attribute__((always_inline)) void count_lanes(RealBits* counts, Reals x, float inverse,
                                                              const struct ClipBounds b, int64_t count) {
    const Reals steps = x * inverse;
#if defined(__AVX512F__)
    const __m512 all = (__m512)steps;
    const __mmask16 least = _mm512_cmp_ps_mask(all, _mm512_set1_ps(b.least), _CMP_GE_OQ);
    const __mmask16 range = _mm512_mask_cmp_ps_mask(least, all, _mm512_set1_ps(b.most), _CMP_LE_OQ);
    const __mmask16 kept = _mm512_kor(range, _mm512_cmp_ps_mask(all, _mm512_set1_ps(b.masked), _CMP_LE_OQ));
    const __mmask16 clipped = _mm512_kandn(kept, (__mmask16)((1u << count) - 1));
    *counts = (RealBits)_mm512_mask_add_epi32((__m512i)*counts, clipped, (__m512i)*counts, _mm512_set1_epi32(1));
#else
    RealBits kept = ((steps >= b.least) & (steps <= b.most)) | (steps <= b.masked);
    if (count < FLOATS)
        for (int64_t l = count; l < FLOATS; ++l) kept[l] = -1;
    *counts += kept + 1;
#endif
}
static inline int64_t sum_of(RealBits counts) {
    int64_t sum = 0;
    for (int l = 0; l < FLOATS; ++l) sum += counts[l];
    return sum;
}

// Round to bfloat16, ties to even; NaN stays NaN.
static inline Reals to_bfloat16(Reals x) {
    const RealBits bits = (RealBits)x, odd = (bits >> 16) & 1;
    typedef uint32_t Words __attribute__((vector_size(4 * FLOATS)));
    const RealBits rounded = (RealBits)((Words)bits + 0x7fff + (Words)odd) & (int32_t)0xffff0000;
    return x == x ? (Reals)rounded : all_lanes(__builtin_nanf(""));
}

// -- reductions and iteration along a row -----------------------------------------------------------------------------

// Return a mask of the first `count` lanes.
static inline RealBits lanes_below(int64_t count) {
    RealBits lane;
    for (int l = 0; l < FLOATS; ++l) lane[l] = l;
    return lane < (int32_t)count;
}

// Include the first `count` lanes of x in a sum, a maximum or a minimum; the other lanes do not change.
static inline Reals accumulate_sum(Reals sum, Reals x, int64_t count) {
    return count == FLOATS ? sum + x : lanes_below(count) ? sum + x : sum;
}
static inline Reals accumulate_max(Reals most, Reals x, int64_t count) {
    return count == FLOATS ? larger(x, most) : lanes_below(count) ? larger(x, most) : most;
}
static inline Reals accumulate_min(Reals least, Reals x, int64_t count) {
    return count == FLOATS ? smaller(x, least) : lanes_below(count) ? smaller(x, least) : least;
}

// Reduce LANES partial results to one value in every lane: the upper half is combined with the lower half until one is
// left.
static inline Reals upper(Reals x, int half) {
#if defined(__clang__)  // it has no shuffle with places in a variable
    const Reals padded[2] = {x, Reals{}};
    Reals found;
    memcpy(&found, (const char*)padded + half * sizeof(float), sizeof found);
    return found;
#else
    static const int32_t places[2 * LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    RealBits place;
    memcpy(&place, places + half, sizeof place);
    return __builtin_shuffle(x, place);
#endif
}
#define REDUCE_LANES(name, joined)                                             \
    static inline Reals name(const Reals* lanes) {                             \
        Reals each[GROUPS];                                                    \
        memcpy(each, lanes, sizeof each);                                      \
        for (int half = GROUPS / 2; half; half /= 2)                           \
            for (int g = 0; g < half; ++g) {                                   \
                const Reals a = each[g], b = each[g + half];                   \
                each[g] = joined;                                              \
            }                                                                  \
        _Pragma("GCC unroll 4") for (int half = FLOATS / 2; half; half /= 2) { \
            const Reals a = each[0], b = upper(a, half);                       \
            each[0] = joined;                                                  \
        }                                                                      \
        return all_lanes(each[0][0]);                                          \
    }
// Reduce LANES partial results of the row of each lane, in the same order.
#define REDUCE_VECTORS(name, joined)                               \
    static inline Reals name(Reals* partial) {                     \
        for (int half = LANES / 2; half; half /= 2)                \
            for (int l = 0; l < half; ++l) {                       \
                const Reals a = partial[l], b = partial[l + half]; \
                partial[l] = joined;                               \
            }                                                      \
        return partial[0];                                         \
    }
REDUCE_VECTORS(reduce_vectors_sum, a + b)
REDUCE_VECTORS(reduce_vectors_max, larger(b, a))
REDUCE_VECTORS(reduce_vectors_min, smaller(b, a))
#undef REDUCE_VECTORS
REDUCE_LANES(reduce_lanes_sum, a + b)
REDUCE_LANES(reduce_lanes_max, larger(b, a))
REDUCE_LANES(reduce_lanes_min, smaller(b, a))
#undef REDUCE_LANES

template <int N>
struct Vectors {
    enum { COUNT = N };
};

// Call take(first element, elements per vector, group, number of vectors) for all elements of a row: for STEP vectors
// at a time, then for one at a time, where the last may be partial. `group` is the number of the first vector among the
// GROUPS vectors of partial results.
template <typename Take>
static inline __attribute__((always_inline)) void for_each_block(int64_t first, int64_t size, Take take) {
    int64_t e = first;
    for (; e + STEP * FLOATS <= size; e += STEP * FLOATS) take(e, (int64_t)FLOATS, 0, Vectors<STEP>());
    for (int g = 0; e < size; e += FLOATS, ++g)
        take(e, size - e < FLOATS ? size - e : (int64_t)FLOATS, g, Vectors<1>());
}
