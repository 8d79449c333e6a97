// Activation functions of float32 results, several vectors at a time.

#include "elementwise/activation.h"

#include "base/functions.h"

// Factor and bounds of results. Functions copy them, because storing bytes may change what a pointer to them reads.
struct Range {
    float inverse, least, most;
    int32_t zero_point;
};

// Quantize COUNT vectors of results. The bounds are integers, so results may be clamped before they are rounded.
template <int COUNT>
static inline __attribute__((always_inline)) void apply_and_quantize(struct Range range, Reals* x, const float* gain,
                                                                     RealBits* words) {
    if (gain) EACH {
            Reals own;
            memcpy(&own, gain + i * FLOATS, sizeof own);
            x[i] = x[i] * own;
        }
    EACH x[i] = at_most(at_least(x[i] * range.inverse, range.least), range.most);
    EACH words[i] = magic_to_i32(add_magic(x[i])) + range.zero_point;
}

// Apply a function to COUNT vectors and quantize. Vectors are loaded one by one, because compilers copy larger arrays
// through memory.
template <class Function, int COUNT>
static inline __attribute__((always_inline)) void quantize_vectors(const struct Activation* a, struct Range range,
                                                                   const float* from, const float* gain,
                                                                   RealBits* words) {
    Reals x[COUNT];
    EACH memcpy(&x[i], from + i * FLOATS, sizeof x[i]);
    Function::template run<COUNT>(a, x);
    apply_and_quantize<COUNT>(range, x, gain, words);
}

// Apply a function to channels of each pixel and quantize: first 64 channels at a time, then 16. The loops are
// separate, because constants then stay in registers.
template <class Function>
static inline __attribute__((always_inline)) void quantize_function(const struct Activation* a, const float* from,
                                                                    int64_t from_pixel, int64_t pixels, uint8_t* to,
                                                                    int64_t to_pixel, int64_t channels) {
    enum { ONE = 16 / FLOATS, FOUR = 64 / FLOATS };
    const struct Limits* q = a->limits;
    const struct Range range = {a->inverse, (float)(q->low - q->zero_point), (float)(q->high - q->zero_point),
                                q->zero_point};
    const float* gain = a->gain;
    const int64_t whole = channels / 64 * 64;
    for (int64_t p = 0; p < pixels; ++p)
        for (int64_t c = 0; c < whole; c += 64) {
            RealBits words[FOUR];
            quantize_vectors<Function, FOUR>(a, range, from + p * from_pixel + c, gain ? gain + c : 0, words);
            for (int i = 0; i < 4; ++i) narrow16(words + i * ONE, to + p * to_pixel + c + 16 * i);
        }
    for (int64_t p = 0; whole < channels && p < pixels; ++p)
        for (int64_t c = whole; c < channels; c += 16) {
            RealBits words[ONE];
            uint8_t quantized[16];
            quantize_vectors<Function, ONE>(a, range, from + p * from_pixel + c, gain ? gain + c : 0, words);
            narrow16(words, quantized);
            memcpy(to + p * to_pixel + c, quantized, c + 16 <= channels ? 16 : (size_t)(channels - c));
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
