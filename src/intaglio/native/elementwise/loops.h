// What generated loops are made of, a vector at a time: floats.py's functions, bit for bit, ends of every element type,
// and how a row is gone along. Build with -ffp-contract=off. No libm.
#pragma once

#include <string.h>

#include "base/functions.h"
#include "base/intrinsics.h"
#include "base/numerics.h"

enum { LANES = 16, GROUPS = LANES / FLOATS };  // of a sum; vectors that hold them
enum { STEP = 4 };                             // vectors that are worked on side by side; levels of them fill one
enum { STREAMED = 1 << 24 };                   // bytes from which on a result of floats is written past the caches
enum { PIECE = 1 << 14 };                      // elements of a row that a thread takes at a time, where all are alike

typedef uint8_t Bytes __attribute__((vector_size(FLOATS)));
typedef uint16_t Halves __attribute__((vector_size(2 * FLOATS)));
typedef int64_t Longs __attribute__((vector_size(8 * FLOATS)));

// -- ends: `count` elements `apart` from each other; lanes beyond hold zero, and are not stored
// ---------------------------

#define END(name, Element, Vector)                                                                            \
    typedef Vector name##_anywhere __attribute__((aligned(1), may_alias));                                    \
    static inline __attribute__((always_inline)) Vector read_##name(const Element* from, int64_t apart,       \
                                                                    int64_t count) {                          \
        Vector all = {0};                                                                                     \
        if (apart == 1 && count == FLOATS) return *(const name##_anywhere*)from;                              \
        for (int64_t l = 0; l < count; ++l) all[l] = from[l * apart];                                         \
        return all;                                                                                           \
    }                                                                                                         \
    static inline __attribute__((always_inline)) void write_##name(Element* to, int64_t apart, int64_t count, \
                                                                   Vector all) {                              \
        if (apart == 1 && count == FLOATS)                                                                    \
            *(name##_anywhere*)to = all;                                                                      \
        else                                                                                                  \
            for (int64_t l = 0; l < count; ++l) to[l * apart] = all[l];                                       \
    }
END(f32, float, Reals)
END(bytes, uint8_t, Bytes)
END(halves, uint16_t, Halves)
END(i64, int64_t, Longs)
#undef END

// Whether a result of so many bytes goes past the caches: none would still hold all of it when somebody reads it, and a
// line that is written whole need not be read first.
static inline int is_streamed(const void* row, int64_t bytes) {
#if defined(__AVX2__)
    return bytes >= STREAMED && (uintptr_t)row % (4 * FLOATS) == 0;
#else
    return (void)row, (void)bytes, 0;
#endif
}
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
static inline void end_streams(void) {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

// Bytes -> lanes and back, of which the low ones are kept. The compiler would take generic vectors apart.
static inline RealBits widened(Bytes bytes) {
#if defined(__AVX512F__)
    return (RealBits)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif defined(__AVX2__)
    return (RealBits)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)bytes));
#else
    return __builtin_convertvector(bytes, RealBits);
#endif
}
static inline Bytes narrowed(RealBits lanes) {
#if defined(__AVX512F__)
    return (Bytes)_mm512_cvtepi32_epi8((__m512i)lanes);
#elif defined(__AVX2__)
    const __m256i low = _mm256_and_si256((__m256i)lanes, _mm256_set1_epi32(255));
    const __m128i pairs = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    return (Bytes)_mm_cvtsi128_si64(_mm_packus_epi16(pairs, pairs));
#else
    return __builtin_convertvector(lanes, Bytes);
#endif
}

static inline RealBits read_bool(const uint8_t* from, int64_t apart, int64_t count) {
    return widened(read_bytes(from, apart, count)) != 0;
}
static inline void write_bool(uint8_t* to, int64_t apart, int64_t count, RealBits x) {
    write_bytes(to, apart, count, narrowed(x & 1));
}
static inline RealBits read_u8(const uint8_t* from, int64_t apart, int64_t count) {
    return widened(read_bytes(from, apart, count));
}
static inline void write_u8(uint8_t* to, int64_t apart, int64_t count, RealBits x) {
    write_bytes(to, apart, count, narrowed(x));
}
static inline Reals read_bf16(const uint16_t* from, int64_t apart, int64_t count) {
    return (Reals)(__builtin_convertvector(read_halves(from, apart, count), RealBits) << 16);
}
static inline void write_bf16(uint16_t* to, int64_t apart, int64_t count, Reals x) {
    write_halves(to, apart, count, __builtin_convertvector(((RealBits)x >> 16) & 0xffff, Halves));
}

// Of one element, in all lanes.
static inline Reals all_f32(const float* from) { return every_lane(*from); }
static inline Reals all_bf16(const uint16_t* from) { return (Reals)(((RealBits){} + *from) << 16); }
static inline RealBits all_bool(const uint8_t* from) { return ((RealBits){} + *from) != 0; }
static inline RealBits all_u8(const uint8_t* from) { return (RealBits){} + *from; }
static inline Longs all_i64(const int64_t* from) { return (Longs){} + *from; }

