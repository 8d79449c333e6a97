// Float32 activation functions on SIMD vectors. Each function has the name, the meaning and the bits of the one in
// numerics/activations.py. Compile with -ffp-contract=off; nothing is called from libm.
#pragma once

#include <stdint.h>
#include <string.h>

#include "base/intrinsics.h"

#if defined(__AVX512F__)
enum { FLOATS = 16 };
#elif defined(__AVX2__)
enum { FLOATS = 8 };
#else
enum { FLOATS = 4 };
#endif
typedef float Reals __attribute__((vector_size(4 * FLOATS)));
typedef int32_t RealBits __attribute__((vector_size(4 * FLOATS)));
typedef uint8_t Bytes __attribute__((vector_size(FLOATS)));

// Broadcast x to all lanes.
static inline Reals all_lanes(float x) { return x - (Reals){}; }
// Return x > y ? x : y (`at_least`) or x < y ? x : y (`at_most`) per lane, hence y for a NaN. Both are single
// instructions, which g++ does not use for these expressions.
static inline Reals at_least(Reals x, float y) {
#if defined(__AVX512F__)
    return (Reals)_mm512_max_ps((__m512)x, _mm512_set1_ps(y));
#elif defined(__AVX2__)
    return (Reals)_mm256_max_ps((__m256)x, _mm256_set1_ps(y));
#else
    return x > y ? x : all_lanes(y);
#endif
}
static inline Reals at_most(Reals x, float y) {
#if defined(__AVX512F__)
    return (Reals)_mm512_min_ps((__m512)x, _mm512_set1_ps(y));
#elif defined(__AVX2__)
    return (Reals)_mm256_min_ps((__m256)x, _mm256_set1_ps(y));
#else
    return x < y ? x : all_lanes(y);
#endif
}
// Return |x|.
static inline Reals absolute(Reals x) { return (Reals)((RealBits)x & 0x7fffffff); }
// Return at_most(absolute(x), y) for y > 0, hence y for a NaN.
static inline Reals magnitude_at_most(Reals x, float y) {
#if defined(__AVX512DQ__)
    // The immediate is 2, the smaller magnitude, plus 8, without its sign.
    return (Reals)_mm512_range_ps((__m512)x, _mm512_set1_ps(y), 10);
#else
    return at_most(absolute(x), y);
#endif
}
// Return 0 > x ? 0 : x, which keeps NaN and -0.
static inline Reals relu(Reals x) {
#if defined(__AVX512F__)
    return (Reals)_mm512_max_ps(_mm512_setzero_ps(), (__m512)x);
#elif defined(__AVX2__)
    return (Reals)_mm256_max_ps(_mm256_setzero_ps(), (__m256)x);
#else
    return x < 0.0f ? all_lanes(0.0f) : x;
#endif
}

// Round |x| <= 2^22 to integers, ties to even: after the addition of 1.5 * 2^23 the low bits of the mantissa hold the
// rounded integer. `add_magic` adds, `magic_to_f32` returns the integer as float32, `magic_to_i32` as int32.
static inline Reals add_magic(Reals x) { return x + 12582912.0f; }
static inline Reals magic_to_f32(Reals sum) { return sum - 12582912.0f; }
static inline RealBits magic_to_i32(Reals sum) { return (RealBits)sum - 0x4b400000; }

// Repeat a statement for COUNT vectors. Several vectors are computed step by step together, because the steps of one
// vector depend on each other and the out-of-order window of a processor is too short to overlap them with later code.
#define EACH _Pragma("GCC unroll 8") for (int i = 0; i < COUNT; ++i)

// Replace each r by exp(r - n * ln 2) - 1. The coefficients and their order are EXP_TERMS of numerics/activations.py.
template <int COUNT>
static inline __attribute__((always_inline)) void exp_rises(Reals* r, const Reals* n) {
    Reals total[COUNT];
    EACH r[i] = (r[i] - n[i] * 0.693359375f) - n[i] * -2.12194441701285541057586669921875e-4f;
    EACH total[i] = 0x1.6a23cep-10f * r[i] + 0x1.123a2p-7f;
    EACH total[i] = total[i] * r[i] + 0x1.5558f2p-5f;
    EACH total[i] = total[i] * r[i] + 0x1.555492p-3f;
    EACH total[i] = total[i] * r[i] + 0x1.fffffcp-2f;
    EACH r[i] = total[i] * (r[i] * r[i]) + r[i];
}

