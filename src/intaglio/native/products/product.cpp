// Matrix products of two activations, see product.h.

#include "products/product.h"

#include "products/operand.h"

// Multiply some rows of one matrix by a packed operand, panel after panel.
static __attribute__((noinline)) void multiply_rows(const struct Product* p, const struct Operand* o,
                                                    const int8_t* packed, const int32_t* terms, const uint8_t* a,
                                                    uint8_t* out, int64_t pixel, int64_t rows) {
    float factor[PANEL], ones[QUERY_BLOCK], real[QUERY_BLOCK * PANEL] __attribute__((aligned(64)));
    for (int i = 0; i < PANEL; ++i) factor[i] = p->factor;
    for (int i = 0; i < QUERY_BLOCK; ++i) ones[i] = 1.0f;
    struct Tile t = {};
    t.a = a, t.a_pixel = p->a.row, t.b = packed, t.tap_rows = t.taps = 1, t.run = (p->depth + 3) / 4;
    t.bias = terms, t.factor = factor, t.out = out, t.out_pixel = p->out.row;
    const struct Epilogue* epilogue = p->epilogue.take ? &p->epilogue : 0;
    if (!p->limits && !epilogue) {
        multiply(&p->kernels, &t, o, p->columns, rows, 1);
        return;
    }
    const int64_t panel = 16 * p->kernels.blocks;
    struct Operand one = *o;
    for (int64_t first = 0; first < p->columns; first += panel) {
        one.columns = p->columns - first < panel ? p->columns - first : panel;
        t.out = (uint8_t*)real, t.out_pixel = 4 * panel;
        multiply(&p->kernels, &t, &one, one.columns, rows, 0);
        uint8_t quantized[QUERY_BLOCK * PANEL], *to = epilogue ? quantized : out + first;
        const int64_t stride = epilogue ? PANEL : p->out.row;
        if (p->limits) quantize_block(real, panel, rows, ones, p->limits, to, stride, one.columns);
        if (p->table.look_up) p->table.look_up(to, rows, stride, one.columns, p->table.entries);
        if (epilogue) {
            const uint8_t* made = p->limits ? quantized : (const uint8_t*)real;
            epilogue->take(epilogue->run, made, p->limits ? stride : 4 * panel, pixel, rows, first, one.columns);
        }
        t.b += (p->depth + 3) / 4 * 4 * panel, t.bias += panel;
    }
}

LIBRARY void product(const struct Product* p, int thread, int threads) {
    struct Share* const shares = threads > p->sharers ? 0 : p->shares;
    if (threads > p->sharers) threads = (int)p->sharers;
    if (thread >= threads) return;
    const int64_t most = rows_of_block(&p->kernels), blocks = (p->rows + most - 1) / most,
                  total = p->batch * p->heads * blocks;
    int8_t* packed = (int8_t*)(p->scratch + thread * p->scratch_bytes);
    int32_t* terms = (int32_t*)(packed + (p->columns + PANEL - 1) / PANEL * PANEL * ((p->depth + 3) / 4 * 4));
    const uint8_t* of = 0;
    const int64_t products = p->batch * p->heads * p->rows * p->columns * p->depth;
    struct Sharing s = enter_step(shares, products / PRODUCTS_PER_NS, thread, threads);
    while (next_piece(&s)) {
        const int64_t end = first_item(&s, total, 1);
        for (int64_t unit = first_item(&s, total, 0); unit < end; ++unit) {
            const int64_t block = unit % blocks, head = unit / blocks % p->heads, image = unit / blocks / p->heads;
            const struct Operand o = {p->b + image * p->b_batch + head * p->b_head, p->depth_stride, p->column_stride,
                                      p->depth, p->columns};
            if (o.base != of) {
                pack_operand(&o, p->kernels.blocks, packed);
                column_terms(&o, p->kernels.blocks, packed, p->zero_a, terms);
            }
            of = o.base;
            const int64_t first = p->rows * block / blocks, last = p->rows * (block + 1) / blocks;
            multiply_rows(p, &o, packed, terms, head_of(&p->a, image, head) + first * p->a.row,
                          head_of(&p->out, image, head) + first * p->out.row,
                          (image * p->heads + head) * p->rows + first, last - first);
        }
    }
}
