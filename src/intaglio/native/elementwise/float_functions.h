// Functions of one float32 element, a SIMD vector at a time, with the bits of numerics/float_math.py. Compile with
// -ffp-contract=off; nothing is called from libm.
#pragma once

#include "base/functions.h"
#include "base/intrinsics.h"
#include "base/numerics.h"

typedef int64_t Longs __attribute__((vector_size(8 * FLOATS)));
typedef double Doubles __attribute__((vector_size(8 * FLOATS)));

static inline Reals keep_nan(Reals x, Reals value) { return x == x ? value : x; }  // NaN if x is NaN

// Return the larger value, or NaN if either is NaN; the instruction alone returns b if a is NaN.
static inline Reals larger(Reals a, Reals b) {
#if defined(__AVX512F__)
    return (Reals)_mm512_mask_max_ps((__m512)a, _mm512_cmp_ps_mask((__m512)a, (__m512)a, _CMP_ORD_Q), (__m512)a,
                                     (__m512)b);
#else
    return ((a > b) | (a != a)) ? a : b;
#endif
}
// Return the smaller value, or NaN if either is NaN.
static inline Reals smaller(Reals a, Reals b) {
#if defined(__AVX512F__)
    return (Reals)_mm512_mask_min_ps((__m512)a, _mm512_cmp_ps_mask((__m512)a, (__m512)a, _CMP_ORD_Q), (__m512)a,
                                     (__m512)b);
#else
    return ((a < b) | (a != a)) ? a : b;
#endif
}

// Return 1 where a comparison holds, else 0.
static inline Reals ones(RealBits truth) { return (Reals)(truth & (RealBits)all_lanes(1.0f)); }

static inline Reals clamp(Reals x, float low, float high) {
    const Reals raised = x < low ? all_lanes(low) : x;
    return raised > high ? all_lanes(high) : raised;
}

// Return the square root.
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

// Round to an integer, ties to even, and keep the sign of zero.
static inline Reals nearest(Reals x) {
#if defined(__AVX512F__)
    return (Reals)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
    return (Reals)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    Reals rounded;
    for (int l = 0; l < FLOATS; ++l) rounded[l] = round_even(x[l]);
    return (Reals)((RealBits)absolute(rounded) | ((RealBits)x & (int32_t)0x80000000));  // restores signs of zero
#endif
}

// Round to the largest integer that is not above x, and keep the sign of zero.
static inline Reals rounded_down(Reals x) {
#if defined(__AVX512F__)
    return (Reals)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
    return (Reals)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
    const Reals near = nearest(x);
    return near > x ? near - 1.0f : near;
#endif
}

// Return -1, 0 or 1; 0 for NaN.
static inline Reals sign_of(Reals x) { return ones(x > 0.0f) - ones(x < 0.0f); }

// Return floats without their fraction, as torch casts them: values that int64 cannot hold become the smallest int64.
static inline Longs whole_numbers(Reals x) {
    const RealBits fits = (x >= -0x1p63f) & (x < 0x1p63f);
    const Longs whole = __builtin_convertvector(fits ? x : all_lanes(0.0f), Longs);
    return __builtin_convertvector(fits, Longs) ? whole : (Longs){} + INT64_MIN;
}

static inline Longs larger_integer(Longs a, Longs b) { return a > b ? a : b; }
static inline Longs smaller_integer(Longs a, Longs b) { return a < b ? a : b; }
static inline Longs magnitude(Longs a) { return a < 0 ? -a : a; }
static inline Longs sign_of_integer(Longs a) { return (a < 0) - (a > 0); }

// Return quotients that are rounded down; 0 where the divisor is 0. The smallest integer divided by -1 wraps around.
static inline Longs divided_down(Longs a, Longs b) {
    Longs found = {};
    for (size_t i = 0; i < sizeof(Longs) / sizeof(int64_t); ++i) {
        const int64_t x = a[i], y = b[i];
        if (y == -1)
            found[i] = (int64_t)(0 - (uint64_t)x);
        else if (y)
            found[i] = x / y - (x % y && (x < 0) != (y < 0));
    }
    return found;
}

static inline Reals exponential(Reals x) {
    const Reals bounded = at_most(at_least(x, -87.0f), 89.0f),
                rounded = add_magic(bounded * 1.44269502162933349609375f);
    const RealBits n = magic_to_i32(rounded);
    const Reals power = (Reals)(((n < 127 ? n : (RealBits){} + 127) + 127) << 23);
    const Reals twice = n > 127 ? all_lanes(2.0f) : all_lanes(1.0f);
    const Reals found = ((exp_rise(bounded, magic_to_f32(rounded)) + 1.0f) * power) * twice;
    return keep_nan(x, x < -87.0f ? all_lanes(0.0f) : found);
}

static inline Reals logarithm(Reals x) {
    const RealBits small = x < 0x1p-126f;
    const Reals usual = x > 0.0f ? x : all_lanes(1.0f), scaled = small ? usual * 0x1p23f : usual;
    const RealBits bits = (RealBits)scaled, n = (bits - 0x3f3504f3) >> 23;
    const Reals rise = (Reals)(bits - (n << 23)) - 1.0f, s = rise / (rise + 2.0f), square = s * s;
    Reals total = square * 0x1.c71c72p-3f + 0x1.24924ap-2f;
    total = total * square + 0x1.99999ap-2f;
    total = total * square + 0x1.555556p-1f;
    const Reals exponent = __builtin_convertvector(n - (small & 23), Reals);
    Reals found = ((total * (square * s) + exponent * -2.12194441701285541057586669921875e-4f) + (s + s)) +
                  exponent * 0.693359375f;
    found = x == 0.0f ? all_lanes(-__builtin_inff()) : found;
    found = x == __builtin_inff() ? x : found;
    return keep_nan(x, x < 0.0f ? all_lanes(__builtin_nanf("")) : found);
}

// Return sin(x + QUARTERS * pi / 2): a multiple of pi / 2 is subtracted in float64, the rest is a polynomial.
template <int QUARTERS>
static inline Reals circular(Reals x) {
    const Reals size = absolute(x);
    const Doubles wide = __builtin_convertvector(size < 0x1p40f ? x : all_lanes(0.0f), Doubles);
    const double magic = 0x1.8p52;  // a float64 of this size has no fraction, and its lowest bits are the integer
    const Doubles rounded = wide * 0x1.45f306dc9c883p-1 + magic, n = rounded - magic;
    const Reals r = __builtin_convertvector((wide - n * 0x1.921fb544p+0) - n * 0x1.0b4611a626331p-34, Reals);
    const RealBits turn = __builtin_convertvector((Longs)rounded, RealBits) + QUARTERS;
    const Reals square = r * r;
    Reals odd = square * 0x1.71de3ap-19f + -0x1.a01a02p-13f;
    odd = odd * square + 0x1.111112p-7f;
    odd = odd * square + -0x1.555556p-3f;
    Reals even = square * -0x1.27e4fcp-22f + 0x1.a01a02p-16f;
    even = even * square + -0x1.6c16c2p-10f;
    even = even * square + 0x1.555556p-5f;
    even = even * square + -0.5f;
    Reals found = (turn & 1) != 0 ? even * square + 1.0f : (r * square) * odd + r;
    found = (turn & 2) != 0 ? -found : found;
    return keep_nan(x, size == __builtin_inff() ? all_lanes(__builtin_nanf("")) : found);
}
