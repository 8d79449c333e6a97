// Lookup tables of 256 entries in SIMD instructions, see lookup.h.

#include "elementwise/lookup.h"

#include "base/vectors.h"

#if defined(__AVX512BW__)
// Look up 64 values at a time with AVX512-VBMI: two registers hold each half of the table, and the high bit of a value
// selects the half.
__attribute__((target("avx512bw,avx512vbmi"))) static void look_up_vectors(const uint8_t* from, uint8_t* to,
                                                                           int64_t pixels, int64_t stride,
                                                                           int64_t channels, const uint8_t* table) {
    const __m512i a = _mm512_loadu_si512(table), b = _mm512_loadu_si512(table + 64);
    const __m512i c = _mm512_loadu_si512(table + 128), d = _mm512_loadu_si512(table + 192);
    for (int64_t x = 0; x < pixels; ++x, from += stride, to += stride)
        for (int64_t i = 0; i < channels; i += 64) {
            const __mmask64 some = channels - i < 64 ? ((__mmask64)1 << (channels - i)) - 1 : ~(__mmask64)0;
            const __m512i index = _mm512_maskz_loadu_epi8(some, from + i);
            const __m512i low = _mm512_permutex2var_epi8(a, index, b), high = _mm512_permutex2var_epi8(c, index, d);
            _mm512_mask_storeu_epi8(to + i, some, _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high));
        }
}
#elif defined(__AVX2__)
// Look up WIDE values at a time with byte shuffles. A shuffle looks up 16 entries and gives 0 for a negative index, and
// the index decreases by 16 from each shuffle to the next. Shuffle j has part j of the table XOR part j - 1, so
// the XOR of all results is the entry of the last part whose index was not negative. Values from 128 on are negative
// until their high bit is flipped.
static inline __m256i look_up_vector(__m256i low, const __m256i* change) {
    const __m256i sixteen = _mm256_set1_epi8(16);
    __m256i high = _mm256_xor_si256(low, _mm256_set1_epi8(-128)), found = _mm256_setzero_si256();
    for (int j = 0; j < 8; ++j) {
        found = _mm256_xor_si256(found, _mm256_shuffle_epi8(change[j], low));
        found = _mm256_xor_si256(found, _mm256_shuffle_epi8(change[8 + j], high));
        low = _mm256_subs_epi8(low, sixteen), high = _mm256_subs_epi8(high, sixteen);
    }
    return found;
}

static inline void look_up_vectors(const uint8_t* from, uint8_t* to, int64_t pixels, int64_t stride, int64_t channels,
                                   const uint8_t* table) {
    enum { HALF = WIDE / 2 };
    __m256i change[16];
    for (int j = 0; j < 16; ++j) {
        const __m128i part = _mm_loadu_si128((const __m128i*)(table + 16 * j));
        const __m128i last = j % 8 ? _mm_loadu_si128((const __m128i*)(table + 16 * j - 16)) : _mm_setzero_si128();
        change[j] = _mm256_broadcastsi128_si256(_mm_xor_si128(part, last));
    }
    // The channels of a tile fill half of a vector, so two pixels are looked up at once.
    for (; channels == HALF && pixels > 1; pixels -= 2, from += 2 * stride, to += 2 * stride) {
        const __m256i found =
            look_up_vector(_mm256_loadu2_m128i((const __m128i*)(from + stride), (const __m128i*)from), change);
        _mm256_storeu2_m128i((__m128i*)(to + stride), (__m128i*)to, found);
    }
    for (int64_t x = 0; x < pixels; ++x, from += stride, to += stride)
        for (int64_t i = 0; i < channels; i += WIDE)
            store_u8(to + i, look_up_vector(load_u8(from + i, channels - i), change), channels - i);
}
#endif

// Look up `channels` values of each of `pixels` pixels, which are `stride` bytes from each other in both tensors.
LIBRARY void look_up_pixels(const uint8_t* from, uint8_t* to, int64_t pixels, int64_t stride, int64_t channels,
                            const uint8_t* table) {
#if defined(__AVX512BW__)
    if (has_vbmi()) {
        look_up_vectors(from, to, pixels, stride, channels, table);
        return;
    }
#elif defined(__AVX2__)
    look_up_vectors(from, to, pixels, stride, channels, table);
    return;
#endif
    for (int64_t x = 0; x < pixels; ++x, from += stride, to += stride)
        for (int64_t i = 0; i < channels; ++i) to[i] = table[from[i]];
}

LIBRARY void look_up_in_place(uint8_t* at, int64_t pixels, int64_t stride, int64_t channels, const uint8_t* table) {
    if (channels == stride) channels *= pixels, pixels = 1;
    look_up_pixels(at, at, pixels, stride, channels, table);
}

LIBRARY void look_up(const struct Image* in, const struct Image* out, const uint8_t* table, int thread, int threads) {
    FOR_EACH_ROW(out) look_up_pixels(at(in, n, y, 0), at(out, n, y, 0), 1, 0, out->width * out->pixel, table);
}
