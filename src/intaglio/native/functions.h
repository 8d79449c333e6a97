// Functions of activations, a vector at a time: each has the name, meaning and bits of its twin in numerics.py.
// Build with -ffp-contract=off. No libm.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <stdint.h>

#if defined(__AVX512F__)
enum { FLOATS = 16 };
#elif defined(__AVX2__)
enum { FLOATS = 8 };
#else
enum { FLOATS = 4 };
#endif
typedef float Reals __attribute__((vector_size(4 * FLOATS)));
typedef int32_t RealBits __attribute__((vector_size(4 * FLOATS)));

static inline Reals every_lane(float x) { return x - (Reals){}; }
// x > y ? x : y, and x < y ? x : y, which are instructions that the compiler does not find.
static inline Reals most_of(Reals x, float y) {
#if defined(__AVX512F__)
    return (Reals)_mm512_max_ps((__m512)x, _mm512_set1_ps(y));
#elif defined(__AVX2__)
    return (Reals)_mm256_max_ps((__m256)x, _mm256_set1_ps(y));
#else
    return x > y ? x : every_lane(y);
#endif
}
static inline Reals least_of(Reals x, float y) {
#if defined(__AVX512F__)
    return (Reals)_mm512_min_ps((__m512)x, _mm512_set1_ps(y));
#elif defined(__AVX2__)
    return (Reals)_mm256_min_ps((__m256)x, _mm256_set1_ps(y));
#else
    return x < y ? x : every_lane(y);
#endif
}
static inline Reals absolute(Reals x) { return (Reals)((RealBits)x & 0x7fffffff); }

// |x| <= 2^22 -> integral floats, ties to even, as the last bits of what comes of adding 1.5 * 2^23.
static inline Reals shifted(Reals x) { return x + 12582912.0f; }
static inline Reals integral(Reals shifted) { return shifted - 12582912.0f; }
static inline RealBits whole(Reals shifted) { return (RealBits)shifted - 0x4b400000; }

// Of several vectors, step by step: one alone would wait for itself at every step, and the scheduler is too short to find
// work behind it.
#define EACH _Pragma("GCC unroll 8") for (int i = 0; i < COUNT; ++i)

// exp(x) - 1 for x = bounded - n * ln 2, in place of `bounded`. Coefficients are those of numerics.py, in the same order.
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

static inline Reals exp_rise(Reals bounded, Reals n) {
    exp_rises<1>(&bounded, &n);
    return bounded;
}

// r and a power of two with exp(x) = (r + 1) * power, for x from -87 to 0; below as for -87.
static inline Reals exp_parts(Reals x, Reals* power) {
    const Reals bounded = most_of(x, -87.0f), rounded = shifted(bounded * 1.44269502162933349609375f);
    *power = (Reals)((whole(rounded) + 127) << 23);
    return exp_rise(bounded, integral(rounded));
}

template <int COUNT>
static inline __attribute__((always_inline)) void exp_negatives(Reals* x) {
    Reals rise[COUNT], n[COUNT], power[COUNT];
    EACH rise[i] = most_of(x[i], -87.0f);
    EACH n[i] = shifted(rise[i] * 1.44269502162933349609375f);
    EACH power[i] = (Reals)((whole(n[i]) + 127) << 23);
    EACH n[i] = integral(n[i]);
    exp_rises<COUNT>(rise, n);
    EACH x[i] = x[i] < -87.0f ? every_lane(0.0f) : (rise[i] + 1.0f) * power[i];
}

static inline Reals exp_negative(Reals x) {
    exp_negatives<1>(&x);
    return x;
}

static inline Reals expm1_negative(Reals x) {
    Reals power;
    const Reals rise = exp_parts(x, &power);
    return rise * power + (power - 1.0f);
}

static inline Reals leaky_relu(Reals x, float slope) { return x > 0.0f ? x : most_of(x, -0x1.fffffep127f) * slope; }

static inline Reals hardsigmoid(Reals x) { return least_of(most_of(x + 3.0f, 0.0f), 6.0f) * 0x1.555556p-3f; }

static inline Reals hardswish(Reals x) { return most_of(x, -3.0f) * hardsigmoid(x); }

static inline Reals sigmoid(Reals x) {
    const Reals power = exp_negative(-absolute(x));
    return (x < 0.0f ? power : every_lane(1.0f)) / (power + 1.0f);
}

static inline Reals silu(Reals x) { return most_of(x, -87.0f) * sigmoid(x); }

