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

// A value of 16 bits = 255 * level + rest.
enum { STEPS = 255 };
