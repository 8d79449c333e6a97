// Conversion between the caller's tensors and quantized images, see border.h.

#include "elementwise/border.h"

#include "base/clipping.h"
#include "base/intrinsics.h"
#include "base/numerics.h"

enum { INTERLEAVED_PIXELS = 64 };

static inline struct ClipBounds bounds_of(const struct Affine* q) {
    return clip_bounds(q->inverse, q->offset, q->zero_point, q->low, q->high);
}

#if defined(__AVX2__)
// By number of channels: the order of bytes that packs four pixels, one dword each, at the start of 16 bytes. The same
// numbers are the order of dwords that then removes the gaps between groups of four pixels.
static const uint8_t pixel_order[4][16] = {{0, 4, 8, 12},
                                           {0, 1, 4, 5, 8, 9, 12, 13},
                                           {0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14},
                                           {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};
#endif

#if defined(__AVX512BW__) && defined(__AVX512VL__)
typedef __m512 Plane;
typedef __m512i Dwords;
enum { PLANE = 16 };  // floats per vector

static inline Plane plane_of(float x) { return _mm512_set1_ps(x); }
static inline Dwords dwords_of(int32_t x) { return _mm512_set1_epi32(x); }
static inline Dwords add_dwords(Dwords a, Dwords b, int64_t channel) {
    return _mm512_add_epi32(a, _mm512_slli_epi32(b, (unsigned)(8 * channel)));
}
static inline Dwords load_dwords(const uint8_t* from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
}

// Round to integers within bounds; NaN gives 0.
static inline Dwords bounded_steps(Plane steps, Plane least, Plane most) {
    const __mmask16 number = _mm512_cmp_ps_mask(steps, steps, _CMP_ORD_Q);
    return _mm512_cvtps_epi32(_mm512_maskz_min_ps(number, _mm512_max_ps(steps, least), most));
}

static inline Plane steps_at(const float* from, Plane inverse, Plane offset) {
    return _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(from), inverse), offset);
}

// Add 1 to the counts of lanes that are clipped, which are few.
static inline Dwords count_lanes(Dwords counts, Plane steps, Plane least, Plane most, Plane masked) {
    const __mmask16 below = _mm512_cmp_ps_mask(steps, least, _CMP_NGE_UQ);
    const __mmask16 above = _mm512_cmp_ps_mask(steps, most, _CMP_NLE_UQ);
    if (__builtin_expect(_kortestz_mask16_u8(below, above), 1)) return counts;
    const __mmask16 clipped = _mm512_mask_cmp_ps_mask(_mm512_kor(below, above), steps, masked, _CMP_NLE_UQ);
    return _mm512_mask_add_epi32(counts, clipped, counts, _mm512_set1_epi32(1));
}
static inline int64_t sum_of(Dwords counts) {
    return _mm512_test_epi32_mask(counts, counts) ? _mm512_reduce_add_epi32(counts) : 0;
}

// Store pixels of `channels` bytes, which are the low bytes of the dwords.
static inline void store_pixels(uint8_t* to, Dwords dwords, int64_t channels) {
    const __m128i order = _mm_loadu_si128((const __m128i*)pixel_order[channels - 1]);
    const __m512i all = _mm512_permutexvar_epi32(_mm512_cvtepu8_epi32(order),
                                                 _mm512_shuffle_epi8(dwords, _mm512_broadcast_i32x4(order)));
    _mm_storeu_si128((__m128i*)to, _mm512_castsi512_si128(all));
    if (channels > 1) _mm_storeu_si128((__m128i*)(to + 16), _mm512_extracti32x4_epi32(all, 1));
    if (channels > 2) _mm_storeu_si128((__m128i*)(to + 32), _mm512_extracti32x4_epi32(all, 2));
    if (channels > 3) _mm_storeu_si128((__m128i*)(to + 48), _mm512_extracti32x4_epi32(all, 3));
}
#elif defined(__AVX2__)
typedef __m256 Plane;
typedef __m256i Dwords;
enum { PLANE = 8 };  // floats per vector

static inline Plane plane_of(float x) { return _mm256_set1_ps(x); }
static inline Dwords dwords_of(int32_t x) { return _mm256_set1_epi32(x); }
static inline Dwords add_dwords(Dwords a, Dwords b, int64_t channel) {
    return _mm256_add_epi32(a, _mm256_slli_epi32(b, (int)(8 * channel)));
}
static inline Dwords load_dwords(const uint8_t* from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
}

