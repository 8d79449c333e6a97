// Sums and products of two quantized tensors, see pair.h.

#include "elementwise/pair.h"

#include "base/numerics.h"
#include "base/vectors.h"

// Add lines of `count` values, with one factor per operand.
static inline void add_line(const struct Pair* p, const uint8_t* a, const uint8_t* b, uint8_t* to, int64_t count) {
    const struct Limits* q = p->limits;
#if defined(VECTORS)
    const struct PackConstants f = pack_constants(q, 255 * (magnitude(p->factor_a[0]) + magnitude(p->factor_b[0])));
    const Floats origin_a = origin(p->zero_a), origin_b = origin(q->other_zero_point);
    const Floats factor_a = floats(p->factor_a[0]), factor_b = floats(p->factor_b[0]);
    for (int64_t i = 0; i < count; i += WIDE) {
        const VectorU8 left = load_u8(a + i, count - i), right = load_u8(b + i, count - i);
        Floats steps[4];
        for (int j = 0; j < 4; ++j)
            steps[j] = (widen_quarter(left, j) - origin_a) * factor_a + (widen_quarter(right, j) - origin_b) * factor_b;
        store_u8(to + i, round_and_pack(steps, &f), count - i);
    }
#else
    for (int64_t i = 0; i < count; ++i)
        to[i] = (uint8_t)add_requantize(a[i] - p->zero_a, p->factor_a[0], b[i] - q->other_zero_point, p->factor_b[0],
                                        q->zero_point, q->low, q->high);
#endif
}

// Add lines of whole pixels, where the second operand has a factor per channel.
static inline void add_scaled_line(const struct Pair* p, const uint8_t* a, const uint8_t* b, uint8_t* to,
                                   int64_t count) {
    const struct Limits* q = p->limits;
#if defined(VECTORS)
    const struct PackConstants f = pack_constants(q, UNBOUNDED_STEPS);
    const Floats origin_a = origin(p->zero_a), origin_b = origin(q->other_zero_point),
                 factor_a = floats(p->factor_a[0]);
    FOR_EACH_VECTOR(count, p->out.pixel) {
        const VectorU8 left = deinterleave(load_u8(a + i, count - i)), right = deinterleave(load_u8(b + i, count - i));
        Floats steps[4];
        for (int j = 0; j < 4; ++j) {
            const Floats factor_b = load_floats(p->factor_b + channel + WIDE / 4 * j);
            steps[j] = (widen_quarter(left, j) - origin_a) * factor_a + (widen_quarter(right, j) - origin_b) * factor_b;
        }
        store_u8(to + i, interleave(round_and_pack(steps, &f)), count - i);
    }
#else
    for (int64_t i = 0; i < count; i += p->out.pixel)
        for (int64_t c = 0; c < p->out.pixel; ++c)
            to[i + c] = (uint8_t)add_requantize(a[i + c] - p->zero_a, p->factor_a[0], b[i + c] - q->other_zero_point,
                                                p->factor_b[c], q->zero_point, q->low, q->high);
#endif
}

// Multiply lines of `count` values. Products of values minus their zero points are below 2^17, so float32 is exact.
static inline void mul_line(const struct Pair* p, const uint8_t* a, const uint8_t* b, uint8_t* to, int64_t count) {
    const struct Limits* q = p->limits;
#if defined(VECTORS)
    const struct PackConstants f = pack_constants(q, 255 * 255 * magnitude(p->factor_a[0]));
    const Floats origin_a = origin(p->zero_a), origin_b = origin(q->other_zero_point), factor = floats(p->factor_a[0]);
    for (int64_t i = 0; i < count; i += WIDE) {
        const VectorU8 left = load_u8(a + i, count - i), right = load_u8(b + i, count - i);
        Floats steps[4];
        for (int j = 0; j < 4; ++j)
            steps[j] = (widen_quarter(left, j) - origin_a) * (widen_quarter(right, j) - origin_b) * factor;
        store_u8(to + i, round_and_pack(steps, &f), count - i);
    }
#else
    for (int64_t i = 0; i < count; ++i)
        to[i] = (uint8_t)requantize((a[i] - p->zero_a) * (b[i] - q->other_zero_point), p->factor_a[0], q->zero_point,
                                    q->low, q->high);
#endif
}

