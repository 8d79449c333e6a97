// Rounding of weight columns one after the other for GPTQ, in float64. Every value is computed by the same operations
// in the same order for any number of threads and any vector length, so that the results are those of PyTorch's loop.
#include "base/process_library.h"

namespace {

constexpr int kRows = 32;           // rows that one call of `round_rows` rounds; their values stay in the first cache
constexpr int kWidth = 64;          // largest number of columns of a block
constexpr int64_t kWork = 1 << 15;  // products per thread; with fewer, another thread costs more than it saves

struct ColumnsJob {
    const double *weight, *steps, *lower, *pivots, *added, *spread;
    double *quantized, *error, *totals;
    int64_t groups, rows, count, start, width;
    int64_t step_group, step_row, step_column;
    double low, high;
};

// Values of `kRows` rows of the columns of a block, one column after the other.
struct Block {
    double weight[kWidth][kRows], steps[kWidth][kRows], wanted[kWidth][kRows], quantized[kWidth][kRows];
};

void read_rows(const ColumnsJob& job, int64_t group, int64_t row, int count, Block& block) {
    const double* spread = job.spread + group * job.width * job.rows + row;
    for (int r = 0; r < count; ++r) {
        const double* weight = job.weight + (group * job.rows + row + r) * job.count + job.start;
        const double* steps = job.steps + group * job.step_group + (row + r) * job.step_row;
        for (int64_t c = 0; c < job.width; ++c) {
            block.weight[c][r] = weight[c];
            block.steps[c][r] = steps[(job.start + c) * job.step_column];
        }
    }
    for (int64_t c = 0; c < job.width; ++c)
        for (int r = 0; r < count; ++r) block.wanted[c][r] = block.weight[c][r] + spread[c * job.rows + r];
}

// Round `count` <= kRows rows of all columns, from the last column to the first, and add the error of each to what the
// columns before it are wanted to be.
template <typename Count>
void round_rows(const ColumnsJob& job, int64_t group, int64_t row, Count count, Block& block) {
    read_rows(job, group, row, count, block);
    const double* lower = job.lower + group * job.width * job.width;
    const int64_t first = group * job.count + job.start;
    double* damped = job.totals + group * job.rows + row;
    double* added = damped + job.groups * job.rows;
    for (int64_t i = job.width - 1; i >= 0; --i) {
        double errors[kRows];
        const double pivot = job.pivots[first + i], extra = job.added[first + i];
        for (int r = 0; r < count; ++r) {
            const double size = block.steps[i][r];
            double steps = block.wanted[i][r] / size;
            steps = steps < job.low ? job.low : steps;
            steps = steps > job.high ? job.high : steps;
            steps = (steps + kInteger) - kInteger;
            block.quantized[i][r] = steps;
            errors[r] = block.weight[i][r] - steps * size;
            const double missed = block.wanted[i][r] - steps * size;
            damped[r] += missed * missed * pivot;
            added[r] += errors[r] * errors[r] * extra;
        }
        double* kept = job.error + (first + i) * job.rows + row;
        for (int r = 0; r < count; ++r) kept[r] = errors[r];
        for (int64_t j = 0; j < i; ++j) {
            const double factor = lower[i * job.width + j];
            for (int r = 0; r < count; ++r) block.wanted[j][r] += factor * errors[r];
        }
    }
    for (int r = 0; r < count; ++r) {
        double* quantized = job.quantized + (group * job.rows + row + r) * job.count + job.start;
        for (int64_t c = 0; c < job.width; ++c) quantized[c] = block.quantized[c][r];
    }
}

struct AllRows {
    constexpr operator int() const { return kRows; }
};

void columns_body(void* context, int thread, int threads) {
    const ColumnsJob& job = *static_cast<const ColumnsJob*>(context);
    const int64_t parts = (job.rows + kRows - 1) / kRows, count = job.groups * parts;
    Block block;
    for (int64_t part = count * thread / threads; part < count * (thread + 1) / threads; ++part) {
        const int64_t group = part / parts, row = part % parts * kRows, rest = job.rows - row;
        if (rest >= kRows)
            round_rows(job, group, row, AllRows(), block);
        else
            round_rows(job, group, row, int(rest), block);
    }
}

}  // namespace

// Round a block of at most 64 columns of weights. Arrays are f64 without gaps, and `sizes` are {groups, rows, count of
// all columns, first column of the block, columns of the block, strides of `steps` for groups, rows and columns}:
//   weight[groups, rows, count]
//   steps: distances of quantized values, with strides
//   lower[groups, width, width]: the error of column i is multiplied by lower[i, j] and added to column j < i
//   pivots[groups, count], added[groups, count]: factors of squared errors; see totals
//   spread[groups, width, rows]: what the columns behind the block add to it
//   quantized[groups, rows, count], error[groups, count, rows]: written for the columns of the block; error is weight
//       minus rounded value
//   totals[2, groups, rows]: sums over columns of pivots * (wanted - rounded value)^2 and added * error^2
INTAGLIO_EXPORT void intaglio_round_columns(const double* weight, const double* steps, const double* lower,
                                            const double* pivots, const double* added, const double* spread,
                                            double* quantized, double* error, double* totals, const int64_t* sizes,
                                            double low, double high, int threads) {
    ColumnsJob job{weight,   steps,    lower,    pivots,   added,    spread,   quantized, error, totals, sizes[0],
                   sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7],  low,   high};
    const int64_t most = job.groups * job.rows * job.width * job.width / 2 / kWork + 1;
    if (job.groups * job.width * job.rows)
        parallel_between_operators(columns_body, &job, int(threads < most ? threads : most));
}
