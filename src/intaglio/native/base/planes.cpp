// Images with adjacent channels copied to planes of channels, by the threads that ran the program. PyTorch's threads
// would wait for more work on the cores that the next call needs, and so make it take twice as long.
#include "base/process_library.h"

#include <string.h>

namespace {

constexpr int64_t kPlanesBlock = 16;  // pixels and channels of a block: a line of the cache in each plane

struct PlanesJob {
    const uint32_t* pixels;  // [images, pixels, channels]
    uint32_t* planes;        // [images, channels, pixels]
    int64_t images, count, channels;
};

// Copy a block of `channels` of `pixels` whose neighbours are `pixel` elements apart to planes that are `plane` apart.
void copy_block(const uint32_t* from, int64_t pixel, uint32_t* to, int64_t plane, int64_t pixels, int64_t channels) {
    uint32_t block[kPlanesBlock][kPlanesBlock];
    for (int64_t p = 0; p < pixels; ++p)
        for (int64_t c = 0; c < channels; ++c) block[c][p] = from[p * pixel + c];
    for (int64_t c = 0; c < channels; ++c) memcpy(to + c * plane, block[c], size_t(pixels) * sizeof(uint32_t));
}

void planes_body(void* context, int thread, int threads) {
    const PlanesJob& job = *static_cast<const PlanesJob*>(context);
    const int64_t blocks = (job.count + kPlanesBlock - 1) / kPlanesBlock, all = job.images * blocks;
    for (int64_t unit = all * thread / threads; unit < all * (thread + 1) / threads; ++unit) {
        const int64_t image = unit / blocks * job.count * job.channels, first = unit % blocks * kPlanesBlock;
        const int64_t pixels = job.count - first < kPlanesBlock ? job.count - first : kPlanesBlock;
        for (int64_t channel = 0; channel < job.channels; channel += kPlanesBlock) {
            const uint32_t* from = job.pixels + image + first * job.channels + channel;
            uint32_t* to = job.planes + image + channel * job.count + first;
            const int64_t channels = job.channels - channel < kPlanesBlock ? job.channels - channel : kPlanesBlock;
            if (pixels == kPlanesBlock && channels == kPlanesBlock)  // sizes that the compiler knows
                copy_block(from, job.channels, to, job.count, kPlanesBlock, kPlanesBlock);
            else
                copy_block(from, job.channels, to, job.count, pixels, channels);
        }
    }
}

}  // namespace

// Copy elements of 4 bytes from [images, pixels, channels] to [images, channels, pixels].
INTAGLIO_EXPORT void intaglio_planes(const void* pixels, void* planes, int64_t images, int64_t count, int64_t channels,
                                     int threads) {
    PlanesJob job = {static_cast<const uint32_t*>(pixels), static_cast<uint32_t*>(planes), images, count, channels};
    intaglio_parallel_program(planes_body, &job, threads);
}
