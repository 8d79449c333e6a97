// Counting over contiguous float32 arrays. Counts are integers and extrema are exact, so the result depends neither on
// the thread count nor on the float mode (pool.cpp sets it). Vectors are the compiler's own, as wide as a register.
#include "pool.h"

#include <pthread.h>
#include <string.h>

#define INTAGLIO_EXPORT extern "C" __attribute__((visibility("default")))

extern "C" void intaglio_parallel(IntaglioBody body, void* context, int threads);

namespace {

constexpr int kHalf = 4096;             // bins on each side of zero
constexpr int kBins = 2 * kHalf;
constexpr int kBlock = 1024;            // values whose bins are computed at once
constexpr int kCopies = 4;              // histograms per thread: equal neighbours do not wait for each other's store
constexpr int64_t kGrain = 1 << 16;     // values below which another thread costs more than it saves
constexpr int32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;
constexpr float kInf = __builtin_inff();

pthread_mutex_t merging = PTHREAD_MUTEX_INITIALIZER;

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

Floats load(const float* x) {
    Floats lanes;
    memcpy(&lanes, x, sizeof lanes);
    return lanes;
}

// The last `count` < kLanes values, and `filler` in the other lanes.
Floats load_tail(const float* x, int64_t count, float filler) {
    Floats lanes = filler - Floats{};
    memcpy(&lanes, x, size_t(count) * sizeof(float));
    return lanes;
}

Ints magnitude_of(Floats x) { return Ints(x) & kMagnitude; }
Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
Floats larger(Floats a, Floats b) { return a > b ? a : b; }

int useful_threads(int64_t count, int threads) {
    int64_t most = (count + kGrain - 1) / kGrain;
    return int(threads < most ? threads : most);
}

struct Share {
    int64_t begin, end;
};

Share share(int64_t count, int thread, int threads) {
    return {count * thread / threads, count * (thread + 1) / threads};
}

}  // namespace

// ---- extrema -------------------------------------------------------------------------------------------------------

struct IntaglioExtrema {
    double low, high;  // of the finite values; +inf, -inf when there are none. double: it survives a flushing caller
    int64_t nans, infinities, zeros;
};

namespace {

struct Extrema {
    Floats low = kInf - Floats{}, high = -kInf - Floats{};
    Ints nans = {}, infinities = {}, zeros = {};  // per lane; a true comparison is -1

    void add(Floats x) {
        Ints magnitude = magnitude_of(x);
        Ints finite = magnitude < kInfinity;
        low = smaller(finite ? x : kInf - Floats{}, low);
        high = larger(finite ? x : -kInf - Floats{}, high);
        nans -= magnitude > kInfinity;
        infinities -= magnitude == kInfinity;
        zeros -= magnitude == 0;
    }

    // Fewer than 2^31 values for each lane.
    void add(const float* x, int64_t count) {
        int64_t i = 0;
        for (; i + kLanes <= count; i += kLanes) add(load(x + i));
        if (i == count) return;
        add(load_tail(x + i, count - i, kInf));
        for (int64_t lane = count - i; lane < kLanes; ++lane) --infinities[lane];
    }

    void add_to(IntaglioExtrema& total) const {
        for (int lane = 0; lane < kLanes; ++lane) {
            total.low = low[lane] < total.low ? low[lane] : total.low;
            total.high = high[lane] > total.high ? high[lane] : total.high;
            total.nans += nans[lane];
            total.infinities += infinities[lane];
            total.zeros += zeros[lane];
        }
    }
};

struct ExtremaJob {
    const float* x;
    int64_t count;
    IntaglioExtrema* result;
};

void extrema_body(void* context, int thread, int threads) {
    const ExtremaJob& job = *static_cast<ExtremaJob*>(context);
    Share mine = share(job.count, thread, threads);
    Extrema local;
    local.add(job.x + mine.begin, mine.end - mine.begin);
    pthread_mutex_lock(&merging);
    local.add_to(*job.result);
    pthread_mutex_unlock(&merging);
}

}  // namespace

INTAGLIO_EXPORT void intaglio_extrema(const float* x, int64_t count, int threads, IntaglioExtrema* result) {
    *result = IntaglioExtrema{kInf, -kInf, 0, 0, 0};
    ExtremaJob job{x, count, result};
    intaglio_parallel(extrema_body, &job, useful_threads(count, threads));
    result->low += 0.0;  // -0 becomes 0
    result->high += 0.0;
}

// ---- extrema per channel -------------------------------------------------------------------------------------------

namespace {

struct ChannelJob {
    const float* x;
    int64_t outer, channels, inner;
    float *low, *high;
};

// Values of different channels are neighbours: one lane per channel.
void extend_lanes(const float* x, int64_t count, float* low, float* high) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        Extrema lanes{load(low + i), load(high + i)};
        lanes.add(load(x + i));
        memcpy(low + i, &lanes.low, sizeof lanes.low);
        memcpy(high + i, &lanes.high, sizeof lanes.high);
    }
    for (; i < count; ++i) {
        IntaglioExtrema one{low[i], high[i], 0, 0, 0};
        Extrema lanes;
        lanes.add(load_tail(x + i, 1, kInf));
        lanes.add_to(one);
        low[i] = float(one.low);
        high[i] = float(one.high);
    }
}

