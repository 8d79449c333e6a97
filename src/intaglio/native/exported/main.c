// An example: net_main weights.bin SIZE [FILE ...] runs the network once and prints the first eight elements of every
// float32 output. SIZE is the size of all free dimensions. Each FILE has the bytes of an input, in order; an input
// without a file has random numbers if it is float32, else zeros.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "net.h"

static void check(int32_t status, const char* step) {
    if (status != NET_OK) fprintf(stderr, "%s: %s\n", step, net_error(status)), exit(1);
}

int main(int count, char** arguments) {
    net_model* model;
    int64_t sizes[NET_INPUTS + 1][NET_RANK];
    const int64_t* shapes[NET_INPUTS + 1];
    void *inputs[NET_INPUTS + 1], *outputs[NET_OUTPUTS + 1];
    check(net_open(count > 1 ? arguments[1] : "weights.bin", &model), "open");
    for (int i = 0; i < net_inputs(); shapes[i] = sizes[i], ++i)
        for (int axis = 0; axis < net_input(i)->rank; ++axis)
            sizes[i][axis] = net_input(i)->sizes[axis] < 0 ? atoll(count > 2 ? arguments[2] : "1") : net_input(i)->sizes[axis];
    check(net_resize(model, shapes), "resize");
    for (int i = 0; i < net_inputs(); ++i) {
        const size_t bytes = net_input_bytes(model, i), floats = net_input(i)->dtype == NET_F32 ? bytes / 4 : 0;
        FILE* file = i + 3 < count ? fopen(arguments[i + 3], "rb") : NULL;
        inputs[i] = calloc(bytes + 1, 1);
        for (size_t j = 0; j < floats; ++j) ((float*)inputs[i])[j] = (float)rand() / (float)RAND_MAX;
        if (i + 3 < count && (!file || fread(inputs[i], 1, bytes, file) != bytes)) check(NET_FILE, arguments[i + 3]);
    }
    for (int i = 0; i < net_outputs(); ++i) outputs[i] = calloc(net_output_bytes(model, i) + 1, 1);
    check(net_run(model, (const void* const*)inputs, outputs, 0), "run");
    for (int i = 0; i < net_outputs(); ++i) {
        printf("%s %s, %s:", net_output(i)->name, net_output(i)->shape, net_isa(model));
        const size_t floats = net_output(i)->dtype == NET_F32 ? net_output_bytes(model, i) / 4 : 0;
        for (size_t j = 0; j < floats && j < 8; ++j) printf(" %.9g", ((float*)outputs[i])[j]);
        printf("\n");
    }
    return net_close(model), 0;
}
