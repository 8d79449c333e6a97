// Per-token quantization of one row, bit for bit quantize_rows of numerics/row_quantization.py.

#pragma once

#include <string.h>

#include "base/functions.h"

enum { MIN_ROW_ABSMAX = 0x0d800000, INFINITE = 0x7f800000, NOT_A_NUMBER = 0x7fc00000 };  // bits of 2^-100 and others

static inline float float_of(int32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Return the bits of the largest magnitude of a row, or `most` if that is larger. The order of magnitudes is that of
// their bits; NaN is larger than all others.
static inline int32_t peak_bits(const float* from, int64_t stride, int64_t count, int32_t most) {
    int64_t i = 0;
    if (stride == 1 && count >= FLOATS) {
        RealBits lanes = most + (RealBits){};
        for (; i + FLOATS <= count; i += FLOATS) {
            RealBits x;
            memcpy(&x, from + i, sizeof x);
            x &= 0x7fffffff;
            lanes = x > lanes ? x : lanes;
        }
        for (int l = 0; l < FLOATS; ++l) most = lanes[l] > most ? lanes[l] : most;
    }
    for (; i < count; ++i) {
        int32_t x;
        memcpy(&x, from + i * stride, sizeof x);
        x &= 0x7fffffff;
        most = x > most ? x : most;
    }
    return most;
}

// Quantize 16 floats with scale 1 / inverse and zero point 128.
static inline void quantize_16(const float* from, float inverse, uint8_t* to) {
    RealBits words[16 / FLOATS];
    for (int j = 0; j < 16 / FLOATS; ++j) {
        Reals x;
        memcpy(&x, from + j * FLOATS, sizeof x);
        words[j] = magic_to_i32(add_magic(at_most(at_least(x * inverse, -127.0f), 127.0f))) + 128;
    }
    narrow16(words, to);
}

// Quantize one row and return its scale. `bits` are those of its largest magnitude; if that is not finite, the scale is
// NaN and all quantized values are 128.
static inline float quantize_row(const float* from, int64_t stride, int64_t count, int32_t bits, uint8_t* to) {
    if (bits >= INFINITE) {
        memset(to, 128, (size_t)count);
        return float_of(NOT_A_NUMBER);
    }
    const float peak = float_of(bits), inverse = 127.0f / peak;
    int64_t i = 0;
    for (; stride == 1 && i + 16 <= count; i += 16) quantize_16(from + i, inverse, to + i);
    while (i < count) {
        float some[16] = {0};
        uint8_t quantized[16];
        const int64_t left = count - i < 16 ? count - i : 16;
        for (int64_t l = 0; l < left; ++l) some[l] = from[(i + l) * stride];
        quantize_16(some, inverse, quantized);
        memcpy(to + i, quantized, (size_t)left);
        i += left;
    }
    return peak / 127.0f;
}