// Return exp(bounded - n * ln 2) - 1.
static inline Reals exp_rise(Reals bounded, Reals n) {
    exp_rises<1>(&bounded, &n);
    return bounded;
}

// Split exp(x) for x in [-87, 0]: return r, and set *power to a power of two, with exp(x) = (r + 1) * power. Smaller x
// count as -87.
static inline Reals exp_parts(Reals x, Reals* power) {
    const Reals bounded = at_least(x, -87.0f), rounded = add_magic(bounded * 1.44269502162933349609375f);
    *power = (Reals)((magic_to_i32(rounded) + 127) << 23);
    return exp_rise(bounded, magic_to_f32(rounded));
}

// Replace each x <= 0 by exp(x), which is 0 below -87; NaN stays NaN. Lanes below -87 are computed with n = 0 and then
// discarded.
template <int COUNT>
static inline __attribute__((always_inline)) void exp_negatives(Reals* x) {
    Reals n[COUNT], power[COUNT];
    RealBits below[COUNT];
    EACH below[i] = x[i] < -87.0f;
    EACH n[i] = add_magic(below[i] ? all_lanes(0.0f) : x[i] * 1.44269502162933349609375f);
    EACH power[i] = (Reals)((magic_to_i32(n[i]) + 127) << 23);
    EACH n[i] = magic_to_f32(n[i]);
    exp_rises<COUNT>(x, n);
    EACH x[i] = below[i] ? all_lanes(0.0f) : (x[i] + 1.0f) * power[i];
}

// Return exp(x) for x <= 0.
static inline Reals exp_negative(Reals x) {
    exp_negatives<1>(&x);
    return x;
}

// Return exp(x) - 1 for x <= 0.
static inline Reals expm1_negative(Reals x) {
    Reals power;
    const Reals rise = exp_parts(x, &power);
    return rise * power + (power - 1.0f);
}

static inline Reals leaky_relu(Reals x, float slope) { return x > 0.0f ? x : at_least(x, -0x1.fffffep127f) * slope; }

static inline Reals hardsigmoid(Reals x) { return at_most(at_least(x + 3.0f, 0.0f), 6.0f) * 0x1.555556p-3f; }

static inline Reals hardswish(Reals x) { return at_least(x, -3.0f) * hardsigmoid(x); }

static inline Reals sigmoid(Reals x) {
    const Reals power = exp_negative(-absolute(x));
    return (x < 0.0f ? power : all_lanes(1.0f)) / (power + 1.0f);
}

static inline Reals silu(Reals x) { return at_least(x, -87.0f) * sigmoid(x); }

static inline Reals tanh_f32(Reals x) {
    const Reals fall = expm1_negative(-2.0f * absolute(x));
    return (x < 0.0f ? fall : -fall) / (fall + 2.0f);
}

static inline Reals gelu(Reals x) {
    const Reals near = 1.0f / (absolute(x) * 0x1.da671p-3f + 1.0f), power = exp_negative((x * -0.5f) * x);
    Reals total = 0x1.0fb844p-1f * near + -0x1.7401c6p-1f;
    total = total * near + 0x1.6be1c6p-1f;
    total = total * near + -0x1.23531cp-3f;
    total = total * near + 0x1.04f20cp-3f;
    const Reals tail = (total * near) * power;
    return at_least(x, -87.0f) * (x < 0.0f ? tail : 1.0f - tail);
}

