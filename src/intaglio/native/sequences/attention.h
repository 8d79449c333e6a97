// Quantized attention. The scores of a block of queries stay in cache between the two products.
#pragma once

#include "products/heads.h"
#include "base/library.h"
#include "base/sharing.h"

// softmax(q k^T * scale + mask) v with quantized operands, see `attention` of numerics/attention_math.py.
struct Attention {
    struct Heads q, k, v, out;
    const uint8_t* mask;                          // null, or bool (false excludes a key) or float32 (added to scores)
    int64_t mask_bytes, mask_stride[4];           // strides in bytes of batch, head, query and key; 0: broadcast
    int64_t batch, heads, shared;                 // `shared` query heads have the same head of k and v
    int64_t queries, keys, depth, width, causal;  // `depth`, `width`: values of a head of q and k, of v
    int32_t zero_q;                               // zero point of q
    float factor, ratio;                          // accumulator to exponent of 2; scale_v / scale_out
    const struct Limits* limits;                  // null: the result is float32, and scale_out is 1
    struct FloatKernels kernels;
    uint8_t* scratch;  // `scratch_bytes` for each of `sharers` threads
    int64_t scratch_bytes, sharers;
    struct Share* shares;  // of the threads, or null, see sharing.h
};

// Compute this thread's part of the queries.
LIBRARY void attention(const struct Attention* a, int thread, int threads);
