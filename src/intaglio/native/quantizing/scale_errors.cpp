// Squared errors of rows of weights that are rounded with a scale for each row. The squares of a row are added in the
// order of NumPy's pairwise sum of at most 128 values, for any number of threads and any vector length.
#include "base/process_library.h"

namespace {

constexpr int kSquareLanes = 8;  // partial sums of a row: value i adds to number i % kSquareLanes
constexpr int kLongestRow = 128;
constexpr float kWholeFloat = 12582912.0f;     // 1.5 * 2^23: sums with it are rounded to integers, ties to even
constexpr int64_t kWeightsOfThread = 1 << 15;  // with fewer, another thread costs more than it saves

struct ScaleErrorsJob {
    const float *rows, *steps;
    int64_t count, size;
    float low, high;
    double* errors;
};

// Return the squared error of a row. NaN stays NaN.
template <typename Size>
double row_error(const ScaleErrorsJob& job, const float* row, float step, Size size) {
    const float inverse = 1.0f / step, low = job.low, high = job.high;
    float squares[kLongestRow];
    for (int64_t i = 0; i < size; ++i) {
        float quantized = row[i] * inverse;
        quantized = quantized < low ? low : quantized;
        quantized = quantized > high ? high : quantized;
        quantized = (quantized + kWholeFloat) - kWholeFloat;
        const float error = row[i] - quantized * step;
        squares[i] = error * error;
    }
    double sums[kSquareLanes] = {};
    int64_t i = 0;
    for (; i + kSquareLanes <= size; i += kSquareLanes)
        for (int lane = 0; lane < kSquareLanes; ++lane) sums[lane] += double(squares[i + lane]);
    double total = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    for (; i < size; ++i) total += double(squares[i]);
    return total;
}

struct UsualSize {
    constexpr operator int64_t() const { return 32; }
};

void scale_errors_body(void* context, int thread, int threads) {
    const ScaleErrorsJob& job = *static_cast<const ScaleErrorsJob*>(context);
    for (int64_t row = job.count * thread / threads; row < job.count * (thread + 1) / threads; ++row) {
        const float *values = job.rows + row * job.size, step = job.steps[row];
        job.errors[row] =
            job.size == 32 ? row_error(job, values, step, UsualSize()) : row_error(job, values, step, job.size);
    }
}

}  // namespace

// Write to errors f64[count] the squared distance of each row of rows f32[count, size], size <= 128, to its nearest
// values `q * steps[row]` with an integer q from `low` to `high`, which are less than 2^22 in magnitude.
INTAGLIO_EXPORT void intaglio_scale_errors(const float* rows, const float* steps, int64_t count, int64_t size,
                                           double low, double high, int threads, double* errors) {
    ScaleErrorsJob job{rows, steps, count, size, float(low), float(high), errors};
    const int64_t most = count * size / kWeightsOfThread + 1;
    if (count) parallel_between_operators(scale_errors_body, &job, int(threads < most ? threads : most));
}