// Round to integers within bounds; NaN gives 0.
static inline Dwords bounded_steps(Plane steps, Plane least, Plane most) {
    const __m256 number = _mm256_cmp_ps(steps, steps, _CMP_ORD_Q);
    return _mm256_cvtps_epi32(_mm256_and_ps(number, _mm256_min_ps(_mm256_max_ps(steps, least), most)));
}

static inline Plane steps_at(const float* from, Plane inverse, Plane offset) {
    return _mm256_add_ps(_mm256_mul_ps(_mm256_loadu_ps(from), inverse), offset);
}

// Add 1 to the counts of lanes that are clipped.
static inline Dwords count_lanes(Dwords counts, Plane steps, Plane least, Plane most, Plane masked) {
    const __m256 range = _mm256_and_ps(_mm256_cmp_ps(steps, least, _CMP_GE_OQ), _mm256_cmp_ps(steps, most, _CMP_LE_OQ));
    const __m256 kept = _mm256_or_ps(range, _mm256_cmp_ps(steps, masked, _CMP_LE_OQ));
    return _mm256_add_epi32(counts, _mm256_add_epi32(_mm256_castps_si256(kept), _mm256_set1_epi32(1)));
}
static inline int64_t sum_of(Dwords counts) {
    int32_t lanes[8];
    int64_t sum = 0;
    if (_mm256_testz_si256(counts, counts)) return 0;
    _mm256_storeu_si256((__m256i*)lanes, counts);
    for (int i = 0; i < 8; ++i) sum += lanes[i];
    return sum;
}

// Store pixels of `channels` bytes, which are the low bytes of the dwords.
static inline void store_pixels(uint8_t* to, Dwords dwords, int64_t channels) {
    const __m128i order = _mm_loadu_si128((const __m128i*)pixel_order[channels - 1]);
    const __m256i all = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(dwords, _mm256_broadcastsi128_si256(order)),
                                                    _mm256_cvtepu8_epi32(order));
    const __m128i low = _mm256_castsi256_si128(all), high = _mm256_extracti128_si256(all, 1);
    if (channels == 1) _mm_storel_epi64((__m128i*)to, low);
    if (channels > 1) _mm_storeu_si128((__m128i*)to, low);
    if (channels == 3) _mm_storel_epi64((__m128i*)(to + 16), high);
    if (channels > 3) _mm_storeu_si128((__m128i*)(to + 16), high);
}
#endif

#if defined(__AVX2__)
enum { PLANES = 4 };  // interleaved at once, at most

// Constants that quantize a channel. The bounds are integers, so values may be clamped before they are rounded.
struct Steps {
    Plane inverse, offset, least, most, clip_least, clip_most, clip_masked;
};

static inline struct Steps steps_of(const struct Affine* q) {
    const float least = (float)(q->low - q->zero_point), most = (float)(q->high - q->zero_point);
    const struct ClipBounds clip = bounds_of(q);
    return (struct Steps){plane_of(q->inverse), plane_of(q->offset), plane_of(least),      plane_of(most),
                          plane_of(clip.least), plane_of(clip.most), plane_of(clip.masked)};
}

// Return the pixel at which the next vector begins. The last vector ends at the end of the row, and may compute some
// pixels a second time.
static inline int64_t next_vector(int64_t x, int64_t width) {
    return x + 2 * PLANE <= width || x + PLANE == width ? x + PLANE : width - PLANE;
}

// Return the number of clipped values among some that follow one another.
static inline int64_t clipped_in(const float* from, int64_t count, const struct Affine* q) {
    const struct ClipBounds bounds = bounds_of(q);
    int64_t clipped = 0;
    for (int64_t i = 0; i < count; ++i) clipped += is_clipped(from[i] * q->inverse + q->offset, &bounds);
    return clipped;
}

// Store the low `channels` bytes of each dword to bytes that are `pixel` apart.
static inline void store_channels(uint8_t* to, Dwords dwords, int64_t channels, int64_t pixel) {
    if (pixel == channels) {
        store_pixels(to, dwords, channels);
        return;
    }
    uint32_t lanes[PLANE];
    memcpy(lanes, &dwords, sizeof lanes);
    for (int64_t i = 0; i < PLANE; ++i) memcpy(to + i * pixel, lanes + i, (size_t)channels);
}