// Coefficients [power][piece] of `gelu_approx_vectors`, GELU_APPROX_TERMS of numerics/activations.py.
static const float gelu_approx_terms[4][16] __attribute__((aligned(64))) = {
    {0x1p-1f, 0x1.000f98p-1f, 0x1.01ecd2p-1f, 0x1.0ab202p-1f, 0x1.1b66bap-1f, 0x1.289444p-1f, 0x1.1ff3b6p-1f,
     0x1.f0e2c2p-2f, 0x1.74f3f2p-2f, 0x1.e385e4p-3f, 0x1.0e9182p-3f, 0x1.05fe04p-4f, 0x1.b8628p-6f, 0x1.424da6p-7f,
     0x1.9c0f8p-9f, 0.0f},
    {-0x1.988574p-2f, -0x1.9a1c52p-2f, -0x1.af5682p-2f, -0x1.ede6ap-2f, -0x1.22322p-1f, -0x1.3d3ac4p-1f,
     -0x1.2fc148p-1f, -0x1.f2b8ccp-2f, -0x1.5def9cp-2f, -0x1.a53244p-3f, -0x1.b50dccp-4f, -0x1.88ef62p-5f,
     -0x1.33719p-6f, -0x1.a445aep-8f, -0x1.f77208p-10f, 0.0f},
    {0x1.d55798p-14f, 0x1.c2a298p-8f, 0x1.7f84ccp-5f, 0x1.eb377ep-4f, 0x1.8b5e6ep-3f, 0x1.d56cb6p-3f, 0x1.b96528p-3f,
     0x1.55745ap-3f, 0x1.bc9252p-4f, 0x1.ee4768p-5f, 0x1.d9fa66p-6f, 0x1.8ad01p-7f, 0x1.1f2dd4p-8f, 0x1.6e4604p-10f,
     0x1.9ad56ep-12f, 0.0f},
    {0x1.0d194ap-4f, 0x1.c77edep-5f, 0x1.e3a5a8p-6f, 0x1.5e20acp-13f, -0x1.5825ap-6f, -0x1.df94bep-6f, -0x1.b8c1d8p-6f,
     -0x1.3e3a12p-6f, -0x1.7dbe26p-7f, -0x1.864754p-8f, -0x1.58db46p-9f, -0x1.09a4b4p-10f, -0x1.66ced2p-12f,
     -0x1.aa9c26p-14f, -0x1.bfc994p-16f, 0.0f},
};

// Return the coefficients of |x|^power in the pieces that the low four bits of `place` select.
static inline Reals gelu_approx_term(int power, RealBits place) {
#if defined(__AVX512F__)
    return (Reals)_mm512_permutexvar_ps((__m512i)place, _mm512_load_ps(gelu_approx_terms[power]));
#elif defined(__AVX2__)
    const __m256 front = _mm256_permutevar8x32_ps(_mm256_load_ps(gelu_approx_terms[power]), (__m256i)place);
    const __m256 back = _mm256_permutevar8x32_ps(_mm256_load_ps(gelu_approx_terms[power] + 8), (__m256i)place);
    return (Reals)_mm256_blendv_ps(front, back, (__m256)(place << 28));
#else
    Reals found;
    for (int l = 0; l < FLOATS; ++l) found[l] = gelu_approx_terms[power][place[l] & 15];
    return found;
#endif
}

// Replace each x by an approximation of GELU(x), gelu_approx of numerics/activations.py; NaN stays NaN.
template <int COUNT>
static inline __attribute__((always_inline)) void gelu_approx_vectors(Reals* x) {
    Reals size[COUNT], total[COUNT];
    RealBits place[COUNT];
    EACH size[i] = magnitude_at_most(x[i], 5.0f);
    EACH place[i] = (RealBits)add_magic(size[i] * 3.0f);
    EACH total[i] = gelu_approx_term(3, place[i]) * size[i] + gelu_approx_term(2, place[i]);
    EACH total[i] = total[i] * size[i] + gelu_approx_term(1, place[i]);
    EACH total[i] = total[i] * size[i] + gelu_approx_term(0, place[i]);
    EACH x[i] = relu(x[i]) - size[i] * total[i];
}

static inline Reals gelu_approx(Reals x) {
    gelu_approx_vectors<1>(&x);
    return x;
}

static inline Reals gelu_tanh(Reals x) {
    const Reals inner = x * ((x * x) * 0x1.2444f2p-4f + 0x1.988454p0f);
    return at_least(x, -87.0f) * sigmoid(inner);
}

// Widen bytes to lanes, and narrow lanes to their low bytes. The compiler splits generic conversions into more
// instructions.
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

// Narrow 16 quantized values from 32 bits to 8 bits each.
static inline void narrow16(const RealBits* words, uint8_t* to) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)words[0], (__m256i)words[1]), 0xd8);
    _mm_storeu_si128((__m128i*)to, _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
#else
    for (int i = 0; i < 16 / FLOATS; ++i) {
        const Bytes bytes = narrowed(words[i]);
        memcpy(to + i * FLOATS, &bytes, sizeof bytes);
    }
#endif
}
