// Products with Hadamard matrices, see hadamard.h.

#include "sequences/hadamard.h"

// Replace the neighbours at a distance inside of one vector by their sum and their difference.
static inline Reals pairs_inside(Reals x, int distance) {
    RealBits places, signs;
    for (int l = 0; l < FLOATS; ++l) places[l] = l ^ distance, signs[l] = l & distance ? INT32_MIN : 0;
    const Reals other = __builtin_shuffle(x, places);
    return other + (Reals)((RealBits)x ^ signs);
}

// Multiply a block of whole vectors by the matrix.
static inline void whole_vectors(float* block, int64_t size) {
    for (int64_t e = 0; e < size; e += FLOATS) {
        Reals x;
        memcpy(&x, block + e, sizeof x);
#pragma GCC unroll 4
        for (int distance = 1; distance < FLOATS; distance *= 2) x = pairs_inside(x, distance);
        memcpy(block + e, &x, sizeof x);
    }
    for (int64_t distance = FLOATS; distance < size; distance *= 2)
        for (int64_t first = 0; first < size; first += 2 * distance)
            for (int64_t e = first; e < first + distance; e += FLOATS) {
                Reals a, b;
                memcpy(&a, block + e, sizeof a), memcpy(&b, block + e + distance, sizeof b);
                const Reals sum = a + b, difference = a - b;
                memcpy(block + e, &sum, sizeof sum), memcpy(block + e + distance, &difference, sizeof difference);
            }
}

// Multiply a block of fewer elements than a vector has by the matrix.
static inline void few_elements(float* block, int64_t size) {
    for (int64_t distance = 1; distance < size; distance *= 2)
        for (int64_t first = 0; first < size; first += 2 * distance)
            for (int64_t e = first; e < first + distance; ++e) {
                const float a = block[e], b = block[e + distance];
                block[e] = a + b, block[e + distance] = a - b;
            }
}

// Multiply each block of `size` elements of each line by the Hadamard matrix of 1 and -1, and by `scale`.
LIBRARY void hadamard_lines(const struct Lines* l, int64_t size, float scale, int thread, int threads) {
    for_each_line<float, float>(l, thread, threads, [l, size, scale](const float* from, float* to) {
        float block[LARGEST_HADAMARD] __attribute__((aligned(64)));
        for (int64_t first = 0; first < l->size; first += size) {
            if (l->from_step == 1)
                memcpy(block, from + first, sizeof(float) * (size_t)size);
            else
                for (int64_t e = 0; e < size; ++e) block[e] = from[(first + e) * l->from_step];
            if (size < FLOATS)
                few_elements(block, size);
            else
                whole_vectors(block, size);
            if (l->to_step == 1)
                for (int64_t e = 0; e < size; ++e) to[first + e] = block[e] * scale;
            else
                for (int64_t e = 0; e < size; ++e) to[(first + e) * l->to_step] = block[e] * scale;
        }
    });
}