// Quantize and interleave planes as quantize_planes does. Their number is fixed, so that registers hold the constants.
template <int64_t channels>
static inline int64_t quantize_channels(const float* from, int64_t plane, int64_t width, uint8_t* to, int64_t pixel,
                                        const struct Affine* q, int64_t stride, int64_t* clipped) {
    if (width < PLANE) return 0;
    struct Steps by[channels];
    Dwords counts = dwords_of(0);
    uint32_t zeros = 0;  // zero point of each channel in its byte
    for (int64_t c = 0; c < channels; ++c)
        by[c] = steps_of(q + c * stride), zeros += (uint32_t)q[c * stride].zero_point << 8 * c;
    for (int64_t x = 0; x < width; x = next_vector(x, width)) {
        Dwords dwords = dwords_of((int32_t)zeros);
        const int again = x % PLANE != 0;  // the last vector, which has pixels that are counted already
        for (int64_t c = 0; c < channels; ++c) {
            const Plane steps = steps_at(from + c * plane + x, by[c].inverse, by[c].offset);
            dwords = add_dwords(dwords, bounded_steps(steps, by[c].least, by[c].most), c);
            if (!again) counts = count_lanes(counts, steps, by[c].clip_least, by[c].clip_most, by[c].clip_masked);
        }
        store_channels(to + x * pixel, dwords, channels, pixel);
    }
    *clipped += sum_of(counts);
    for (int64_t c = 0; c < channels; ++c) {
        const int64_t counted = width / PLANE * PLANE;
        *clipped += clipped_in(from + c * plane + counted, width - counted, q + c * stride);
    }
    return width;
}

// Quantize and interleave up to 4 planes of floats to pixels that are `pixel` bytes apart; plane c has the parameters
// q[c * stride]. Return the number of pixels done: all, or 0 if the row is narrower than a vector. Add the number of
// clipped values to `clipped`.
static inline int64_t quantize_planes(const float* from, int64_t plane, int64_t width, int64_t channels, uint8_t* to,
                                      int64_t pixel, const struct Affine* q, int64_t stride, int64_t* clipped) {
    switch (channels) {
        case 1:
            return quantize_channels<1>(from, plane, width, to, pixel, q, stride, clipped);
        case 2:
            return quantize_channels<2>(from, plane, width, to, pixel, q, stride, clipped);
        case 3:
            return quantize_channels<3>(from, plane, width, to, pixel, q, stride, clipped);
        default:
            return quantize_channels<4>(from, plane, width, to, pixel, q, stride, clipped);
    }
}

// Interleave planes of bytes as interleave_planes does.
template <int64_t channels>
static inline int64_t interleave_channels(const uint8_t* from, int64_t plane, int64_t width, uint8_t* to,
                                          int64_t pixel) {
    for (int64_t x = 0; width >= PLANE && x < width; x = next_vector(x, width)) {
        Dwords dwords = load_dwords(from + x);
        for (int64_t c = 1; c < channels; ++c) dwords = add_dwords(dwords, load_dwords(from + c * plane + x), c);
        store_channels(to + x * pixel, dwords, channels, pixel);
    }
    return width < PLANE ? 0 : width;
}

// Interleave up to 4 planes of bytes. Return the number of pixels done, as quantize_planes does.
static inline int64_t interleave_planes(const uint8_t* from, int64_t plane, int64_t width, int64_t channels,
                                        uint8_t* to, int64_t pixel) {
    switch (channels) {
        case 1:
            return interleave_channels<1>(from, plane, width, to, pixel);
        case 2:
            return interleave_channels<2>(from, plane, width, to, pixel);
        case 3:
            return interleave_channels<3>(from, plane, width, to, pixel);
        default:
            return interleave_channels<4>(from, plane, width, to, pixel);
    }
}

static inline int64_t quantize_line(const float* from, int64_t count, uint8_t* to, const struct Affine* q,
                                    int64_t* clipped) {
    return quantize_planes(from, 0, count, 1, to, 1, q, 0, clipped);
}
#else
enum { PLANE = 1, PLANES = 4 };

static inline int64_t quantize_planes(const float* from, int64_t plane, int64_t width, int64_t channels, uint8_t* to,
                                      int64_t pixel, const struct Affine* q, int64_t stride, int64_t* clipped) {
    (void)from, (void)plane, (void)width, (void)channels, (void)to, (void)pixel, (void)q, (void)stride, (void)clipped;
    return 0;
}

static inline int64_t interleave_planes(const uint8_t* from, int64_t plane, int64_t width, int64_t channels,
                                        uint8_t* to, int64_t pixel) {
    (void)from, (void)plane, (void)width, (void)channels, (void)to, (void)pixel;
    return 0;
}

static inline int64_t quantize_line(const float* from, int64_t count, uint8_t* to, const struct Affine* q,
                                    int64_t* clipped) {
    (void)from, (void)count, (void)to, (void)q, (void)clipped;
    return 0;
}
#endif