void channel_body(void* context, int thread, int threads) {
    const ChannelJob& job = *static_cast<ChannelJob*>(context);
    Share mine = share(job.channels, thread, threads);
    for (int64_t c = mine.begin; c < mine.end; ++c) job.low[c] = kInf, job.high[c] = -kInf;
    for (int64_t o = 0; o < job.outer; ++o) {
        const float* row = job.x + o * job.channels * job.inner;
        if (job.inner == 1) {
            extend_lanes(row + mine.begin, mine.end - mine.begin, job.low + mine.begin, job.high + mine.begin);
            continue;
        }
        for (int64_t c = mine.begin; c < mine.end; ++c) {
            IntaglioExtrema row_total{job.low[c], job.high[c], 0, 0, 0};
            Extrema local;
            local.add(row + c * job.inner, job.inner);
            local.add_to(row_total);
            job.low[c] = float(row_total.low);
            job.high[c] = float(row_total.high);
        }
    }
    for (int64_t c = mine.begin; c < mine.end; ++c) job.low[c] += 0.0f, job.high[c] += 0.0f;
}

}  // namespace

// x[outer, channels, inner] -> low[channels], high[channels] of the finite values.
INTAGLIO_EXPORT void intaglio_channel_extrema(const float* x, int64_t outer, int64_t channels, int64_t inner,
                                              int threads, float* low, float* high) {
    ChannelJob job{x, outer, channels, inner, low, high};
    threads = useful_threads(outer * channels * inner, threads);
    intaglio_parallel(channel_body, &job, threads < channels ? threads : int(channels));
}

// ---- dyadic histogram ----------------------------------------------------------------------------------------------

namespace {

struct HistogramJob {
    const float* x;
    int64_t count;
    float factor_a, factor_b;  // 2^-exponent = factor_a * factor_b: it need not be a float itself
    int64_t* bins;
};

float power_of_two(int exponent) { return __builtin_bit_cast(float, uint32_t(exponent + 127) << 23); }

// floor(x * 2^-exponent) + kHalf, and kBins, which nobody reads, for what is not counted. From the magnitude, so that a
// product that underflows still lands below zero when x is negative: floor(-a) = -trunc(a), less 1 unless a is whole.
Ints bins_of(const HistogramJob& job, Floats x) {
    Ints magnitude = magnitude_of(x);
    Floats size = Floats(magnitude) * job.factor_a * job.factor_b;
    size = smaller(size, float(kHalf) - Floats{});
    Ints whole = __builtin_convertvector(size, Ints);
    Ints is_whole = (__builtin_convertvector(whole, Floats) == size) & (whole != 0);
    Ints below = kHalf - 1 - whole - is_whole;
    Ints above = kHalf + whole;
    below = below > 0 ? below : 0 - Ints{};
    above = above < kBins ? above : kBins - 1 - Ints{};
    Ints counted = (magnitude != 0) & (magnitude < kInfinity);
    return counted ? (Ints(x) < 0 ? below : above) : kBins - Ints{};
}

// The bins of up to kBlock values, in whole vectors.
int find_bins(const HistogramJob& job, const float* x, int64_t count, int32_t* found) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        Ints bins = bins_of(job, load(x + i));
        memcpy(found + i, &bins, sizeof bins);
    }
    if (i == count) return i;
    Ints bins = bins_of(job, load_tail(x + i, count - i, 0.0f));
    memcpy(found + i, &bins, sizeof bins);
    return i + kLanes;
}

void histogram_body(void* context, int thread, int threads) {
    const HistogramJob& job = *static_cast<HistogramJob*>(context);
    static_assert(kLanes % kCopies == 0 && kBlock % kLanes == 0, "blocks are counted in groups of kCopies");
    uint32_t copies[kCopies][kBins + 16];
    int32_t found[kBlock];
    memset(copies, 0, sizeof copies);
    Share mine = share(job.count, thread, threads);
    for (int64_t i = mine.begin; i < mine.end; i += kBlock) {
        int64_t left = mine.end - i;
        int count = find_bins(job, job.x + i, left < kBlock ? left : kBlock, found);
        for (int j = 0; j < count; j += kCopies)
            for (int c = 0; c < kCopies; ++c) ++copies[c][found[j + c]];
    }
    pthread_mutex_lock(&merging);
    for (int b = 0; b < kBins; ++b)
        for (int c = 0; c < kCopies; ++c) job.bins[b] += copies[c][b];
    pthread_mutex_unlock(&merging);
}

}  // namespace

// Adds the number of values in each bin to bins[2 * kHalf]. Fewer than 2^32 values per thread.
INTAGLIO_EXPORT void intaglio_dyadic_histogram(const float* x, int64_t count, int exponent, int64_t* bins,
                                               int threads) {
    int half = -exponent / 2;
    HistogramJob job{x, count, power_of_two(half), power_of_two(-exponent - half), bins};
    if (count > kBlock) return intaglio_parallel(histogram_body, &job, useful_threads(count, threads));
    int32_t found[kBlock];
    int vectors = find_bins(job, x, count, found);
    for (int i = 0; i < vectors; ++i)
        if (found[i] != kBins) ++bins[found[i]];
}
