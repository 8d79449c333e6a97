// Opens changed copies of a file of weights, each in memory of exactly its size, so that AddressSanitizer sees every
// read outside of it. What opens is run, and counted in the output.
//
//     damaged_weights FILE COUNT SEED [FIRST]
//
// A copy depends on SEED and its number only; FIRST is the number of the first one.
#include "net.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t state;

// splitmix64: numbers that follow each other as seeds give different draws.
static uint64_t draw(uint64_t below) {
    uint64_t mixed = state += 0x9e3779b97f4a7c15;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9, mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111eb;
    mixed ^= mixed >> 31;
    return below ? mixed % below : mixed;
}

// Change the copy, which has room for 64 more bytes than the original, and return its new size.
static size_t change(unsigned char* copy, size_t size) {
    const size_t words = size / 8;
    uint64_t word;
    switch (draw(8)) {
        case 0:
            copy[draw(size)] ^= (unsigned char)(1u << draw(8));
            break;
        case 1:
            copy[8 * draw(words) + 7] ^= 0x80, copy[8 * draw(words) + 7] ^= 0x80;
            break;
        case 2:
            size = draw(size);
            break;
        case 3:
            memset(copy + size, 0, 64), size += 1 + draw(64);
            break;
        case 4:  // a short file that says that it is complete
            size = 64 + draw(size - 64), word = size;
            memcpy(copy + 24, &word, 8);
            break;
        case 5:
            word = draw(0), memcpy(copy + 8 * draw(8), &word, 8);
            break;
        case 6:
            memset(copy + 64 + draw(size - 64), 0xff, 1);
            break;
        default:
            word = draw(0), memcpy(copy + 64 + 8 * draw(words - 8), &word, 8);
    }
    return size;
}

static void run(net_model* model) {
    int64_t sizes[NET_INPUTS][NET_RANK];
    const int64_t* shapes[NET_INPUTS];
    void *inputs[NET_INPUTS], *outputs[NET_OUTPUTS];
    for (int i = 0; i < NET_INPUTS; shapes[i] = sizes[i], ++i)
        for (int axis = 0; axis < net_input(i)->rank; ++axis)
            sizes[i][axis] = net_input(i)->sizes[axis] < 0 ? 3 : net_input(i)->sizes[axis];
    if (net_resize(model, shapes) != NET_OK) exit(2);
    for (int i = 0; i < NET_INPUTS; ++i) inputs[i] = calloc(net_input_bytes(model, i), 1);
    for (int i = 0; i < NET_OUTPUTS; ++i) outputs[i] = calloc(net_output_bytes(model, i), 1);
    if (net_run(model, (const void* const*)inputs, outputs, 2) != NET_OK) exit(2);
    for (int i = 0; i < NET_INPUTS; ++i) free(inputs[i]);
    for (int i = 0; i < NET_OUTPUTS; ++i) free(outputs[i]);
}

int main(int count, char** arguments) {
    static unsigned char original[1 << 20], changed[(1 << 20) + 64];
    if (count < 4) return 1;
    FILE* file = fopen(arguments[1], "rb");
    const size_t size = file ? fread(original, 1, sizeof original, file) : 0;
    if (size < 128 || size == sizeof original) return 1;
    const uint64_t seed = strtoull(arguments[3], NULL, 10);
    const long first = count > 4 ? atol(arguments[4]) : 0;
    int opened = 0, same = 0;
    for (long i = -1; i < atol(arguments[2]); ++i) {  // the first one is not changed
        memcpy(changed, original, size);
        state = seed << 32 ^ (uint64_t)(first + i);
        const size_t bytes = i < 0 ? size : change(changed, size);
        void* copy = NULL;
        if (posix_memalign(&copy, 64, bytes ? bytes : 1)) return 1;
        memcpy(copy, changed, bytes);
        net_model* model = NULL;
        const int32_t status = net_open_memory(copy, bytes, &model);
        const int equal = bytes == size && !memcmp(changed, original, size);
        if ((status == NET_OK) != (model != NULL) || (status == NET_OK) != equal) {
            printf("case %ld: status %d\n", first + i, status);
            return 2;
        }
        if (status == NET_OK) run(model), ++opened;
        same += equal;
        net_close(model);
        free(copy);
    }
    fclose(file);
    printf("%d opened, %d unchanged\n", opened, same);
    return opened == same ? 0 : 2;
}
