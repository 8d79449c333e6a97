// Sums and results of microkernels for AArch64 with dot products of bytes (kernels/neon/neon_tiles.py).
#pragma once

#include <arm_neon.h>

#include "tiles/tile_results.h"

// What all sums of a panel start with.
struct NeonStart {
    int32_t of[16];
};

// Return the biases, plus what activations that are 128 too low take from the sums.
static inline NeonStart neon_start(const struct Tile* t) {
    NeonStart start;
    memcpy(start.of, t->bias, sizeof start.of);
#if !defined(__ARM_FEATURE_MATMUL_INT8)
    int32x4_t below[4] = {};
    const int64_t steps = t->tap_rows * t->taps * t->run;
    for (int64_t k = 0; k < steps; ++k)
        for (int j = 0; j < 4; ++j) below[j] = vdotq_s32(below[j], vld1q_s8(t->b + 64 * k + 16 * j), vdupq_n_s8(-128));
    for (int j = 0; j < 4; ++j) vst1q_s32(start.of + 4 * j, vsubq_s32(vld1q_s32(start.of + 4 * j), below[j]));
#endif
    return start;
}

// Return whether all 16 channels of a panel are written.
static inline int is_whole(const struct Tile* t) { return (t->mask & 0xffff) == 0xffff; }

// Round, add the zero point, clamp and store 16 channels of one pixel. `steps` are real values divided by the scale.
static inline void neon_quantize(const struct Limits* q, const float32x4_t* steps, uint8_t* out) {
    const float32x4_t convertible = vdupq_n_f32(1073741824.0f);
    const int32x4_t zero = vdupq_n_s32(q->zero_point), low = vdupq_n_s32(q->low), high = vdupq_n_s32(q->high);
    int16x4_t narrow[4];
    for (int j = 0; j < 4; ++j) {
        const float32x4_t bounded = vminq_f32(vmaxq_f32(steps[j], vnegq_f32(convertible)), convertible);
        const int32x4_t quantized = vaddq_s32(vcvtnq_s32_f32(bounded), zero);
        narrow[j] = vmovn_s32(vminq_s32(vmaxq_s32(quantized, low), high));
    }
    const uint8x8_t front = vqmovun_s16(vcombine_s16(narrow[0], narrow[1]));
    vst1q_u8(out, vcombine_u8(front, vqmovun_s16(vcombine_s16(narrow[2], narrow[3]))));
}

// Return float32(acc) * factor of one pixel.
static inline void neon_scaled(const struct Tile* t, const int32_t* acc, float32x4_t* steps) {
    for (int j = 0; j < 4; ++j)
        steps[j] = vmulq_f32(vcvtq_f32_s32(vld1q_s32(acc + 4 * j)), vld1q_f32(t->factor + 4 * j));
}

// Requantize the sums of a tile.
static inline void neon_u8(const struct Tile* t, const int32_t (*acc)[16], int rows, int remainder) {
    if (remainder || !is_whole(t)) {
        finish_u8(t, acc, rows, remainder);
        return;
    }
    for (int i = 0; i < rows; ++i) {
        float32x4_t steps[4];
        neon_scaled(t, acc[i], steps);
        neon_quantize(t->limits, steps, t->out + i * t->out_pixel);
    }
}

// Add a residual operand to the sums of a tile and requantize.
static inline void neon_add(const struct Tile* t, const int32_t (*acc)[16], int rows, int remainder,
                            int residual_remainder) {
    if (remainder || residual_remainder || !is_whole(t)) {
        finish_add(t, acc, rows, remainder, residual_remainder);
        return;
    }
    const int32x4_t zero = vdupq_n_s32(t->limits->other_zero_point);
    for (int i = 0; i < rows; ++i) {
        float32x4_t steps[4];
        neon_scaled(t, acc[i], steps);
        const uint8x16_t other = vld1q_u8(t->residual + i * t->residual_pixel);
        const uint16x8_t wide[2] = {vmovl_u8(vget_low_u8(other)), vmovl_u8(vget_high_u8(other))};
        for (int j = 0; j < 4; ++j) {
            const uint16x4_t part = j % 2 ? vget_high_u16(wide[j / 2]) : vget_low_u16(wide[j / 2]);
            const int32x4_t centered = vsubq_s32(vreinterpretq_s32_u32(vmovl_u16(part)), zero);
            const float32x4_t factor = vld1q_f32(t->residual_factor + 4 * j);
            steps[j] = vaddq_f32(steps[j], vmulq_f32(vcvtq_f32_s32(centered), factor));
        }
        neon_quantize(t->limits, steps, t->out + i * t->out_pixel);
    }
}

// Dequantize the sums of a tile.
static inline void neon_f32(const struct Tile* t, const int32_t (*acc)[16], int rows) {
    if (!is_whole(t)) {
        finish_f32(t, acc, rows);
        return;
    }
    for (int i = 0; i < rows; ++i) {
        float32x4_t steps[4];
        neon_scaled(t, acc[i], steps);
        for (int j = 0; j < 4; ++j) vst1q_f32((float*)(t->out + i * t->out_pixel) + 4 * j, steps[j]);
    }
}

// Dequantize the sums of a tile with scales of rows and channels and a bias.
static inline void neon_rows(const struct Tile* t, const int32_t (*acc)[16], int rows) {
    if (!is_whole(t)) {
        finish_rows(t, acc, rows);
        return;
    }
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < 4; ++j) {
            const float32x4_t scaled = vmulq_n_f32(vcvtq_f32_s32(vld1q_s32(acc[i] + 4 * j)), t->row_scale[i]);
            const float32x4_t real = vmulq_f32(scaled, vld1q_f32(t->factor + 4 * j));
            vst1q_f32((float*)(t->out + i * t->out_pixel) + 4 * j, vaddq_f32(real, vld1q_f32(t->row_bias + 4 * j)));
        }
}
