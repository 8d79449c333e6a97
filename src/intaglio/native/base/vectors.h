// SIMD vectors of quantized values, their conversion to float32 and back.

#pragma once

#include <string.h>

#include "base/intrinsics.h"
#include "products/tile.h"

// `widen_quarter` converts a quarter of a vector of quantized values to float32, and `round_and_pack` turns four
// quarters of results into a vector of quantized values. Quarter j consists of bytes 4 * j to 4 * j + 3 of every 16
// bytes. With constants per channel, `deinterleave` first permutes the values such that quarter j holds consecutive
// ones, and `interleave` restores the order. A count is the number of values to load or store; a count above WIDE means
// WIDE.
#if defined(__AVX2__)
#define VECTORS 1
static const float UNBOUNDED_STEPS = 3e38f;  // bound for `pack_constants` if the range of the steps is not known
static const uint8_t quarter_bytes[4][16] = {
    {0, 128, 128, 128, 1, 128, 128, 128, 2, 128, 128, 128, 3, 128, 128, 128},
    {4, 128, 128, 128, 5, 128, 128, 128, 6, 128, 128, 128, 7, 128, 128, 128},
    {8, 128, 128, 128, 9, 128, 128, 128, 10, 128, 128, 128, 11, 128, 128, 128},
    {12, 128, 128, 128, 13, 128, 128, 128, 14, 128, 128, 128, 15, 128, 128, 128}};
enum { TWO_TO_23 = 0x4b000000 };  // bits of the float32 2^23; a quantized value is added as its lowest byte
#endif

#if defined(__AVX512BW__) && defined(__AVX512VL__)
enum { WIDE = 64 };
typedef __m512i VectorU8;
typedef __m512 Floats;
typedef uint16_t Words __attribute__((vector_size(WIDE)));
typedef int32_t Ints __attribute__((vector_size(WIDE)));

static inline VectorU8 load_u8(const uint8_t* from, int64_t count) {
    return count >= WIDE ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi8(((__mmask64)1 << count) - 1, from);
}

static inline void store_u8(uint8_t* to, VectorU8 x, int64_t count) {
    if (count >= WIDE)
        _mm512_storeu_si512(to, x);
    else
        _mm512_mask_storeu_epi8(to, ((__mmask64)1 << count) - 1, x);
}

static inline VectorU8 deinterleave(VectorU8 x) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), x);
}

static inline VectorU8 interleave(VectorU8 x) { return deinterleave(x); }

static inline Floats floats(float x) { return _mm512_set1_ps(x); }

static inline Floats load_floats(const float* from) { return _mm512_loadu_ps(from); }

// Return 2^23 + q for quarter j.
static inline Floats widen_quarter(VectorU8 x, int j) {
    const __m512i order = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)quarter_bytes[j]));
    return _mm512_castsi512_ps(_mm512_mask_shuffle_epi8(_mm512_set1_epi32(TWO_TO_23), 0x1111111111111111, x, order));
}

// Return x >= 0 ? rise : fall per lane.
static inline Floats select_by_sign(Floats x, Floats rise, Floats fall) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GE_OQ), fall, rise);
}

// Constants of `round_and_pack`. `exceeds_i32`: steps may exceed the range of int32. `full_range`: the bounds are 0 and
// 255.
struct PackConstants {
    __m512i zero_point, low, high;
    __m512 convertible;
    int exceeds_i32, full_range;
};

// Return the constants of `round_and_pack` for steps of magnitude up to `most`.
static inline struct PackConstants pack_constants(const struct Limits* q, float most) {
    const struct PackConstants f = {_mm512_loadu_si512(q->zero_point16), _mm512_loadu_si512(q->low8),
                                    _mm512_loadu_si512(q->high8),        _mm512_set1_ps(q->convertible_high),
                                    !(most < q->convertible_high),       q->low == 0 && q->high == 255};
    return f;
}

// Round steps to int32. Steps below the range of int32 and NaN become the smallest int32; only steps that may be above
// 2^30 need a bound.
static inline __m512i to_int32(Floats steps, const struct PackConstants* f) {
    return _mm512_cvtps_epi32(f->exceeds_i32 ? _mm512_min_ps(f->convertible, steps) : steps);
}

// Return clamp(rne(steps) + zero_point, low, high) of four quarters. Saturation to 16 bits only changes values that the
// clamp changes anyway.
static inline VectorU8 round_and_pack(const Floats* steps, const struct PackConstants* f) {
    const __m512i a = _mm512_packs_epi32(to_int32(steps[0], f), to_int32(steps[1], f));
    const __m512i b = _mm512_packs_epi32(to_int32(steps[2], f), to_int32(steps[3], f));
    const __m512i packed =
        _mm512_packus_epi16(_mm512_adds_epi16(a, f->zero_point), _mm512_adds_epi16(b, f->zero_point));
    return f->full_range ? packed : _mm512_min_epu8(_mm512_max_epu8(packed, f->low), f->high);
}