// -- levels
// -------------------------------------------------------------------------------------------------------------

static inline Reals dequantize_lanes(RealBits levels, int32_t zero_point, float scale) {
    return __builtin_convertvector(levels - zero_point, Reals) * scale;
}

// numerics.dequantize_table.
static inline Reals dequantize_row(RealBits levels, float scale, float zero_point) {
    return (__builtin_convertvector(levels, Reals) - zero_point) * scale;
}

// Levels as read_u8 and dequantize_lanes have them, or of STEP vectors every STEP-th level in the i-th: an instruction
// then widens them and takes the zero point off. `write_levels` puts them back in turn.
template <int COUNT>
static inline Reals read_in_turn(const uint8_t* from, int i, int64_t count, int32_t zero_point, float scale) {
#if defined(__AVX512VNNI__)
    if (COUNT == STEP) {
        const __m512i all = _mm512_loadu_si512(from), own = _mm512_set1_epi32(1 << (8 * i));
        return (Reals)_mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_set1_epi32(-zero_point), all, own)) * scale;
    }
#endif
    return dequantize_lanes(read_u8(from + i * FLOATS, 1, count), zero_point, scale);
}

// numerics.quantize. Bounds are whole steps from the zero point, so it does not matter that they are taken before
// rounding.
static inline RealBits quantize_lanes(Reals x, float inverse, int32_t zero_point, float least, float most) {
    const Reals steps = x * inverse, bounded = least_of(most_of(steps, least), most);
    return whole(shifted(steps == steps ? bounded : every_lane(0.0f))) + zero_point;
}

// The levels of some vectors, one after the other. Of STEP full ones side by side, in one store: what is too low for an
// i32 becomes the least there is, and each packing bounds what it packs. `small`: all are numbers below 2^30 steps;
// `in_turn`: as read_in_turn has them.
template <int COUNT>
static inline __attribute__((always_inline)) void write_levels(uint8_t* to, int64_t apart, int64_t count,
                                                               const Reals* x, float inverse, int32_t zero_point,
                                                               int32_t low, int32_t high, int small, int in_turn) {
#if defined(__AVX512VNNI__)
    if (COUNT == STEP && apart == 1) {
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
        __m512i levels = _mm512_packus_epi16(front, back);
        levels = in_turn ? _mm512_shuffle_epi8(levels, turn) : _mm512_permutexvar_epi32(place, levels);
        if (low > 0) levels = _mm512_max_epu8(levels, _mm512_set1_epi8((char)low));
        if (high < 255) levels = _mm512_min_epu8(levels, _mm512_set1_epi8((char)high));
        _mm512_storeu_si512(to, levels);
        return;
    }
#elif defined(__AVX2__)
    if (COUNT == STEP && apart == 1) {
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
        __m256i levels = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(front, back), place);
        if (low > 0) levels = _mm256_max_epu8(levels, _mm256_set1_epi8((char)low));
        if (high < 255) levels = _mm256_min_epu8(levels, _mm256_set1_epi8((char)high));
        _mm256_storeu_si256((__m256i*)to, levels);
        return;
    }
#endif
    (void)small, (void)in_turn;
    EACH write_u8(to + i * FLOATS * apart, apart, count,
                  quantize_lanes(x[i], inverse, zero_point, (float)(low - zero_point), (float)(high - zero_point)));
}

static inline Reals to_bfloat16(Reals x) {
    const RealBits bits = (RealBits)x, odd = (bits >> 16) & 1;
    typedef uint32_t Words __attribute__((vector_size(4 * FLOATS)));
    const RealBits rounded = (RealBits)((Words)bits + 0x7fff + (Words)odd) & (int32_t)0xffff0000;
    return x == x ? (Reals)rounded : every_lane(__builtin_nanf(""));
}

// -- of one element
// -----------------------------------------------------------------------------------------------------

static inline Reals of_number(Reals x, Reals value) { return x == x ? value : x; }  // NaN stays

// a > b, or NaN ? a : b; the instruction alone gives b of NaN.
static inline Reals larger(Reals a, Reals b) {
#if defined(__AVX512F__)
    return (Reals)_mm512_mask_max_ps((__m512)a, _mm512_cmp_ps_mask((__m512)a, (__m512)a, _CMP_ORD_Q), (__m512)a,
                                     (__m512)b);
#else
    return ((a > b) | (a != a)) ? a : b;
#endif
}
static inline Reals smaller(Reals a, Reals b) {
#if defined(__AVX512F__)
    return (Reals)_mm512_mask_min_ps((__m512)a, _mm512_cmp_ps_mask((__m512)a, (__m512)a, _CMP_ORD_Q), (__m512)a,
                                     (__m512)b);
#else
    return ((a < b) | (a != a)) ? a : b;
#endif
}

