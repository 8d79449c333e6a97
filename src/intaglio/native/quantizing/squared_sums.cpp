// Sums of squares of two float32 arrays and of their difference. Each block of values has the same partial sums in the
// same order for any number of threads and any vector length, so the results do not depend on these.
#include "base/process_library.h"

#include <string.h>

namespace {

constexpr int kPartial = 16;                 // partial sums of a block: value i of it adds to number i % kPartial
constexpr int64_t kBlockOfSums = 1 << 12;    // values of a block
constexpr int64_t kBlocksOfThread = 1 << 4;  // with fewer, another thread costs more than it saves
constexpr int kSumKinds = 3;                 // of the exact values, of the others and of their differences

struct SquaredSumsJob {
    const float *exact, *other;
    int64_t count;
    double* blocks;  // [blocks, kSumKinds]
};

struct PartialSums {
    double of[kSumKinds][kPartial] = {};

    // Add `kPartial` values of each array. Those where the exact value is not finite count as zero.
    void add(const float* exact, const float* other) {
        for (int lane = 0; lane < kPartial; ++lane) {
            int32_t bits;
            memcpy(&bits, exact + lane, sizeof bits);
            const bool finite = (bits & 0x7fffffff) < 0x7f800000;
            const double a = finite ? exact[lane] : 0.0f, b = finite ? other[lane] : 0.0f;
            of[0][lane] += a * a;
            of[1][lane] += b * b;
            of[2][lane] += (a - b) * (a - b);
        }
    }
};

void squared_sums_body(void* context, int thread, int threads) {
    const SquaredSumsJob& job = *static_cast<const SquaredSumsJob*>(context);
    const int64_t blocks = (job.count + kBlockOfSums - 1) / kBlockOfSums;
    for (int64_t block = blocks * thread / threads; block < blocks * (thread + 1) / threads; ++block) {
        PartialSums sums;
        int64_t i = block * kBlockOfSums;
        const int64_t end = i + kBlockOfSums < job.count ? i + kBlockOfSums : job.count;
        for (; i + kPartial <= end; i += kPartial) sums.add(job.exact + i, job.other + i);
        if (i < end) {
            float exact[kPartial] = {}, other[kPartial] = {};
            memcpy(exact, job.exact + i, size_t(end - i) * sizeof(float));
            memcpy(other, job.other + i, size_t(end - i) * sizeof(float));
            sums.add(exact, other);
        }
        for (int kind = 0; kind < kSumKinds; ++kind) {
            double total = 0;
            for (int lane = 0; lane < kPartial; ++lane) total += sums.of[kind][lane];
            job.blocks[block * kSumKinds + kind] = total;
        }
    }
}

}  // namespace

// Write the sums for each block of 4096 values of exact f32[count] and other f32[count] to blocks f64[blocks, 3]: of
// the squares of the exact values, of the other values and of their differences, where the exact value is finite.
INTAGLIO_EXPORT void intaglio_squared_sums(const float* exact, const float* other, int64_t count, int threads,
                                           double* blocks) {
    SquaredSumsJob job{exact, other, count, blocks};
    const int64_t most = count / (kBlockOfSums * kBlocksOfThread) + 1;
    if (count) parallel_between_operators(squared_sums_body, &job, int(threads < most ? threads : most));
}
