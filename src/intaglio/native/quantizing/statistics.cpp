// Statistics of contiguous float32 arrays for calibration: extrema, histograms and sketches. Counts are integers and
// extrema are exact, so the results depend neither on the number of threads nor on the float mode, which pool.cpp sets.
// Vectors are those of the compiler, as wide as a register.
#include "base/process_library.h"

#include <pthread.h>
#include <string.h>

namespace {

constexpr int kHalf = 4096;  // bins of the histogram on each side of zero
constexpr int kBins = 2 * kHalf;
constexpr int kLogHalf = 12;
constexpr int kKept = 5;  // mantissa bits in the index of a bin of the sketch
constexpr int kRest = 23 - kKept;
constexpr int kSketch = 1 << (9 + kKept);
constexpr int kSums = 1 << 9;        // signs and exponents
constexpr int kBlock = 1024;         // values whose bins are computed at once
constexpr int kLowest = -160;        // exponent of a histogram of the smallest denormals
constexpr int64_t kGrain = 1 << 16;  // values per thread; with fewer, another thread costs more than it saves
constexpr int32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;
constexpr float kInf = __builtin_inff();

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

// Load the last `count` < kLanes values, and set the other lanes to `filler`.
Floats load_tail(const float* x, int64_t count, float filler) {
    Floats lanes = filler - Floats{};
    memcpy(&lanes, x, size_t(count) * sizeof(float));
    return lanes;
}

Ints magnitude_of(Floats x) { return Ints(x) & kMagnitude; }
Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// Return how many threads are worth using for `count` values.
int useful_threads(int64_t count, int threads) {
    int64_t most = (count + kGrain - 1) / kGrain;
    return int(threads < most ? threads : most);
}

// The items that a thread works on.
struct Items {
    int64_t begin, end;
};

Items items_of(int64_t count, int thread, int threads) {
    return {count * thread / threads, count * (thread + 1) / threads};
}

}  // namespace

// ---- extrema -------------------------------------------------------------------------------------------------------

namespace {

struct Ends {
    double low = kInf, high = -kInf;  // double, so that denormals survive if the caller flushes float32 ones
};

// Extrema of finite values in each lane.
struct Extrema {
    Floats low = kInf - Floats{}, high = -kInf - Floats{};

    // Include the finite lanes of x and return their mask.
    Ints add(Floats x) {
        Ints finite = magnitude_of(x) < kInfinity;
        low = smaller(finite ? x : kInf - Floats{}, low);
        high = larger(finite ? x : -kInf - Floats{}, high);
        return finite;
    }

    // Extend `ends` by the extrema of all lanes.
    void add_to(Ends& ends) const {
        for (int lane = 0; lane < kLanes; ++lane) {
            ends.low = low[lane] < ends.low ? low[lane] : ends.low;
            ends.high = high[lane] > ends.high ? high[lane] : ends.high;
        }
    }
};

}  // namespace

// ---- extrema per channel -------------------------------------------------------------------------------------------

namespace {

struct ChannelJob {
    const float* x;
    int64_t outer, channels, inner;
    float *low, *high;
};

Extrema extrema_of(const float* x, int64_t count) {
    Extrema found;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) found.add(load(x + i));
    if (i < count) found.add(load_tail(x + i, count - i, kInf));
    return found;
}

// Extend extrema per channel by one pixel. The channels are contiguous: one lane each.
void extend_lanes(const float* x, int64_t count, float* low, float* high) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        Extrema lanes{load(low + i), load(high + i)};
        lanes.add(load(x + i));
        memcpy(low + i, &lanes.low, sizeof lanes.low);
        memcpy(high + i, &lanes.high, sizeof lanes.high);
    }
    for (; i < count; ++i) {
        Ends one{low[i], high[i]};
        Extrema lanes;
        lanes.add(load_tail(x + i, 1, kInf));
        lanes.add_to(one);
        low[i] = float(one.low);
        high[i] = float(one.high);
    }
}

