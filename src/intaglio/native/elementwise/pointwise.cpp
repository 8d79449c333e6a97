// Operators of one quantized tensor, see pointwise.h.

#include "elementwise/pointwise.h"

#include "base/numerics.h"
#include "base/vectors.h"

// Compute (x - zero) * factor + offset with a factor and an offset per channel: batch norm that is not folded.
LIBRARY void affine_u8(const struct Image* in, const struct Image* out, int32_t zero, const float* factor,
                       const float* offset, const struct Limits* q, int thread, int threads) {
    FOR_EACH_ROW(out) {
        const uint8_t* from = at(in, n, y, 0);
        uint8_t* to = at(out, n, y, 0);
        const int64_t count = out->width * out->pixel;
#if defined(VECTORS)
        const struct PackConstants f = pack_constants(q, UNBOUNDED_STEPS);
        FOR_EACH_VECTOR(count, out->pixel) {
            const VectorU8 x = deinterleave(load_u8(from + i, count - i));
            Floats steps[4];
            for (int j = 0; j < 4; ++j) {
                const int64_t c = channel + WIDE / 4 * j;
                steps[j] = (widen_quarter(x, j) - origin(zero)) * load_floats(factor + c) + load_floats(offset + c);
            }
            store_u8(to + i, interleave(round_and_pack(steps, &f)), count - i);
        }
#else
        for (int64_t i = 0; i < count; i += out->pixel)
            for (int64_t c = 0; c < out->pixel; ++c)
                to[i + c] = (uint8_t)round_clamp_i32((float)(from[i + c] - zero) * factor[c] + offset[c], q->zero_point,
                                                     q->low, q->high);
#endif
    }
}

// Compute PReLU: x - zero is multiplied by `rise` if it is not negative, else by the channel's `fall`.
LIBRARY void prelu_u8(const struct Image* in, const struct Image* out, int32_t zero, const float* rise,
                      const float* fall, const struct Limits* q, int thread, int threads) {
    FOR_EACH_ROW(out) {
        const uint8_t* from = at(in, n, y, 0);
        uint8_t* to = at(out, n, y, 0);
        const int64_t count = out->width * out->pixel;
#if defined(VECTORS)
        const struct PackConstants f = pack_constants(q, UNBOUNDED_STEPS);
        FOR_EACH_VECTOR(count, out->pixel) {
            const VectorU8 x = deinterleave(load_u8(from + i, count - i));
            Floats steps[4];
            for (int j = 0; j < 4; ++j) {
                const Floats centred = widen_quarter(x, j) - origin(zero);
                steps[j] = centred * select_by_sign(centred, floats(*rise), load_floats(fall + channel + WIDE / 4 * j));
            }
            store_u8(to + i, interleave(round_and_pack(steps, &f)), count - i);
        }
#else
        for (int64_t i = 0; i < count; i += out->pixel)
            for (int64_t c = 0; c < out->pixel; ++c) {
                const int32_t centred = from[i + c] - zero;
                to[i + c] =
                    (uint8_t)requantize(centred, centred >= 0 ? *rise : fall[c], q->zero_point, q->low, q->high);
            }
#endif
    }
}

// Sum of up to 2^15 quantized values, and sum of their squares.
struct Moments {
    int64_t sum, squares;
};

static inline struct Moments moments(const uint8_t* from, int64_t count) {
    int32_t total = 0, squares = 0;
#if defined(VECTORS)
    Ints sum = {}, square = {};
    for (int64_t i = 0; i < count; i += WIDE) {
        const Words x = (Words)load_u8(from + i, count - i), even = x & 255, odd = x >> 8;
        sum += add_pairs((VectorU8)(even + odd), (VectorU8)(x - x + 1));
        square += add_pairs((VectorU8)even, (VectorU8)even) + add_pairs((VectorU8)odd, (VectorU8)odd);
    }
    for (int l = 0; l < WIDE / 4; ++l) total += sum[l], squares += square[l];
#else
    for (int64_t c = 0; c < count; ++c) total += from[c], squares += from[c] * from[c];
#endif
    const struct Moments m = {total, squares};
    return m;
}

// Normalize each pixel over its channels, see layer_norm of numerics/requantization.py. Sums are exact, so their order
// is free, and the variance does not depend on the zero point.
LIBRARY void layer_norm_u8(const struct Image* in, const struct Image* out, int32_t zero, const float* factor,
                           const float* offset, float eps, const struct Limits* q, int thread, int threads) {
    const int64_t count = in->pixel;
    FOR_EACH_ROW(out) {
        for (int64_t x = 0; x < out->width; ++x) {
            const uint8_t* from = at(in, n, y, x);
            uint8_t* to = at(out, n, y, x);
            const struct Moments m = moments(from, count);
            const float mean = (float)(m.sum - count * zero) / (float)count;
            const float variance = (float)(count * m.squares - m.sum * m.sum) / (float)(count * count);
            const float inverse = 1.0f / __builtin_sqrtf(variance + eps);
#if defined(VECTORS)
            const struct PackConstants f = pack_constants(q, UNBOUNDED_STEPS);
            for (int64_t i = 0; i < count; i += WIDE) {
                const VectorU8 quantized = deinterleave(load_u8(from + i, count - i));
                Floats steps[4];
                for (int j = 0; j < 4; ++j) {
                    const int64_t c = i + WIDE / 4 * j;
                    const Floats normal = (widen_quarter(quantized, j) - origin(zero) - floats(mean)) * floats(inverse);
                    steps[j] = normal * load_floats(factor + c) + load_floats(offset + c);
                }
                store_u8(to + i, interleave(round_and_pack(steps, &f)), count - i);
            }
#else
            for (int64_t c = 0; c < count; ++c)
                to[c] = (uint8_t)round_clamp_i32(((float)(from[c] - zero) - mean) * inverse * factor[c] + offset[c],
                                                 q->zero_point, q->low, q->high);
#endif
        }
    }
}

// Clamp quantized values to the bounds of q.
LIBRARY void clamp_u8(const struct Image* in, const struct Image* out, const struct Limits* q, int thread,
                      int threads) {
    const uint8_t low = (uint8_t)q->low, high = (uint8_t)q->high;
    FOR_EACH_ROW(out) {
        const uint8_t* from = at(in, n, y, 0);
        uint8_t* to = at(out, n, y, 0);
        for (int64_t i = 0; i < out->width * out->pixel; ++i) {
            const uint8_t quantized = from[i] < low ? low : from[i];
            to[i] = quantized > high ? high : quantized;
        }
    }
}
