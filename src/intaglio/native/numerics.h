// The law of numbers in C++: each function has the name, meaning and bits of its twin in numerics.py.
// Build with -ffp-contract=off. No libm, and valid C, so exported programs can include it.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

// float -> integral float, ties to even. rintf is one instruction from SSE4.1 on and a libm call before: there, adding
// and subtracting 2^23 rounds every |x| < 2^23, and larger values are integral already. NaN stays NaN.
static inline float round_even(float x) {
#if defined(__SSE4_1__) || defined(__aarch64__)
    return __builtin_rintf(x);
#else
    const float integral = 8388608.0f;
    if (x >= 0.0f) return x < integral ? (x + integral) - integral : x;
    return x > -integral ? (x - integral) + integral : x;
#endif
}

// f32 -> i32 in steps of 1 / inverse: clamp(rne(x * inverse) + zero_point, low, high). NaN gives the zero point.
static inline int32_t quantize(float x, float inverse, int32_t zero_point, int32_t low, int32_t high) {
    float steps = round_even(x * inverse);
    float shifted = (steps == steps ? steps : 0.0f) + (float)zero_point;
    float bottom = (float)low, top = (float)high;
    shifted = shifted < bottom ? bottom : shifted;
    return (int32_t)(shifted > top ? top : shifted);
}

// i32 -> f32: float32(q - zero_point) * scale.
static inline float dequantize(int32_t q, int32_t zero_point, float scale) {
    return (float)(int32_t)((uint32_t)q - (uint32_t)zero_point) * scale;
}

// Steps in float -> level. The clamp to +-2^30 keeps the conversion defined and cannot change a level.
static inline int32_t finish(float steps, int32_t zero_point, int32_t low, int32_t high) {
    const float convertible = 1073741824.0f;
    steps = steps < -convertible ? -convertible : steps;
    steps = steps > convertible ? convertible : steps;
    int32_t level = (int32_t)round_even(steps) + zero_point;
    level = level < low ? low : level;
    return level > high ? high : level;
}

// i32 accumulator -> level: clamp(rne(float32(acc) * factor) + zero_point, low, high).
static inline int32_t requantize(int32_t acc, float factor, int32_t zero_point, int32_t low, int32_t high) {
    return finish((float)acc * factor, zero_point, low, high);
}

// clamp(rne(float32(a) * factor_a + float32(b) * factor_b) + zero_point, low, high): three roundings, not fused.
static inline int32_t add_requantize(int32_t a, float factor_a, int32_t b, float factor_b, int32_t zero_point,
                                     int32_t low, int32_t high) {
    return finish((float)a * factor_a + (float)b * factor_b, zero_point, low, high);
}

// r and a power of two with exp(x) = (r + 1) * power, for x from -87 to 0; below as for -87. Coefficients are those of
// numerics.py, in the same order.
static inline float exp_parts(float x, float* power) {
    const float bounded = x > -87.0f ? x : -87.0f;
    const float n = round_even(bounded * 1.44269502162933349609375f);
    const float r = (bounded - n * 0.693359375f) - n * -2.12194441701285541057586669921875e-4f;
    float total = 0x1.6a23cep-10f;
    total = total * r + 0x1.123a2p-7f;
    total = total * r + 0x1.5558f2p-5f;
    total = total * r + 0x1.555492p-3f;
    total = total * r + 0x1.fffffcp-2f;
    const int32_t bits = ((int32_t)n + 127) << 23;
    memcpy(power, &bits, sizeof *power);
    return total * (r * r) + r;
}

// exp(x) for x <= 0, within 1e-7 of it; 0 below -87.
static inline float exp_negative(float x) {
    float power;
    const float rise = exp_parts(x, &power);
    return x < -87.0f ? 0.0f : (rise + 1.0f) * power;
}

// exp(x) - 1 for x <= 0.
static inline float expm1_negative(float x) {
    float power;
    const float rise = exp_parts(x, &power);
    return rise * power + (power - 1.0f);
}

static inline float leaky_relu(float x, float slope) {
    const float largest = 0x1.fffffep127f;
    return x > 0.0f ? x : (x > -largest ? x : -largest) * slope;
}

static inline float hardsigmoid(float x) {
    const float shifted = x + 3.0f, above = shifted > 0.0f ? shifted : 0.0f;
    return (above < 6.0f ? above : 6.0f) * 0x1.555556p-3f;
}

static inline float hardswish(float x) { return (x > -3.0f ? x : -3.0f) * hardsigmoid(x); }

static inline float sigmoid(float x) {
    const float power = exp_negative(-__builtin_fabsf(x));
    return (x < 0.0f ? power : 1.0f) / (power + 1.0f);
}

static inline float silu(float x) { return (x > -87.0f ? x : -87.0f) * sigmoid(x); }

static inline float hyperbolic_tangent(float x) {
    const float fall = expm1_negative(-2.0f * __builtin_fabsf(x));
    return (x < 0.0f ? fall : -fall) / (fall + 2.0f);
}

static inline float gelu(float x) {
    const float near = 1.0f / (__builtin_fabsf(x) * 0x1.da671p-3f + 1.0f), power = exp_negative((x * -0.5f) * x);
    float total = 0x1.0fb844p-1f;
    total = total * near + -0x1.7401c6p-1f;
    total = total * near + 0x1.6be1c6p-1f;
    total = total * near + -0x1.23531cp-3f;
    total = total * near + 0x1.04f20cp-3f;
    const float tail = (total * near) * power;
    return (x > -87.0f ? x : -87.0f) * (x < 0.0f ? tail : 1.0f - tail);
}

static inline float gelu_tanh(float x) {
    const float inner = x * ((x * x) * 0x1.2444f2p-4f + 0x1.988454p0f);
    return (x > -87.0f ? x : -87.0f) * sigmoid(inner);
}