void channel_body(void* context, int thread, int threads) {
    const ChannelJob& job = *static_cast<ChannelJob*>(context);
    Items mine = items_of(job.channels, thread, threads);
    for (int64_t c = mine.begin; c < mine.end; ++c) job.low[c] = kInf, job.high[c] = -kInf;
    for (int64_t o = 0; o < job.outer; ++o) {
        const float* row = job.x + o * job.channels * job.inner;
        if (job.inner == 1) {
            extend_lanes(row + mine.begin, mine.end - mine.begin, job.low + mine.begin, job.high + mine.begin);
            continue;
        }
        for (int64_t c = mine.begin; c < mine.end; ++c) {
            Ends ends{job.low[c], job.high[c]};
            extrema_of(row + c * job.inner, job.inner).add_to(ends);
            job.low[c] = float(ends.low);
            job.high[c] = float(ends.high);
        }
    }
    for (int64_t c = mine.begin; c < mine.end; ++c) job.low[c] += 0.0f, job.high[c] += 0.0f;
}

}  // namespace

// Compute the extrema of the finite values of each channel: x f32[outer, channels, inner] -> low, high f32[channels].
INTAGLIO_EXPORT void intaglio_channel_extrema(const float* x, int64_t outer, int64_t channels, int64_t inner,
                                              int threads, float* low, float* high) {
    ChannelJob job{x, outer, channels, inner, low, high};
    threads = useful_threads(outer * channels * inner, threads);
    parallel_between_operators(channel_body, &job, threads < channels ? threads : int(channels));
}

// ---- counts --------------------------------------------------------------------------------------------------------

struct IntaglioCounts {
    double low, high;  // of the finite values; +inf and -inf if there are none
    int64_t nans, infinities, zeros;
    int64_t exponent;  // of the histogram: the smallest one whose bins hold every finite value
};

namespace {

struct CountJob {
    const float* x;
    int64_t rows, columns;
    float *low, *high;              // [rows]
    int64_t *bins, *sketch, *sums;  // [kBins], [kSketch], [kSums]
    IntaglioCounts* total;
    // Held while a thread adds its counts to those of the job. It belongs to the job and not to the library, because a
    // child of fork would have a copy that a thread held, which the child does not have.
    pthread_mutex_t merging;
};

float power_of_two(int exponent) { return __builtin_bit_cast(float, uint32_t(exponent + 127) << 23); }

// Return the smallest k with value * 2^-k < kHalf, from the bits of a finite magnitude above zero.
int exponent_of(int32_t magnitude) {
    int above = magnitude >> 23 ? (magnitude >> 23) - 126 : 32 - __builtin_clz(uint32_t(magnitude)) - 149;
    return above - kLogHalf;
}

// Merge bins of width w into bins of width 2^steps * w.
template <class Count>
void widen(Count* bins, int64_t steps) {
    Count any = 0;
    for (int i = 0; i < kBins; ++i) any |= bins[i];
    if (!any) return;
    for (steps = steps <= kLogHalf ? steps : kLogHalf; steps > 0; --steps) {
        Count wide[kHalf];
        for (int i = 0; i < kHalf; ++i) wide[i] = bins[2 * i] + bins[2 * i + 1];
        memset(bins, 0, kBins * sizeof(Count));
        memcpy(bins + kHalf / 2, wide, sizeof wide);
    }
}

// Counts of one thread. Past their bins, both arrays have one entry per lane for values that are not counted. One entry
// per lane, because increments of the same entry would wait for each other's store.
struct Counts {
    int64_t exponent = kLowest;
    uint32_t bins[kBins + kLanes];
    // The upper 24 bits of an entry count values. The lower 40 bits sum the mantissa bits that the index of the bin
    // leaves out. One addition thus counts a value and sums it exactly.
    uint64_t sketch[kSketch + kLanes];
    int64_t unflushed = 0;
    int64_t nans = 0, infinities = 0, zeros = 0;
    Ends ends;

