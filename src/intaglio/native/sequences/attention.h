// Attention: the scores of a few queries stay in cache from one product to the other.
#pragma once

#include "products/heads.h"
#include "base/library.h"

struct Attention {
    struct Heads q, k, v, out;
    const uint8_t* mask;  // null, or of `mask_bytes`: 1, false where a key is excluded, or 4, floats that are added
    int64_t mask_bytes, mask_apart[4];  // bytes along batch, head, query, key; 0 where it broadcasts
    int64_t batch, heads, shared;       // so many heads have one K and V
    int64_t queries, keys, depth, width, causal;
    int32_t zero_q;
    float factor, ratio;  // product -> score; s_v / s_out
    const struct Limits* limits;
    struct FloatKernels kernels;
    uint8_t* scratch;  // `sharers` times `scratch_bytes`
    int64_t scratch_bytes, sharers;
};

LIBRARY void attention(const struct Attention* a, int thread, int threads);