static inline Reals ones(RealBits truth) { return (Reals)(truth & (RealBits)every_lane(1.0f)); }

static inline Reals clamp(Reals x, float low, float high) {
    const Reals raised = x < low ? every_lane(low) : x;
    return raised > high ? every_lane(high) : raised;
}

static inline Reals root(Reals x) {
#if defined(__AVX512F__)
    return (Reals)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
    return (Reals)_mm256_sqrt_ps((__m256)x);
#else
    for (int l = 0; l < FLOATS; ++l) x[l] = __builtin_sqrtf(x[l]);
    return x;
#endif
}

static inline Reals nearest(Reals x) {
#if defined(__AVX512F__)
    return (Reals)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
    return (Reals)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    Reals whole;
    for (int l = 0; l < FLOATS; ++l) whole[l] = round_even(x[l]);
    return (Reals)((RealBits)absolute(whole) | ((RealBits)x & (int32_t)0x80000000));  // its zeros have no sign
#endif
}

static inline Reals exponential(Reals x) {
    const Reals bounded = least_of(most_of(x, -87.0f), 89.0f), rounded = shifted(bounded * 1.44269502162933349609375f);
    const RealBits n = whole(rounded);
    const Reals power = (Reals)(((n < 127 ? n : (RealBits){} + 127) + 127) << 23);
    const Reals twice = n > 127 ? every_lane(2.0f) : every_lane(1.0f);
    const Reals found = ((exp_rise(bounded, integral(rounded)) + 1.0f) * power) * twice;
    return of_number(x, x < -87.0f ? every_lane(0.0f) : found);
}

static inline Reals logarithm(Reals x) {
    const RealBits small = x < 0x1p-126f;
    const Reals usual = x > 0.0f ? x : every_lane(1.0f), scaled = small ? usual * 0x1p23f : usual;
    const RealBits bits = (RealBits)scaled, n = (bits - 0x3f3504f3) >> 23;
    const Reals rise = (Reals)(bits - (n << 23)) - 1.0f, s = rise / (rise + 2.0f), square = s * s;
    Reals total = square * 0x1.c71c72p-3f + 0x1.24924ap-2f;
    total = total * square + 0x1.99999ap-2f;
    total = total * square + 0x1.555556p-1f;
    const Reals exponent = __builtin_convertvector(n - (small & 23), Reals);
    Reals found = ((total * (square * s) + exponent * -2.12194441701285541057586669921875e-4f) + (s + s)) +
                  exponent * 0.693359375f;
    found = x == 0.0f ? every_lane(-__builtin_inff()) : found;
    found = x == __builtin_inff() ? x : found;
    return of_number(x, x < 0.0f ? every_lane(__builtin_nanf("")) : found);
}

// -- along a row
// --------------------------------------------------------------------------------------------------------

static inline RealBits lanes_below(int64_t count) {
    RealBits lane;
    for (int l = 0; l < FLOATS; ++l) lane[l] = l;
    return lane < (int32_t)count;
}

// The first `count` lanes of a vector join their lanes of a sum; a full vector's all do.
static inline Reals added(Reals sum, Reals x, int64_t count) {
    return count == FLOATS ? sum + x : lanes_below(count) ? sum + x : sum;
}
static inline Reals raised(Reals most, Reals x, int64_t count) {
    return count == FLOATS ? larger(x, most) : lanes_below(count) ? larger(x, most) : most;
}
static inline Reals lowered(Reals least, Reals x, int64_t count) {
    return count == FLOATS ? smaller(x, least) : lanes_below(count) ? smaller(x, least) : least;
}

// 16 lanes -> one value in every lane: the upper half joins the lower, until there is one.
static inline Reals upper(Reals x, int half) {
    static const int32_t places[2 * LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    RealBits place;
    memcpy(&place, places + half, sizeof place);
    return __builtin_shuffle(x, place);
}
#define TREE(name, joined)                                                     \
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
        return every_lane(each[0][0]);                                         \
    }
TREE(tree_of_sums, a + b)
TREE(tree_of_most, larger(b, a))
TREE(tree_of_least, smaller(b, a))
#undef TREE

template <int N>
struct Vectors {
    enum { COUNT = N };
};

// take(first element, elements of each vector, which of the vectors that hold 16 lanes is the first, how many vectors),
// along a row: STEP vectors at a time, then one by one, the last of which may not be full.
template <typename Take>
static inline __attribute__((always_inline)) void along(int64_t first, int64_t size, Take take) {
    int64_t e = first;
    for (; e + STEP * FLOATS <= size; e += STEP * FLOATS) take(e, (int64_t)FLOATS, 0, Vectors<STEP>());
    for (int g = 0; e < size; e += FLOATS, ++g)
        take(e, size - e < FLOATS ? size - e : (int64_t)FLOATS, g, Vectors<1>());
}