    Counts() {
        memset(bins, 0, sizeof bins);
        memset(sketch, 0, sizeof sketch);
    }
};

constexpr int kSumBits = 40;
constexpr int64_t kFlush = int64_t(1) << (kSumBits - kRest);  // values whose sum fits into the lower bits
constexpr uint64_t kOne = uint64_t(1) << kSumBits;

struct Scaling {
    float a, b;  // 2^-exponent = a * b; the power itself may not be a float32

    explicit Scaling(int64_t exponent) {
        int half = int(-exponent / 2);
        a = power_of_two(half);
        b = power_of_two(int(-exponent) - half);
    }

    // Return the bin floor(x * 2^-exponent) + kHalf. It is computed from the magnitude, so that a negative x whose
    // product underflows is still below zero: floor(-a) = -trunc(a), minus 1 unless a is an integer.
    Ints bins_of(Floats x, Ints counted) const {
        Floats size = Floats(magnitude_of(x)) * a * b;
        Ints whole = __builtin_convertvector(counted ? size : Floats{}, Ints);
        Ints is_whole = (__builtin_convertvector(whole, Floats) == size) & (whole != 0);
        return Ints(x) < 0 ? kHalf - 1 - whole - is_whole : kHalf + whole;
    }
};

Ints lane_numbers() {
    Ints numbers = {};
    for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
    return numbers;
}

// Count up to kBlock values. The last vector is filled up with NaN, which are subtracted again.
void count_block(Counts& counts, Extrema& row, const float* x, int64_t count) {
    Floats values[kBlock / kLanes];
    const int vectors = int((count + kLanes - 1) / kLanes), whole = int(count / kLanes);
    memcpy(values, x, size_t(whole) * sizeof(Floats));
    if (whole < vectors) values[whole] = load_tail(x + whole * kLanes, count - whole * kLanes, __builtin_nanf(""));
    Ints nans = {}, infinities = {}, zeros = {}, most = {};
    for (int v = 0; v < vectors; ++v) {
        Ints magnitude = magnitude_of(values[v]);
        Ints finite = row.add(values[v]);
        Ints sized = finite & magnitude;
        most = sized > most ? sized : most;
        nans -= magnitude > kInfinity;
        infinities -= magnitude == kInfinity;
        zeros -= magnitude == 0;
    }
    int32_t largest = 0;
    counts.nans -= vectors * kLanes - count;
    for (int lane = 0; lane < kLanes; ++lane) {
        largest = most[lane] > largest ? most[lane] : largest;
        counts.nans += nans[lane];
        counts.infinities += infinities[lane];
        counts.zeros += zeros[lane];
    }
    if (!largest) return;
    if (int exponent = exponent_of(largest); exponent > counts.exponent) {
        widen(counts.bins, exponent - counts.exponent);
        counts.exponent = exponent;
    }
    const Scaling scaling(counts.exponent);
    const Ints lanes = lane_numbers();
    int32_t bins[kBlock], sketch[kBlock];
    for (int v = 0; v < vectors; ++v) {
        Ints magnitude = magnitude_of(values[v]);
        Ints counted = (magnitude != 0) & (magnitude < kInfinity);
        Ints found = counted ? scaling.bins_of(values[v], counted) : kBins + lanes;
        memcpy(bins + v * kLanes, &found, sizeof found);
        found = counted ? (Ints(values[v]) >> kRest) & (kSketch - 1) : kSketch + lanes;
        memcpy(sketch + v * kLanes, &found, sizeof found);
    }
    const uint32_t* bits = reinterpret_cast<const uint32_t*>(values);
    for (int j = 0; j < vectors * kLanes; ++j) {
        ++counts.bins[bins[j]];
        counts.sketch[sketch[j]] += kOne | (bits[j] & ((1u << kRest) - 1));
    }
    counts.unflushed += kBlock;
}

// Add the histogram and the sketch of a thread to those of the job and clear them. The caller holds `job.merging`.
void flush(const CountJob& job, Counts& counts) {
    for (int i = 0; i < kSketch; ++i) {
        const int64_t found = int64_t(counts.sketch[i] >> kSumBits), rest = int64_t(counts.sketch[i] & (kOne - 1));
        if (!found) continue;
        const int64_t kept = (i & ((1 << kKept) - 1)) | ((i >> kKept) & 255 ? 1 << kKept : 0);
        job.sketch[i] += found;
        job.sums[i >> kKept] += found * (kept << kRest) + rest;
        counts.sketch[i] = 0;
    }
    if (counts.exponent > job.total->exponent) {
        widen(job.bins, counts.exponent - job.total->exponent);
        job.total->exponent = counts.exponent;
    } else {
        widen(counts.bins, job.total->exponent - counts.exponent);
        counts.exponent = job.total->exponent;
    }
    for (int b = 0; b < kBins; ++b) job.bins[b] += counts.bins[b];
    memset(counts.bins, 0, sizeof counts.bins);
    counts.unflushed = 0;
}

// Add all counts of a thread to those of the job. The caller holds `job.merging`.
void finish(const CountJob& job, Counts& counts) {
    flush(job, counts);
    IntaglioCounts& total = *job.total;
    total.nans += counts.nans;
    total.infinities += counts.infinities;
    total.zeros += counts.zeros;
    total.low = counts.ends.low < total.low ? counts.ends.low : total.low;
    total.high = counts.ends.high > total.high ? counts.ends.high : total.high;
}

void count_body(void* context, int thread, int threads) {
    CountJob& job = *static_cast<CountJob*>(context);
    Items mine = items_of(job.rows * job.columns, thread, threads);
    Counts counts;
    for (int64_t i = mine.begin; i < mine.end;) {
        const int64_t row = i / job.columns, begin = i;
        const int64_t end = (row + 1) * job.columns < mine.end ? (row + 1) * job.columns : mine.end;
        Extrema extrema;
        for (; i < end; i += kBlock) {
            count_block(counts, extrema, job.x + i, end - i < kBlock ? end - i : kBlock);
            if (counts.unflushed < kFlush) continue;
            pthread_mutex_lock(&job.merging);
            flush(job, counts);
            pthread_mutex_unlock(&job.merging);
        }
        i = end;
        Ends ends;
        extrema.add_to(ends);
        ends.low += 0.0;  // -0 becomes 0
        ends.high += 0.0;
        counts.ends.low = ends.low < counts.ends.low ? ends.low : counts.ends.low;
        counts.ends.high = ends.high > counts.ends.high ? ends.high : counts.ends.high;
        const bool shared = end - begin < job.columns;  // another thread counts the rest of this row
        if (shared) pthread_mutex_lock(&job.merging);
        job.low[row] = float(ends.low) < job.low[row] ? float(ends.low) : job.low[row];
        job.high[row] = float(ends.high) > job.high[row] ? float(ends.high) : job.high[row];
        if (shared) pthread_mutex_unlock(&job.merging);
    }
    pthread_mutex_lock(&job.merging);
    finish(job, counts);
    pthread_mutex_unlock(&job.merging);
}

}  // namespace

// Count the values of x f32[rows, columns]: extrema of each row to low, high f32[rows], and totals to `total`. The
// arrays of counts are zero before the call: bins[kBins] (bin i holds values in [i - kHalf, i - kHalf + 1) *
// 2^exponent), sketch[kSketch] (by sign, exponent and kKept bits of the mantissa) and sums[kSums] (mantissas as
// integers, by sign and exponent). They do not include zeros, NaN and infinities.
INTAGLIO_EXPORT void intaglio_count(const float* x, int64_t rows, int64_t columns, int threads, float* low, float* high,
                                    int64_t* bins, int64_t* sketch, int64_t* sums, IntaglioCounts* total) {
    *total = IntaglioCounts{kInf, -kInf, 0, 0, 0, kLowest};
    for (int64_t row = 0; row < rows; ++row) low[row] = kInf, high[row] = -kInf;
    CountJob job{x, rows, columns, low, high, bins, sketch, sums, total, PTHREAD_MUTEX_INITIALIZER};
    if (rows * columns) parallel_between_operators(count_body, &job, useful_threads(rows * columns, threads));
}