static inline VectorU8 unpack_low(VectorU8 a, VectorU8 b) { return _mm512_unpacklo_epi16(a, b); }
static inline VectorU8 unpack_high(VectorU8 a, VectorU8 b) { return _mm512_unpackhi_epi16(a, b); }
// Multiply int16 and add neighbouring products.
static inline Ints add_pairs(VectorU8 a, VectorU8 b) { return (Ints)_mm512_madd_epi16(a, b); }
#elif defined(__AVX2__)
enum { WIDE = 32 };
typedef __m256i VectorU8;
typedef __m256 Floats;
typedef uint16_t Words __attribute__((vector_size(WIDE)));
typedef int32_t Ints __attribute__((vector_size(WIDE)));

static inline VectorU8 load_u8(const uint8_t* from, int64_t count) {
    if (count >= WIDE) return _mm256_loadu_si256((const __m256i*)from);
    uint8_t some[WIDE] = {0};
    memcpy(some, from, (size_t)count);
    return _mm256_loadu_si256((const __m256i*)some);
}

static inline void store_u8(uint8_t* to, VectorU8 x, int64_t count) {
    uint8_t some[WIDE];
    _mm256_storeu_si256((__m256i*)(count >= WIDE ? to : some), x);
    if (count < WIDE) memcpy(to, some, (size_t)count);
}

static inline VectorU8 deinterleave(VectorU8 x) {
    return _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
}

static inline VectorU8 interleave(VectorU8 x) {
    return _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

static inline Floats floats(float x) { return _mm256_set1_ps(x); }

static inline Floats load_floats(const float* from) { return _mm256_loadu_ps(from); }

// Return 2^23 + q for quarter j.
static inline Floats widen_quarter(VectorU8 x, int j) {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)quarter_bytes[j]));
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_shuffle_epi8(x, order), _mm256_set1_epi32(TWO_TO_23)));
}

// Return x >= 0 ? rise : fall per lane.
static inline Floats select_by_sign(Floats x, Floats rise, Floats fall) {
    return _mm256_blendv_ps(fall, rise, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GE_OQ));
}

// Constants of `round_and_pack`. `exceeds_i32`: steps may exceed the range of int32. `full_range`: the bounds are 0 and
// 255.
struct PackConstants {
    __m256i zero_point, low, high;
    __m256 convertible;
    int exceeds_i32, full_range;
};

// Return the constants of `round_and_pack` for steps of magnitude up to `most`.
static inline struct PackConstants pack_constants(const struct Limits* q, float most) {
    const struct PackConstants f = {_mm256_loadu_si256((const __m256i*)q->zero_point16),
                                    _mm256_loadu_si256((const __m256i*)q->low8),
                                    _mm256_loadu_si256((const __m256i*)q->high8),
                                    _mm256_set1_ps(q->convertible_high),
                                    !(most < q->convertible_high),
                                    q->low == 0 && q->high == 255};
    return f;
}

static inline __m256i to_int32(Floats steps, const struct PackConstants* f) {
    return _mm256_cvtps_epi32(f->exceeds_i32 ? _mm256_min_ps(f->convertible, steps) : steps);
}

static inline VectorU8 round_and_pack(const Floats* steps, const struct PackConstants* f) {
    const __m256i a = _mm256_packs_epi32(to_int32(steps[0], f), to_int32(steps[1], f));
    const __m256i b = _mm256_packs_epi32(to_int32(steps[2], f), to_int32(steps[3], f));
    const __m256i packed =
        _mm256_packus_epi16(_mm256_adds_epi16(a, f->zero_point), _mm256_adds_epi16(b, f->zero_point));
    return f->full_range ? packed : _mm256_min_epu8(_mm256_max_epu8(packed, f->low), f->high);
}

static inline VectorU8 unpack_low(VectorU8 a, VectorU8 b) { return _mm256_unpacklo_epi16(a, b); }
static inline VectorU8 unpack_high(VectorU8 a, VectorU8 b) { return _mm256_unpackhi_epi16(a, b); }
// Multiply int16 and add neighbouring products.
static inline Ints add_pairs(VectorU8 a, VectorU8 b) { return (Ints)_mm256_madd_epi16(a, b); }
#else
enum { WIDE = 16 };
#endif

#if defined(VECTORS)
static inline float magnitude(float x) { return x < 0 ? -x : x; }

// Return what `widen_quarter` gives for the zero point. The difference from it is exactly q - zero_point.
static inline Floats origin(int32_t zero) { return floats((float)(8388608 + zero)); }

static inline void store_floats(float* to, Floats x) { memcpy(to, &x, sizeof x); }
#endif

// Iterate over `count` quantized values, whole pixels of `period` channels, a vector at a time: `i` is the first
// value of the vector and `channel` its channel. Vectors begin at any channel and may end in another pixel, so arrays
// of constants per channel start over and have WIDE - 1 entries more.
#define FOR_EACH_VECTOR(count, period)                                     \
    for (int64_t i = 0, channel = 0, step_ = WIDE % (period); i < (count); \
         i += WIDE, channel += step_, channel -= channel < (period) ? 0 : (period))
