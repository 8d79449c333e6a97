// Functions of activations, a vector at a time: each has the name, meaning and bits of its twin in numerics.py.
// Build with -ffp-contract=off. No libm.
#pragma once

#include <stdint.h>

#if defined(__AVX512F__)
enum { FLOATS = 16 };
#elif defined(__AVX2__)
enum { FLOATS = 8 };
#else
enum { FLOATS = 4 };
#endif
typedef float Floats __attribute__((vector_size(4 * FLOATS)));
typedef int32_t Words __attribute__((vector_size(4 * FLOATS)));

static inline Floats every_lane(float x) { return x - (Floats){}; }
static inline Floats most_of(Floats x, float y) { return x > y ? x : every_lane(y); }
static inline Floats least_of(Floats x, float y) { return x < y ? x : every_lane(y); }
static inline Floats absolute(Floats x) { return (Floats)((Words)x & 0x7fffffff); }

// |x| <= 2^22 -> integral floats, ties to even, as the last bits of what comes of adding 1.5 * 2^23.
static inline Floats shifted(Floats x) { return x + 12582912.0f; }
static inline Floats integral(Floats shifted) { return shifted - 12582912.0f; }
static inline Words whole(Floats shifted) { return (Words)shifted - 0x4b400000; }

// r and a power of two with exp(x) = (r + 1) * power, for x from -87 to 0; below as for -87. Coefficients are those of
// numerics.py, in the same order.
static inline Floats exp_parts(Floats x, Floats* power) {
    const Floats bounded = most_of(x, -87.0f), rounded = shifted(bounded * 1.44269502162933349609375f);
    const Floats n = integral(rounded), r = (bounded - n * 0.693359375f) - n * -2.12194441701285541057586669921875e-4f;
    Floats total = 0x1.6a23cep-10f * r + 0x1.123a2p-7f;
    total = total * r + 0x1.5558f2p-5f;
    total = total * r + 0x1.555492p-3f;
    total = total * r + 0x1.fffffcp-2f;
    *power = (Floats)((whole(rounded) + 127) << 23);
    return total * (r * r) + r;
}

static inline Floats exp_negative(Floats x) {
    Floats power;
    const Floats rise = exp_parts(x, &power);
    return x < -87.0f ? every_lane(0.0f) : (rise + 1.0f) * power;
}

static inline Floats expm1_negative(Floats x) {
    Floats power;
    const Floats rise = exp_parts(x, &power);
    return rise * power + (power - 1.0f);
}

static inline Floats leaky_relu(Floats x, float slope) { return x > 0.0f ? x : most_of(x, -0x1.fffffep127f) * slope; }

static inline Floats hardsigmoid(Floats x) { return least_of(most_of(x + 3.0f, 0.0f), 6.0f) * 0x1.555556p-3f; }

static inline Floats hardswish(Floats x) { return most_of(x, -3.0f) * hardsigmoid(x); }

static inline Floats sigmoid(Floats x) {
    const Floats power = exp_negative(-absolute(x));
    return (x < 0.0f ? power : every_lane(1.0f)) / (power + 1.0f);
}

static inline Floats silu(Floats x) { return most_of(x, -87.0f) * sigmoid(x); }

static inline Floats hyperbolic_tangent(Floats x) {
    const Floats fall = expm1_negative(-2.0f * absolute(x));
    return (x < 0.0f ? fall : -fall) / (fall + 2.0f);
}

static inline Floats gelu(Floats x) {
    const Floats near = 1.0f / (absolute(x) * 0x1.da671p-3f + 1.0f), power = exp_negative((x * -0.5f) * x);
    Floats total = 0x1.0fb844p-1f * near + -0x1.7401c6p-1f;
    total = total * near + 0x1.6be1c6p-1f;
    total = total * near + -0x1.23531cp-3f;
    total = total * near + 0x1.04f20cp-3f;
    const Floats tail = (total * near) * power;
    return most_of(x, -87.0f) * (x < 0.0f ? tail : 1.0f - tail);
}

static inline Floats gelu_tanh(Floats x) {
    const Floats inner = x * ((x * x) * 0x1.2444f2p-4f + 0x1.988454p0f);
    return most_of(x, -87.0f) * sigmoid(inner);
}
