// Runs an exported program once and writes the bytes of all outputs to the standard output.
//
//     run_exported weights.bin THREADS [FILE BYTES RANK SIZE ...] ...
//
// For each input: a file with its bytes, 1 if they are uint8 images for a model that takes float32 too (else 0), the
// number of its axes, and their sizes. Compiled with -DHEADER="net.h" -DNET(name)=net_##name, where "net" is the name
// of the model.

#include <stdio.h>
#include <stdlib.h>

#include HEADER

enum { MOST = 16, UINT8 = 1 };

static int fail(const char* step, int status) {
    fprintf(stderr, "%s: %s\n", step, NET(error)(status));
    return 1;
}

int main(int count, char** arguments) {
    NET(model) * model;
    int64_t sizes[MOST][MOST];
    int ranks[MOST], bytes[MOST];
    const char* files[MOST];
    const int64_t* shapes[MOST];
    void *inputs[MOST], *outputs[MOST];
    for (int i = 0, next = 3; next < count; ++i) {
        files[i] = arguments[next++], bytes[i] = atoi(arguments[next++]), ranks[i] = atoi(arguments[next++]);
        for (int axis = 0; axis < ranks[i]; ++axis) sizes[i][axis] = atoll(arguments[next++]);
        shapes[i] = sizes[i];
    }
    int status = NET(open)(arguments[1], &model);
    if (status) return fail("open", status);
    if ((status = NET(resize)(model, shapes))) return fail("resize", status);
    for (int i = 0; i < NET(inputs)(); ++i) {
        if (bytes[i]) {
            int64_t strides[MOST], step = 1;
            for (int axis = ranks[i] - 1; axis >= 0; step *= sizes[i][axis--]) strides[axis] = step;
            if ((status = NET(read_as)(model, i, UINT8, strides))) return fail("read_as", status);
        }
        size_t size = bytes[i] ? 1 : NET(input_bytes)(model, i);
        for (int axis = 0; bytes[i] && axis < ranks[i]; ++axis) size *= (size_t)sizes[i][axis];
        FILE* file = fopen(files[i], "rb");
        inputs[i] = malloc(size);  // no byte more, so that a sanitizer sees what is read behind it
        if (!file || fread(inputs[i], 1, size, file) != size) return fail("input", status);
        fclose(file);
    }
    for (int i = 0; i < NET(outputs)(); ++i) outputs[i] = calloc(NET(output_bytes)(model, i), 1);
    if ((status = NET(run)(model, (const void* const*)inputs, outputs, atoi(arguments[2])))) return fail("run", status);
    for (int i = 0; i < NET(outputs)(); ++i) fwrite(outputs[i], 1, NET(output_bytes)(model, i), stdout);
    for (int i = 0; i < NET(outputs)(); ++i) free(outputs[i]);
    for (int i = 0; i < NET(inputs)(); ++i) free(inputs[i]);
    return NET(close)(model), 0;
}
