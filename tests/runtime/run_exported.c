// Runs an exported program with one input once: run_exported weights.bin FILE SIZE ..., with the bytes of the input and
// the size of each of its axes. Writes the bytes of all outputs to the standard output. Compiled with
// -DHEADER="net.h" -DNET(name)=net_##name, where "net" is the name of the model.

#include <stdio.h>
#include <stdlib.h>

#include HEADER

enum { MOST = 16 };

static int fail(const char* step, int status) {
    fprintf(stderr, "%s: %s\n", step, NET(error)(status));
    return 1;
}

int main(int count, char** arguments) {
    NET(model) * model;
    int64_t sizes[MOST];
    const int64_t* shapes[] = {sizes};
    void* outputs[MOST];
    int status = NET(open)(arguments[1], &model);
    if (status) return fail("open", status);
    for (int axis = 0; axis < count - 3; ++axis) sizes[axis] = atoll(arguments[3 + axis]);
    if ((status = NET(resize)(model, shapes))) return fail("resize", status);
    const size_t bytes = NET(input_bytes)(model, 0);
    FILE* file = fopen(arguments[2], "rb");
    void* input = malloc(bytes + 1);
    if (!file || fread(input, 1, bytes, file) != bytes) return fail("input", status);
    fclose(file);
    for (int i = 0; i < NET(outputs)(); ++i) outputs[i] = calloc(NET(output_bytes)(model, i) + 1, 1);
    const void* inputs[] = {input};
    if ((status = NET(run)(model, inputs, outputs, 0))) return fail("run", status);
    for (int i = 0; i < NET(outputs)(); ++i) fwrite(outputs[i], 1, NET(output_bytes)(model, i), stdout);
    return NET(close)(model), 0;
}
