// Rounding of weight columns one after the other for GPTQ, in float64. Every value is computed by the same operations
// in the same order for any number of threads and any vector length, so that the results are those of PyTorch's loop.
#include "base/pool.h"

#define INTAGLIO_EXPORT extern "C" __attribute__((visibility("default")))

extern "C" void intaglio_parallel(IntaglioBody body, void* context, int threads);

namespace {

constexpr int kRows = 32;           // rows that one call of `round_rows` rounds; their values stay in the first cache
constexpr int64_t kWork = 1 << 15;  // products per thread; with fewer, another thread costs more than it saves

constexpr double kInteger = 6755399441055744.0;  // 1.5 * 2^52: sums with it are rounded to integers, ties to even

struct ColumnsJob {
    const double *weight, *steps, *lower;
    double *wanted, *quantized, *error;
    int64_t groups, stride, width, rows;
    double low, high;
};

// Round `count` <= kRows rows of all columns, from the last column to the first, and add the error of each to what the
// columns before it are wanted to be. Pointers are to the first row of the first column.
template <typename Count>
void round_rows(const ColumnsJob& job, const double* lower, int64_t at, Count count) {
    for (int64_t i = job.width - 1; i >= 0; --i) {
        const int64_t own = at + i * job.rows;
        double errors[kRows];
        for (int row = 0; row < count; ++row) {
            const double size = job.steps[own + row];
            double steps = job.wanted[own + row] / size;
            steps = steps < job.low ? job.low : steps;
            steps = steps > job.high ? job.high : steps;
            steps = (steps + kInteger) - kInteger;
            job.quantized[own + row] = steps;
            errors[row] = job.weight[own + row] - steps * size;
            job.error[own + row] = errors[row];
        }
        for (int64_t j = 0; j < i; ++j) {
            const double factor = lower[i * job.width + j];
            double* wanted = job.wanted + at + j * job.rows;
            for (int row = 0; row < count; ++row) wanted[row] += factor * errors[row];
        }
    }
}

struct AllRows {
    constexpr operator int() const { return kRows; }
};

void columns_body(void* context, int thread, int threads) {
    const ColumnsJob& job = *static_cast<const ColumnsJob*>(context);
    const int64_t parts = (job.rows + kRows - 1) / kRows, count = job.groups * parts;
    for (int64_t part = count * thread / threads; part < count * (thread + 1) / threads; ++part) {
        const int64_t group = part / parts, row = part % parts * kRows;
        const double* lower = job.lower + group * job.width * job.width;
        const int64_t at = group * job.stride + row, rest = job.rows - row;
        if (rest >= kRows)
            round_rows(job, lower, at, AllRows());
        else
            round_rows(job, lower, at, int(rest));
    }
}

}  // namespace

// Round columns of weights. All arrays but `lower` are f64[groups, width, rows] with `stride` values between groups:
// weight, steps (distance of quantized values), wanted (values to round, changed in place), quantized and error (weight
// minus rounded value). lower f64[groups, width, width] is a lower triangle: the error of column i is multiplied by
// lower[i, j] and added to column j < i of `wanted` before that column is rounded.
INTAGLIO_EXPORT void intaglio_round_columns(const double* weight, const double* steps, const double* lower,
                                            double* wanted, double* quantized, double* error, int64_t groups,
                                            int64_t stride, int64_t width, int64_t rows, double low, double high,
                                            int threads) {
    ColumnsJob job{weight, steps, lower, wanted, quantized, error, groups, stride, width, rows, low, high};
    const int64_t most = groups * rows * width * width / 2 / kWork + 1;
    if (groups * width * rows) intaglio_parallel(columns_body, &job, int(threads < most ? threads : most));
}