// The operand that has one pixel per image, by channel: values minus their zero point, times their factor in sums.
// `zero` is the zero point of the other operand. `factor` is that of the other operand in sums, and that of the result
// in products.
enum { TERMS = 4096 };

struct Terms {
    int64_t channels;
    int32_t zero;
    float factor, term[TERMS + WIDE];
};

#if defined(VECTORS)
// Return whether the number of channels is a multiple of 16. Vectors then begin at a multiple of 16 channels, and
// `deinterleave` is not needed if the terms of quarter j of all vectors are stored together.
static inline int in_sixteens(const struct Terms* t) { return t->channels % 16 == 0; }

// Compute the terms of an image from its pixel in this operand.
static inline void fill_terms(struct Terms* t, const uint8_t* from, int32_t zero, float factor) {
    if (!in_sixteens(t)) {
        for (int64_t c = 0; c < t->channels; ++c) t->term[c] = (float)(from[c] - zero) * factor;
        for (int64_t c = 0; c < WIDE - 1; ++c) t->term[t->channels + c] = t->term[c];
        return;
    }
    const int64_t quarter = t->channels / 4, stride = quarter + WIDE / 4;
    for (int64_t c = 0; c < t->channels; c += WIDE) {
        const VectorU8 x = load_u8(from + c, t->channels - c);
        for (int j = 0; j < 4; ++j) {
            const Floats term = (widen_quarter(x, j) - origin(zero)) * floats(factor);
            memcpy(t->term + j * stride + c / 4, &term, sizeof term);
        }
    }
    for (int j = 0; j < 4; ++j)
        for (int64_t c = 0; c < WIDE / 4; ++c) t->term[j * stride + quarter + c] = t->term[j * stride + c];
}

// Add (`sum`) or multiply `count` values and the terms of their channels; `sixteens` is that of in_sixteens.
static inline __attribute__((always_inline)) void term_vectors(const struct Terms* t, const uint8_t* from, uint8_t* to,
                                                               int64_t count, const struct PackConstants* f, int sum,
                                                               int sixteens) {
    const Floats zero = origin(t->zero), factor = floats(t->factor);
    const int64_t stride = sixteens ? t->channels / 4 + WIDE / 4 : WIDE / 4;
    FOR_EACH_VECTOR(count, t->channels) {
        const VectorU8 loaded = load_u8(from + i, count - i), x = sixteens ? loaded : deinterleave(loaded);
        const float* terms = t->term + (sixteens ? channel / 4 : channel);
        Floats steps[4];
        for (int j = 0; j < 4; ++j) {
            const Floats real = widen_quarter(x, j) - zero, term = load_floats(terms + stride * j);
            steps[j] = sum ? real * factor + term : real * term * factor;
        }
        const VectorU8 packed = round_and_pack(steps, f);
        store_u8(to + i, sixteens ? packed : interleave(packed), count - i);
    }
}
#else
// Compute the terms of an image from its pixel in this operand.
static inline void fill_terms(struct Terms* t, const uint8_t* from, int32_t zero, float factor) {
    for (int64_t c = 0; c < t->channels; ++c) t->term[c] = (float)(from[c] - zero) * factor;
}
#endif

// Add the terms of their channels to `count` values, and requantize.
static inline void add_terms(const struct Terms* t, const uint8_t* from, uint8_t* to, int64_t count,
                             const struct Limits* q) {
#if defined(VECTORS)
    const struct PackConstants f = pack_constants(q, UNBOUNDED_STEPS);
    if (in_sixteens(t))
        term_vectors(t, from, to, count, &f, 1, 1);
    else
        term_vectors(t, from, to, count, &f, 1, 0);
#else
    for (int64_t i = 0; i < count; i += t->channels)
        for (int64_t c = 0; c < t->channels; ++c)
            to[i + c] = (uint8_t)round_clamp_i32((float)(from[i + c] - t->zero) * t->factor + t->term[c], q->zero_point,
                                                 q->low, q->high);
#endif
}

