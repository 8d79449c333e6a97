// Dynamic per-token quantization, see rows.h.

#include "sequences/rows.h"

#include "products/row_scale.h"

// Quantize each row with a scale from its largest magnitude; `alike` consecutive rows have the same scale, from the
// largest magnitude of all of them, which threads do not share. Strides are in elements: batch, channel, row, column.
LIBRARY void quantize_rows(const float* from, const int64_t* strides, const struct Image* out, float* scales,
                           int64_t alike, struct Share* shares, int thread, int threads) {
    const int64_t rows = out->images * out->height * out->width, count = out->pixel, stride = strides[1];
    int32_t bits = MIN_ROW_ABSMAX;
    int64_t known = -1;
    struct Sharing s = enter_step(shares, alike > 1 ? 0 : rows * count / ELEMENTS_PER_NS, thread, threads);
    while (next_piece(&s)) {
        const int64_t end = first_item(&s, rows, 1);
        for (int64_t r = first_item(&s, rows, 0); r < end; ++r) {
            if (r / alike != known) {
                known = r / alike, bits = MIN_ROW_ABSMAX;
                for (int64_t i = known * alike; i < (known + 1) * alike; ++i) {
                    const int64_t y = i / out->width;
                    const float* row = from + y / out->height * strides[0] + y % out->height * strides[2] +
                                       i % out->width * strides[3];
                    bits = peak_bits(row, stride, count, bits);
                }
            }
            const int64_t y = r / out->width;
            const float* row =
                from + y / out->height * strides[0] + y % out->height * strides[2] + r % out->width * strides[3];
            scales[r] = quantize_row(row, stride, count, bits, out->base + r * count);
        }
    }
}