static inline Reals hyperbolic_tangent(Reals x) {
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
    return most_of(x, -87.0f) * (x < 0.0f ? tail : 1.0f - tail);
}

// numerics.NEAR_TERMS.
static const float near_terms[4][16] __attribute__((aligned(64))) = {
    {0.0f, 0x1.fcee32p-4f, 0x1.e4d814p-3f, 0x1.50d63ap-2f, 0x1.96e5fep-2f, 0x1.c5f78p-2f, 0x1.e2983p-2f, 0x1.f25b98p-2f,
     0x1.fa3738p-2f, 0x1.fdc30cp-2f, 0x1.ff35f2p-2f, 0x1.ffbf1ep-2f, 0x1.ffed0cp-2f, 0x1.fffaf8p-2f, 0x1.fffecap-2f,
     0x1p-1f},
    {0x1.02bacap-3f, 0x1.ec259p-4f, 0x1.a76b84p-4f, 0x1.49886cp-4f, 0x1.cffcccp-5f, 0x1.277bb2p-5f, 0x1.546ff6p-6f,
     0x1.62cdb6p-7f, 0x1.4e7d76p-8f, 0x1.1d3f36p-9f, 0x1.b813bep-11f, 0x1.33131cp-12f, 0x1.83a2bp-14f, 0x1.ba9f8ap-16f,
     0x1.c92a08p-18f, 0x1.2bd7aep-16f},
    {-0x1.4301cp-17f, -0x1.886eb4p-8f, -0x1.51d708p-7f, -0x1.8acdaep-7f, -0x1.73222p-7f, -0x1.27fe5p-7f, -0x1.9a2b4cp-8f,
     -0x1.f4159p-9f, -0x1.0e4062p-9f, -0x1.04341cp-10f, -0x1.bfd6f2p-12f, -0x1.594684p-13f, -0x1.ddd17ep-15f,
     -0x1.291e8cp-16f, -0x1.4c69c6p-18f, 0x1.0c4a62p-14f},
    {-0x1.11c3bp-9f, -0x1.d7414ap-10f, -0x1.0e98acp-10f, -0x1.1b5cfcp-13f, 0x1.2836cp-11f, 0x1.d8ddep-11f, 0x1.d9466cp-11f,
     0x1.72e362p-11f, 0x1.e58cp-12f, 0x1.111a3cp-12f, 0x1.0c0666p-13f, 0x1.cf3096p-15f, 0x1.62815ap-16f, 0x1.e2a76ap-18f,
     0x1.251fc2p-19f, 0x1.3b61b2p-14f},
};

// The number of the piece that the last bits of `place` name.
static inline Reals near_term(int power, RealBits place) {
#if defined(__AVX512F__)
    return (Reals)_mm512_permutexvar_ps((__m512i)place, _mm512_load_ps(near_terms[power]));
#elif defined(__AVX2__)
    const __m256 front = _mm256_permutevar8x32_ps(_mm256_load_ps(near_terms[power]), (__m256i)place);
    const __m256 back = _mm256_permutevar8x32_ps(_mm256_load_ps(near_terms[power] + 8), (__m256i)place);
    return (Reals)_mm256_blendv_ps(front, back, (__m256)(place << 28));
#else
    Reals found;
    for (int l = 0; l < FLOATS; ++l) found[l] = near_terms[power][place[l] & 15];
    return found;
#endif
}

template <int COUNT>
static inline __attribute__((always_inline)) void near_gelus(Reals* x) {
    Reals size[COUNT], rest[COUNT], total[COUNT];
    RealBits place[COUNT];
    EACH x[i] = most_of(x[i], -87.0f);
    EACH size[i] = absolute(x[i]);
    EACH rest[i] = least_of(size[i] * 0x1.9435e6p+1f, 15.0f);
    EACH place[i] = (RealBits)shifted(rest[i]);
    EACH rest[i] = rest[i] - integral((Reals)place[i]);
    EACH total[i] = near_term(3, place[i]) * rest[i] + near_term(2, place[i]);
    EACH total[i] = total[i] * rest[i] + near_term(1, place[i]);
    EACH total[i] = total[i] * rest[i] + near_term(0, place[i]);
    EACH x[i] = x[i] * 0.5f + size[i] * total[i];
}

static inline Reals near_gelu(Reals x) {
    near_gelus<1>(&x);
    return x;
}

static inline Reals gelu_tanh(Reals x) {
    const Reals inner = x * ((x * x) * 0x1.2444f2p-4f + 0x1.988454p0f);
    return most_of(x, -87.0f) * sigmoid(inner);
}
