// Counts of values outside of the range of their quantization parameters, see numerics/clip_counts.py.

#pragma once

#include <stdint.h>

// Bounds in units of the scale: values from `least` to `most` are in range, and those up to `masked` are masks.
struct ClipBounds {
    float least, most, masked;
};

// Return the bounds for quantized values from `low` to `high`, where 0 is `offset` steps from the zero point.
static inline struct ClipBounds clip_bounds(float inverse, float offset, int32_t zero_point, int32_t low,
                                            int32_t high) {
    const float half = 0.5f + 0x1p-22f * (float)(high - low);  // ends of ranges are rounded to float32
    const float least = (float)(low - zero_point) - half, most = (float)(high - zero_point) + half;
    const float mask = -9984.0f * inverse + offset, below = least - 8.0f * (float)(high - low);
    return (struct ClipBounds){least, most, mask < below ? mask : below};
}

static inline int is_clipped(float steps, const struct ClipBounds* b) {
    return !((steps >= b->least && steps <= b->most) || steps <= b->masked);
}

// Add the number of clipped values of one range to its count and to the sum of all, which is count 0. `counts` may be
// null.
static inline void add_clipped(int64_t* counts, int64_t range, int64_t clipped) {
    if (!counts || !clipped) return;
    __atomic_fetch_add(counts, clipped, __ATOMIC_RELAXED);
    __atomic_fetch_add(counts + range, clipped, __ATOMIC_RELAXED);
}
