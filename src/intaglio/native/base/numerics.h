// Rounding and requantization of single values. Each function has the name, the meaning and the bits of the one in
// numerics/rounding.py or numerics/requantization.py. Compile with -ffp-contract=off. Nothing is called from libm, and
// the file is valid C, so that exported programs can include it.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

// Round to an integer, ties to even; NaN stays NaN. With SSE4.1 rintf is one instruction; without it, rintf is a libm
// call. There, adding and subtracting 2^23 rounds every |x| < 2^23, and larger values are integers already.
static inline float round_even(float x) {
#if defined(__SSE4_1__) || defined(__aarch64__)
    return __builtin_rintf(x);
#else
    const float integral = 8388608.0f;
    if (x >= 0.0f) return x < integral ? (x + integral) - integral : x;
    return x > -integral ? (x - integral) + integral : x;
#endif
}

// Quantize a float with scale 1 / inverse: clamp(rne(x * inverse) + zero_point, low, high). NaN gives the zero point.
static inline int32_t quantize(float x, float inverse, int32_t zero_point, int32_t low, int32_t high) {
    float steps = round_even(x * inverse);
    float shifted = (steps == steps ? steps : 0.0f) + (float)zero_point;
    float bottom = (float)low, top = (float)high;
    shifted = shifted < bottom ? bottom : shifted;
    return (int32_t)(shifted > top ? top : shifted);
}

// Dequantize: float32(q - zero_point) * scale.
static inline float dequantize(int32_t q, int32_t zero_point, float scale) {
    return (float)(int32_t)((uint32_t)q - (uint32_t)zero_point) * scale;
}

// Return clamp(rne(steps) + zero_point, low, high), where `steps` is a real value divided by the scale. The clamp to
// +-2^30 keeps the conversion to int32 defined and cannot change the result.
static inline int32_t round_clamp_i32(float steps, int32_t zero_point, int32_t low, int32_t high) {
    const float convertible = 1073741824.0f;
    steps = steps < -convertible ? -convertible : steps;
    steps = steps > convertible ? convertible : steps;
    int32_t quantized = (int32_t)round_even(steps) + zero_point;
    quantized = quantized < low ? low : quantized;
    return quantized > high ? high : quantized;
}

// Requantize an int32 accumulator: clamp(rne(float32(acc) * factor) + zero_point, low, high).
static inline int32_t requantize(int32_t acc, float factor, int32_t zero_point, int32_t low, int32_t high) {
    return round_clamp_i32((float)acc * factor, zero_point, low, high);
}

// Requantize a sum: clamp(rne(float32(a) * factor_a + float32(b) * factor_b) + zero_point, low, high). Both products
// and their sum are rounded to float32; nothing is fused.
static inline int32_t add_requantize(int32_t a, float factor_a, int32_t b, float factor_b, int32_t zero_point,
                                     int32_t low, int32_t high) {
    return round_clamp_i32((float)a * factor_a + (float)b * factor_b, zero_point, low, high);
}

// A 16-bit value is 255 * quantized + remainder: its 8-bit value `quantized` and a remainder in 0..254.
enum { STEPS = 255 };
