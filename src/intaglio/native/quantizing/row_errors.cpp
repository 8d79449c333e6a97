// Squared errors of the results of rows of a matrix, by products of bytes: rows are written as two bytes for each
// element, and the products of these bytes with the operands are combined. All sums of products are exact, and squares
// are added in one order for any number of threads and any vector length.
#include "base/process_library.h"

namespace {

constexpr double kMost = 127.0 * 256;           // the largest element of a row becomes this integer
constexpr int kSumsOfRow = 16;                  // partial sums of a row: position i adds to number i % kSumsOfRow
constexpr int64_t kElementsOfThread = 1 << 14;  // with fewer, another thread costs more than it saves

struct SplitJob {
    const double* rows;
    const int32_t* offset;
    int64_t count, size;
    int8_t* digits;
    double *units, *shifts;
};

void split_body(void* context, int thread, int threads) {
    const SplitJob& job = *static_cast<const SplitJob*>(context);
    for (int64_t row = job.count * thread / threads; row < job.count * (thread + 1) / threads; ++row) {
        const double* values = job.rows + row * job.size;
        int8_t *high = job.digits + row * job.size, *low = high + job.count * job.size;
        double most = 0;
        for (int64_t i = 0; i < job.size; ++i) {
            const double magnitude = values[i] < 0 ? -values[i] : values[i];
            most = magnitude > most ? magnitude : most;
        }
        const double unit = most > 0 ? most / kMost : 1.0;
        int64_t shift = 0;
        for (int64_t i = 0; i < job.size; ++i) {
            const int32_t integer = int32_t((values[i] / unit + kInteger) - kInteger);
            const int32_t upper = (integer + 128) >> 8;
            high[i] = int8_t(upper);
            low[i] = int8_t(integer - upper * 256);
            shift += integer * job.offset[i];
        }
        job.units[row] = unit;
        job.shifts[row] = double(shift);
    }
}

struct ErrorsJob {
    const int32_t* products;
    const double *units, *shifts;
    int64_t count, positions;
    double* errors;
};

void errors_body(void* context, int thread, int threads) {
    const ErrorsJob& job = *static_cast<const ErrorsJob*>(context);
    for (int64_t row = job.count * thread / threads; row < job.count * (thread + 1) / threads; ++row) {
        const int32_t *high = job.products + row * job.positions, *low = high + job.count * job.positions;
        const double shift = job.shifts[row];
        double sums[kSumsOfRow] = {};
        int64_t i = 0;
        for (; i + kSumsOfRow <= job.positions; i += kSumsOfRow)
            for (int lane = 0; lane < kSumsOfRow; ++lane) {
                const double result = 256.0 * high[i + lane] + low[i + lane] + shift;
                sums[lane] += result * result;
            }
        for (int lane = 0; i + lane < job.positions; ++lane) {
            const double result = 256.0 * high[i + lane] + low[i + lane] + shift;
            sums[lane] += result * result;
        }
        double total = 0;
        for (int lane = 0; lane < kSumsOfRow; ++lane) total += sums[lane];
        job.errors[row] = total * job.units[row] * job.units[row];
    }
}

int threads_for(int64_t elements, int threads) {
    const int64_t most = elements / kElementsOfThread + 1;
    return int(threads < most ? threads : most);
}

}  // namespace

// Write rows[count, size] as integers of two bytes: value = unit * (256 * digits[0] + digits[1]), rounded.
//   offset[size]: what is added to the operands of each element
//   digits[2, count, size], units[count]: written
//   shifts[count]: written, the sum of all integers times their offsets
INTAGLIO_EXPORT void intaglio_split_rows(const double* rows, const int32_t* offset, int64_t count, int64_t size,
                                         int threads, int8_t* digits, double* units, double* shifts) {
    SplitJob job{rows, offset, count, size, digits, units, shifts};
    if (count) parallel_between_operators(split_body, &job, threads_for(count * size, threads));
}

// Write the sum of squares of the results of each row to errors[count], from the products[2, count, positions] of both
// bytes with the operands.
INTAGLIO_EXPORT void intaglio_row_errors(const int32_t* products, const double* units, const double* shifts,
                                         int64_t count, int64_t positions, int threads, double* errors) {
    ErrorsJob job{products, units, shifts, count, positions, errors};
    if (count) parallel_between_operators(errors_body, &job, threads_for(count * positions, threads));
}
