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

// exp(x) - 1 for x = bounded - n * ln 2. Coefficients are those of numerics.py, in the same order.
static inline Reals exp_rise(Reals bounded, Reals n) {
    const Reals r = (bounded - n * 0.693359375f) - n * -2.12194441701285541057586669921875e-4f;
    Reals total = 0x1.6a23cep-10f * r + 0x1.123a2p-7f;
    total = total * r + 0x1.5558f2p-5f;
    total = total * r + 0x1.555492p-3f;
    total = total * r + 0x1.fffffcp-2f;
    return total * (r * r) + r;
}

// r and a power of two with exp(x) = (r + 1) * power, for x from -87 to 0; below as for -87.
static inline Reals exp_parts(Reals x, Reals* power) {
    const Reals bounded = most_of(x, -87.0f), rounded = shifted(bounded * 1.44269502162933349609375f);
    *power = (Reals)((whole(rounded) + 127) << 23);
    return exp_rise(bounded, integral(rounded));
}

static inline Reals exp_negative(Reals x) {
    Reals power;
    const Reals rise = exp_parts(x, &power);
    return x < -87.0f ? every_lane(0.0f) : (rise + 1.0f) * power;
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

// Of several vectors, step by step: one alone would wait for itself at every step, and the scheduler is too short to find
// work behind it (Zen 5: 3.5 ns a vector where one after the other takes 4.8).
#define EACH _Pragma("GCC unroll 8") for (int i = 0; i < COUNT; ++i)
template <int COUNT>
static inline __attribute__((always_inline)) void near_gelus(Reals* x) {
    Reals bounded[COUNT], s[COUNT], square[COUNT], even[COUNT], odd[COUNT];
    EACH bounded[i] = least_of(most_of(x[i], -4.75f), 4.75f);
    EACH s[i] = bounded[i] * bounded[i];
    EACH s[i] = s[i] * 0x1.6b149p-4f - 1.0f;
    EACH square[i] = s[i] * s[i];
    EACH even[i] = 0x1.82ec94p-10f * square[i] + 0x1.35e6e6p-8f;
    EACH odd[i] = -0x1.06d144p-8f * square[i] + -0x1.bbfdcep-8f;
    EACH even[i] = even[i] * square[i] + 0x1.bb1d8p-7f;
    EACH odd[i] = odd[i] * square[i] + -0x1.661b76p-6f;
    EACH even[i] = even[i] * square[i] + 0x1.f1fe6p-6f;
    EACH odd[i] = odd[i] * square[i] + -0x1.4c0534p-5f;
    EACH even[i] = even[i] * square[i] + 0x1.b416b8p-5f;
    EACH odd[i] = odd[i] * square[i] + -0x1.2dbfe6p-4f;
    EACH even[i] = even[i] * square[i] + 0x1.30a2fap-3f;
    EACH odd[i] = odd[i] * s[i] + even[i];
    EACH odd[i] = bounded[i] * odd[i] + 0.5f;
    EACH x[i] = most_of(x[i], -87.0f) * odd[i];
}

static inline Reals near_gelu(Reals x) {
    near_gelus<1>(&x);
    return x;
}

static inline Reals gelu_tanh(Reals x) {
    const Reals inner = x * ((x * x) * 0x1.2444f2p-4f + 0x1.988454p0f);
    return most_of(x, -87.0f) * sigmoid(inner);
}