// Multiply `count` values by the terms of their channels, and requantize.
static inline void mul_terms(const struct Terms* t, const uint8_t* from, uint8_t* to, int64_t count,
                             const struct Limits* q) {
#if defined(VECTORS)
    const struct PackConstants f = pack_constants(q, 255 * 255 * magnitude(t->factor));
    if (in_sixteens(t))
        term_vectors(t, from, to, count, &f, 0, 1);
    else
        term_vectors(t, from, to, count, &f, 0, 0);
#else
    for (int64_t i = 0; i < count; i += t->channels)
        for (int64_t c = 0; c < t->channels; ++c)
            to[i + c] = (uint8_t)round_clamp_i32((float)(from[i + c] - t->zero) * t->term[c] * t->factor, q->zero_point,
                                                 q->low, q->high);
#endif
}

// Compute a pair in which operand a (`one_a`) or b has one pixel per image, up to TERMS channels at a time.
static inline void pair_with_pixel(const struct Pair* p, int sum, int one_a, int thread, int threads) {
    const struct Image *one = one_a ? &p->a : &p->b, *other = one_a ? &p->b : &p->a;
    const int32_t zero_b = p->limits->other_zero_point, zero_one = one_a ? p->zero_a : zero_b;
    const float factor_one = !sum ? 1.0f : one_a ? p->factor_a[0] : p->factor_b[0];
    struct Terms t;
    t.zero = one_a ? zero_b : p->zero_a;
    t.factor = sum && one_a ? p->factor_b[0] : p->factor_a[0];
    for (int64_t c = 0; c < p->out.pixel; c += t.channels) {
        int64_t known = -1;
        t.channels = at_most(TERMS, p->out.pixel - c);
        const int64_t lines = t.channels == p->out.pixel ? 1 : p->out.width, count = p->out.width / lines * t.channels;
        FOR_EACH_ROW(&p->out) {
            if (n != known) fill_terms(&t, at(one, n, 0, 0) + c, zero_one, factor_one);
            known = n;
            for (int64_t x = 0; x < lines; ++x)
                (sum ? add_terms : mul_terms)(&t, at(other, n, y, x) + c, at(&p->out, n, y, x) + c, count, p->limits);
        }
    }
}

// Multiply `count` pixels from number `first` on by the one pixel of their image, and store them densely. Pixels are
// counted through all images.
LIBRARY void weigh_pixels(const struct Pair* p, int64_t first, int64_t count, uint8_t* to) {
    const int one_a = p->a.height * p->a.width == 1;
    const struct Image *one = one_a ? &p->a : &p->b, *other = one_a ? &p->b : &p->a;
    const int32_t zero_b = p->limits->other_zero_point;
    const int64_t pixels = other->height * other->width;
    struct Terms t;
    t.channels = other->pixel, t.zero = one_a ? zero_b : p->zero_a, t.factor = p->factor_a[0];
    for (int64_t some; count; first += some, count -= some, to += some * t.channels) {
        const int64_t n = first / pixels;
        some = at_most(count, (n + 1) * pixels - first);
        fill_terms(&t, at(one, n, 0, 0), one_a ? p->zero_a : zero_b, 1.0f);
        mul_terms(&t, other->base + first * t.channels, to, some * t.channels, p->limits);
    }
}

LIBRARY void add_or_mul_u8(const struct Pair* p, int sum, int thread, int threads) {
    const int one_a = p->a.height * p->a.width == 1, one_b = p->b.height * p->b.width == 1;
    if (one_a != one_b) {
        pair_with_pixel(p, sum, one_a, thread, threads);
        return;
    }
    FOR_EACH_ROW(&p->out)
    (!sum ? mul_line
     : p->each
         ? add_scaled_line
         : add_line)(p, at(&p->a, n, y, 0), at(&p->b, n, y, 0), at(&p->out, n, y, 0), p->out.width * p->out.pixel);
}
