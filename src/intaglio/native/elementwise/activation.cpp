// Activation functions of float32 results, several vectors at a time.

#include "elementwise/activation.h"

#include "base/functions.h"

// Quantize COUNT vectors of results. The bounds are integers, so results may be clamped before they are rounded.
template <int COUNT>
static inline __attribute__((always_inline)) void apply_and_quantize(const struct Activation* a, Reals* x,
                                                                     const float* gain, RealBits* words) {
    const struct Limits* q = a->limits;
    const float inverse = a->inverse, least = (float)(q->low - q->zero_point), most = (float)(q->high - q->zero_point);
    if (gain) EACH {
            Reals own;
            memcpy(&own, gain + i * FLOATS, sizeof own);
            x[i] = x[i] * own;
        }
    EACH x[i] = at_most(at_least(x[i] * inverse, least), most);
    EACH words[i] = magic_to_i32(add_magic(x[i])) + q->zero_point;
}

// Apply a function to `channels` channels of each pixel and quantize, 64 channels at a time and then 16.
template <class Function>
static inline __attribute__((always_inline)) void quantize_function(const struct Activation* a, const float* from,
                                                                    int64_t from_pixel, int64_t pixels, uint8_t* to,
                                                                    int64_t to_pixel, int64_t channels) {
    enum { ONE = 16 / FLOATS, FOUR = 64 / FLOATS };
    for (int64_t p = 0; p < pixels; ++p, from += from_pixel, to += to_pixel) {
        int64_t c = 0;
        for (; c + 64 <= channels; c += 64) {
            Reals x[FOUR];
            RealBits words[FOUR];
            memcpy(x, from + c, sizeof x);
            Function::template run<FOUR>(a, x);
            apply_and_quantize<FOUR>(a, x, a->gain ? a->gain + c : 0, words);
            for (int i = 0; i < 4; ++i) narrow16(words + i * ONE, to + c + 16 * i);
        }
        for (; c < channels; c += 16) {
            Reals x[ONE];
            RealBits words[ONE];
            uint8_t quantized[16];
            memcpy(x, from + c, sizeof x);
            Function::template run<ONE>(a, x);
            apply_and_quantize<ONE>(a, x, a->gain ? a->gain + c : 0, words);
            narrow16(words, quantized);
            memcpy(to + c, quantized, c + 16 <= channels ? 16 : (size_t)(channels - c));
        }
    }
}

#define ACTIVATION(name, run_all)                                                                                    \
    struct name##_function {                                                                                         \
        template <int COUNT>                                                                                         \
        static inline __attribute__((always_inline)) void run(const struct Activation* a, Reals* x) {                \
            (void)a;                                                                                                 \
            run_all;                                                                                                 \
        }                                                                                                            \
    };                                                                                                               \
    LIBRARY void name##_quantized(const struct Activation* a, const float* from, int64_t from_pixel, int64_t pixels, \
                                  uint8_t* to, int64_t to_pixel, int64_t channels) {                                 \
        quantize_function<name##_function>(a, from, from_pixel, pixels, to, to_pixel, channels);                     \
    }
ACTIVATION(leaky_relu, EACH x[i] = leaky_relu(x[i], a->slope))
ACTIVATION(hardsigmoid, EACH x[i] = hardsigmoid(x[i]))
ACTIVATION(hardswish, EACH x[i] = hardswish(x[i]))
ACTIVATION(sigmoid, EACH x[i] = sigmoid(x[i]))
ACTIVATION(silu, EACH x[i] = silu(x[i]))
ACTIVATION(tanh, EACH x[i] = tanh_f32(x[i]))
ACTIVATION(gelu, gelu_approx_vectors<COUNT>(x))
ACTIVATION(gelu_tanh, EACH x[i] = gelu_tanh(x[i]))
#undef ACTIVATION