// Call interleave(first pixel, pixels, first plane, planes) for all parts of a row: up to `PLANES` planes, and all
// pixels or so many that they stay in the first-level cache while further planes are read. None has too few for a
// vector at the end of the row.
template <class Interleave>
static inline void for_each_part(int64_t width, int64_t channels, const Interleave& interleave) {
    for (int64_t x = 0, pixels; x < width; x += pixels) {
        pixels = channels <= PLANES || width - x < INTERLEAVED_PIXELS + PLANE ? width - x : INTERLEAVED_PIXELS;
        for (int64_t c = 0; c < channels; c += PLANES) interleave(x, pixels, c, at_most(PLANES, channels - c));
    }
}

// Quantize `count` values that are `from_step` floats apart, to bytes that are `to_step` apart, and return how many are
// clipped.
static __attribute__((noinline)) int64_t quantize_strided(const float* from, int64_t from_step, int64_t count,
                                                          uint8_t* to, int64_t to_step, const struct Affine* q) {
    const struct ClipBounds bounds = bounds_of(q);
    int64_t clipped = 0;
    for (int64_t i = 0; i < count; ++i) {
        const float steps = from[i * from_step] * q->inverse + q->offset;
        to[i * to_step] = (uint8_t)quantize(steps, 1.0f, q->zero_point, q->low, q->high);
        clipped += is_clipped(steps, &bounds);
    }
    return clipped;
}

// Quantize float32 of any strides (in elements; batch, channel, row, column) to an image. Channel c has the parameters
// q[c * stride]; `stride` is 1, or 0 if all channels have the same. Clipped values are added to a count, see
// add_clipped.
LIBRARY void quantize_image(const float* from, const int64_t* strides, const struct Image* out, const struct Affine* q,
                            int64_t stride, int64_t* counts, int64_t range, int thread, int threads) {
    const int64_t channels = out->pixel;
    int64_t clipped = 0;
    FOR_EACH_ROW(out) {
        const float* line = from + n * strides[0] + y * strides[2];
        uint8_t* to = at(out, n, y, 0);
        if (!stride && (strides[1] == 1 || channels == 1)) {
            const int64_t run = strides[3] == channels ? out->width : 1;  // pixels quantized at once
            for (int64_t x = 0; x < out->width; x += run, to += run * channels) {
                const float* pixel = line + x * strides[3];
                const int64_t done = quantize_line(pixel, run * channels, to, q, &clipped);
                clipped += quantize_strided(pixel + done, 1, run * channels - done, to + done, 1, q);
            }
            continue;
        }
        for_each_part(out->width, channels, [&](int64_t x, int64_t pixels, int64_t c, int64_t planes) {
            const float* values = line + c * strides[1] + x * strides[3];
            uint8_t* bytes = to + x * channels + c;
            if (strides[3] == 1 &&
                quantize_planes(values, strides[1], pixels, planes, bytes, channels, q + c * stride, stride, &clipped))
                return;
            for (int64_t i = 0; i < planes; ++i)
                clipped += quantize_strided(values + i * strides[1], strides[3], pixels, bytes + i, channels,
                                            q + (c + i) * stride);
        });
    }
    add_clipped(counts, range, clipped);
}

// Copy quantized values of any strides to an image, whose channels are last.
LIBRARY void copy_image(const uint8_t* from, const int64_t* strides, const struct Image* out, int thread, int threads) {
    const int64_t channels = out->pixel;
    FOR_EACH_ROW(out) {
        const uint8_t* line = from + n * strides[0] + y * strides[2];
        uint8_t* to = at(out, n, y, 0);
        if (strides[1] == 1 && strides[3] == channels) {
            memcpy(to, line, (size_t)(out->width * channels));
            continue;
        }
        for_each_part(out->width, channels, [&](int64_t x, int64_t pixels, int64_t c, int64_t planes) {
            const uint8_t* values = line + c * strides[1] + x * strides[3];
            uint8_t* bytes = to + x * channels + c;
            if (strides[3] == 1 && interleave_planes(values, strides[1], pixels, planes, bytes, channels)) return;
            for (int64_t i = 0; i < planes; ++i)
                for (int64_t j = 0; j < pixels; ++j) bytes[j * channels + i] = values[i * strides[1] + j * strides[3]];
        });
    }
}

// Dequantize an image to dense NHWC float32.
LIBRARY void dequantize_image(const struct Image* in, float* to, const struct Affine* q, int thread, int threads) {
    FOR_EACH_ROW(in) {
        const uint8_t* from = at(in, n, y, 0);
        float* out = to + (n * in->height + y) * in->width * in->pixel;
        for (int64_t i = 0; i < in->width * in->pixel; ++i) out[i] = dequantize(from[i], q->zero_point, q->scale);
    }
}
