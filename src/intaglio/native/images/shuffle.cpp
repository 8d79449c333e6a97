// Channel shuffle of two groups, see shuffle.h.

#include "images/shuffle.h"

#include "base/intrinsics.h"

// Interleave the two halves of the channels: channel 2 * i + g of the result is channel g * each + i of the input.
LIBRARY void interleave_channel_groups(const struct Image* in, const struct Image* out, int thread, int threads) {
    const int64_t each = out->pixel / 2;
    FOR_EACH_ROW(out) {
        for (int64_t x = 0; x < out->width; ++x) {
            const uint8_t *a = at(in, n, y, x), *b = a + each;
            uint8_t* to = at(out, n, y, x);
            int64_t i = 0;
#if defined(__AVX2__)
            for (; i + 16 <= each; i += 16) {
                const __m128i left = _mm_loadu_si128((const __m128i*)(a + i)),
                              right = _mm_loadu_si128((const __m128i*)(b + i));
                _mm_storeu_si128((__m128i*)(to + 2 * i), _mm_unpacklo_epi8(left, right));
                _mm_storeu_si128((__m128i*)(to + 2 * i + 16), _mm_unpackhi_epi8(left, right));
            }
#endif
            for (; i < each; ++i) to[2 * i] = a[i], to[2 * i + 1] = b[i];
        }
    }
}
