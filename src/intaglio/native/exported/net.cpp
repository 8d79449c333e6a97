// The functions of net.h: open weights, plan memory for the sizes of a call, and run calls. kernels/description.h
// describes the network. This is C++ that does not need the C++ standard library.
#pragma GCC visibility push(default)
#include "net.h"
#pragma GCC visibility pop

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// These functions get names of this network's own, because a program may be linked with several exported networks.
#define intaglio_parallel net_parallel
#define intaglio_parallel_shared net_parallel_shared
#include "kernels/pool.cpp"
#include "kernels/image.h"

#if defined(__FAST_MATH__)
#error "results would not be those of the network: compile without -ffast-math and -Ofast"
#endif

namespace {

// The memory order in which the generated program reads an input: any strides, or dense in one of two orders. It writes
// each output dense in one of the two.
enum Layout { ANY_STRIDES, ROW_MAJOR, CHANNELS_LAST };

// How the generated program takes an input or an output.
struct Entry {
    int32_t external;  // index in Run::external; -1 if nothing reads the input
    Layout layout;
    int32_t as_bytes;  // the input may also be NET_U8
};

// Multiply-adds of a step, bytes it reads and writes, and units of work that threads share.
typedef int64_t Amounts[3];

// A generated program, one per instruction set.
struct Program {
    const char* isa;
    int (*runs_here)(void);
    void (*run)(Run*, int segment, int threads, IntaglioParallel parallel);
    int64_t (*plan)(const int64_t* dims, int64_t* offsets);
    void (*amounts)(const int64_t* dims, Amounts* steps);
    int32_t steps, barriers;
    double macs_per_second;  // of one thread
    size_t first, bytes;     // its part of the weights
};

#if defined(__x86_64__)
// Return whether the processor has AMX-INT8 and Linux lets this process use its tile registers, which it asks for.
[[maybe_unused]] bool may_use_tiles() {
    enum { AMX_INT8 = 1 << 25, REQUEST_STATE = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_INT8) &&
           syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA) == 0;
}
#endif

#include "kernels/description.h"

constexpr int64_t kLargestSize = INT32_MAX;
constexpr int64_t kLargestTensor = int64_t(1) << 40;  // elements
constexpr int64_t kLargestArena = int64_t(1) << 46;

// The first bytes of the weights.
struct Header {
    char magic[8];
    uint64_t version, key, bytes;
    char rest[32];
};

#include "kernels/blake2b.h"
#include "kernels/tensor_copies.h"

// Return the predicted seconds of a call with `threads` threads, which share the units of each step.
double seconds(const Program& p, const Amounts* steps, int threads) {
    double total = p.steps * kStep;
    for (int32_t i = 0; i < p.steps; ++i) {
        const double units = double(steps[i][2] > 1 ? steps[i][2] : 1);
        const int64_t largest = (int64_t(units) + threads - 1) / threads;
        total += (double(steps[i][0]) / p.macs_per_second + double(steps[i][1]) / kBytesPerSecond) * double(largest) / units;
    }
    return threads == 1 ? total : total + kStart + p.barriers * (kBarrier + kBarrierThread * threads);
}

// Return the smallest number of threads, at most `most`, whose predicted time is close to the shortest one.
int threads_worth(const Program& p, const Amounts* steps, int most) {
    double best = seconds(p, steps, 1);
    for (int threads = 2; threads <= most; ++threads) {
        const double time = seconds(p, steps, threads);
        if (time < best) best = time;
    }
    int threads = 1;
    while (threads < most && seconds(p, steps, threads) > kClose * best) ++threads;
    return threads;
}

// Return the program of the best instruction set that the processor has, or null.
const Program* best_program() {
    for (const Program& program : programs)
        if (program.runs_here()) return &program;
    return nullptr;
}

// Return NET_OK if these are the weights that were exported with this program, to the last bit. Nothing else reads
// numbers of the file before this, and the program knows all sizes and offsets itself.
int32_t check_weights(const uint8_t* weights, size_t bytes) {
    Header header;
    if (bytes < sizeof header) return NET_FOREIGN;
    memcpy(&header, weights, sizeof header);
    if (memcmp(header.magic, "intaglio", 8) != 0 || header.version != kWeightsVersion || header.key != kWeightsKey)
        return NET_FOREIGN;
    if (bytes != kWeightsBytes) return NET_DAMAGED;
    uint8_t found[sizeof kWeightsDigest];
    blake2b::digest(weights, bytes, found);
    return memcmp(found, kWeightsDigest, sizeof found) == 0 ? NET_OK : NET_DAMAGED;
}

}  // namespace

// `sizes`, `strides` and `scratch` have entries for all inputs, then for all outputs. `scratch` are offsets in the
// arena, after the memory of the program: tensors in another memory order than the program's are copied there.
struct net_model {
    const Program* program;
    const uint8_t* weights;
    size_t bytes, mapped;  // of the weights; `mapped` is 0 if the caller owns them
    bool planned;
    int32_t allowed, threads;  // the last limit, 0 if there was none, and the number of threads worth using
    int64_t dims[kSymbols + 1], offsets[kBuffers + 1];
    int64_t sizes[kValues][kRank], strides[kValues][kRank], scratch[kValues];
    int32_t dtypes[kInputs + 1];
    uint8_t* arena;
    int64_t arena_bytes;
    Amounts amounts[kSteps + 1];
};

namespace {

const net_value& value_of(int32_t index) { return index < kInputs ? input_values[index] : output_values[index - kInputs]; }

const Entry& entry_of(int32_t index) { return index < kInputs ? input_entries[index] : output_entries[index - kInputs]; }

// Set the offsets of tensors that may have to be copied, and return the bytes of the arena. `arena` is what the program
// itself needs.
int64_t place_scratch(const int64_t (*sizes)[kRank], int64_t arena, int64_t* scratch) {
    int64_t end = (arena + 127) / 64 * 64;
    for (int32_t i = 0; i < kValues; ++i) {
        scratch[i] = end;
        const Entry& entry = entry_of(i);
        if (entry.external < 0 || entry.layout == ANY_STRIDES || (i >= kInputs && entry.layout == ROW_MAJOR)) continue;
        const int64_t bytes = elements(sizes[i], value_of(i).rank) * bytes_of(value_of(i).dtype);
        end += (bytes + 127) / 64 * 64;
    }
    return end;
}

// Return an input as the program reads it, and set its strides: the caller's memory, or a copy in another memory order.
const uint8_t* readable(net_model* m, int32_t i, const void* given, int64_t* strides, int threads) {
    const int32_t rank = value_of(i).rank;
    const uint8_t* from = static_cast<const uint8_t*>(given);
    memcpy(strides, m->strides[i], sizeof m->strides[i]);
    const Layout layout = entry_of(i).layout;
    if (layout == ANY_STRIDES) return from;
    int64_t wanted[kRank];
    dense_strides(m->sizes[i], rank, layout, wanted);
    if (same_places(strides, wanted, m->sizes[i], rank)) return from;
    uint8_t* to = m->arena + m->scratch[i];
    copy_strided({to, from, m->sizes[i], wanted, strides, rank, bytes_of(m->dtypes[i])}, threads);
    memcpy(strides, wanted, sizeof wanted);
    return to;
}

// Return the memory in which the program writes an output: the caller's if its memory order is row-major, too.
uint8_t* writable(net_model* m, int32_t i, void* given) {
    const int32_t rank = value_of(i).rank;
    int64_t made[kRank], wanted[kRank];
    dense_strides(m->sizes[i], rank, entry_of(i).layout, made);
    dense_strides(m->sizes[i], rank, ROW_MAJOR, wanted);
    return same_places(made, wanted, m->sizes[i], rank) ? static_cast<uint8_t*>(given) : m->arena + m->scratch[i];
}

// Copy to the caller's memory what the program did not write there: outputs in another memory order, and values that
// are returned more than once.
void give_back(net_model* m, uint8_t* const* external, void* const* outputs, int threads) {
    for (int32_t i = kInputs; i < kValues; ++i) {
        const int32_t rank = value_of(i).rank;
        uint8_t* to = static_cast<uint8_t*>(outputs[i - kInputs]);
        const uint8_t* from = external[entry_of(i).external];
        if (from == to) continue;
        int64_t made[kRank], wanted[kRank];
        dense_strides(m->sizes[i], rank, entry_of(i).layout, made);
        dense_strides(m->sizes[i], rank, ROW_MAJOR, wanted);
        copy_strided({to, from, m->sizes[i], wanted, made, rank, bytes_of(value_of(i).dtype)}, threads);
    }
}

// Check weights and set *opened to a new handle. `mapped` bytes are unmapped when it is closed.
int32_t open_weights(const uint8_t* weights, size_t bytes, size_t mapped, net_model** opened) {
    const int32_t status = check_weights(weights, bytes);
    if (status != NET_OK) return status;
    const Program* program = best_program();
    if (!program) return NET_PROCESSOR;
    net_model* model = static_cast<net_model*>(calloc(1, sizeof(net_model)));
    if (!model) return NET_MEMORY;
    model->program = program, model->weights = weights, model->bytes = bytes, model->mapped = mapped;
    *opened = model;
    return NET_OK;
}

// Return whether there is memory for all tensors that have elements.
bool complete(const void* const* pointers, int32_t first, int32_t count, const net_model* m) {
    if (!pointers && count) return false;
    for (int32_t i = 0; i < count; ++i)
        if (!pointers[i] && elements(m->sizes[first + i], value_of(first + i).rank)) return false;
    return true;
}

}  // namespace

int32_t net_abi(void) { return NET_ABI; }

const char* net_error(int32_t status) {
    static const char* const texts[] = {
        "no error",
        "an argument is not valid: a null pointer, a negative number of threads, weights at an address that is not a "
        "multiple of 64, or an index or element type that the network does not have",
        "the file of weights cannot be read",
        "these are not the weights of this network: they were exported from another one, or at another time",
        "the weights are damaged: copy the file again",
        "this processor has none of the instruction sets that the network was exported for",
        "there is not enough memory",
        "the network does not take these sizes: see the shapes of its inputs",
        "the sizes of the inputs are not known yet: call net_resize first",
        "an id among the inputs is not a row of its table"};
    return status >= 0 && status < int32_t(sizeof texts / sizeof *texts) ? texts[status] : "this is not a status of the network";
}

int32_t net_inputs(void) { return kInputs; }

int32_t net_outputs(void) { return kOutputs; }

const net_value* net_input(int32_t index) { return index >= 0 && index < kInputs ? &input_values[index] : nullptr; }

const net_value* net_output(int32_t index) { return index >= 0 && index < kOutputs ? &output_values[index] : nullptr; }

int32_t net_open(const char* path, net_model** opened) {
    if (opened) *opened = nullptr;
    if (!path || !opened) return NET_ARGUMENT;
    const int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe must not wait
    struct stat info;
    if (file < 0) return NET_FILE;
    const bool known = fstat(file, &info) == 0 && S_ISREG(info.st_mode);
    const size_t bytes = known ? size_t(info.st_size) : 0;
    void* mapped = bytes ? mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
    close(file);
    if (mapped == MAP_FAILED) return known ? (bytes ? NET_FILE : NET_FOREIGN) : NET_FILE;
    const int32_t status = open_weights(static_cast<const uint8_t*>(mapped), bytes, bytes, opened);
    if (status != NET_OK) munmap(mapped, bytes);
    return status;
}

int32_t net_open_memory(const void* weights, size_t bytes, net_model** opened) {
    if (opened) *opened = nullptr;
    if (!weights || !opened) return NET_ARGUMENT;
    if (uintptr_t(weights) % 64) return NET_ARGUMENT;
    return open_weights(static_cast<const uint8_t*>(weights), bytes, 0, opened);
}

void net_close(net_model* model) {
    if (!model) return;
    if (model->mapped) munmap(const_cast<uint8_t*>(model->weights), model->mapped);
    free(model->arena);
    free(model);
}

const char* net_isa(const net_model* model) { return model ? model->program->isa : nullptr; }

int32_t net_resize(net_model* model, const int64_t* const* sizes) {
    if (!model || (!sizes && kInputs)) return NET_ARGUMENT;
    int64_t dims[kSymbols + 1], offsets[kBuffers + 1], all[kValues][kRank] = {}, scratch[kValues];
    for (int32_t i = 0; i < kInputs; ++i) {
        const int32_t rank = value_of(i).rank;
        if (!sizes[i] && rank) return NET_ARGUMENT;
        int64_t count = 1;
        for (int32_t axis = 0; axis < rank; ++axis) {
            const int64_t size = sizes[i][axis];
            if (size < 0 || size > kLargestSize || (size && count > kLargestTensor / size)) return NET_SHAPE;
            count *= size ? size : 1;
            all[i][axis] = size;
        }
    }
    if (!free_sizes(all, dims)) return NET_SHAPE;
    output_sizes(dims, all + kInputs);
    const int64_t own = model->program->plan(dims, offsets);
    if (own < 0 || own > kLargestArena) return NET_MEMORY;
    const int64_t bytes = place_scratch(all, own, scratch);
    if (bytes > model->arena_bytes) {
        void* arena = nullptr;
        if (posix_memalign(&arena, 64, size_t(bytes))) return NET_MEMORY;
        free(model->arena);
        model->arena = static_cast<uint8_t*>(arena), model->arena_bytes = bytes;
    }
    memcpy(model->dims, dims, sizeof dims);
    memcpy(model->offsets, offsets, sizeof offsets);
    memcpy(model->sizes, all, sizeof all);
    memcpy(model->scratch, scratch, sizeof scratch);
    for (int32_t i = 0; i < kInputs; ++i) {
        dense_strides(all[i], value_of(i).rank, ROW_MAJOR, model->strides[i]);
        model->dtypes[i] = value_of(i).dtype;
    }
    model->program->amounts(dims, model->amounts);
    model->planned = true, model->allowed = 0;
    return NET_OK;
}

const int64_t* net_output_sizes(const net_model* model, int32_t index) {
    return model && model->planned && net_output(index) ? model->sizes[kInputs + index] : nullptr;
}

size_t net_output_bytes(const net_model* model, int32_t index) {
    const int64_t* sizes = net_output_sizes(model, index);
    return sizes ? size_t(elements(sizes, net_output(index)->rank) * bytes_of(net_output(index)->dtype)) : 0;
}

size_t net_input_bytes(const net_model* model, int32_t index) {
    if (!model || !model->planned || !net_input(index)) return 0;
    return size_t(elements(model->sizes[index], net_input(index)->rank) * bytes_of(model->dtypes[index]));
}

int32_t net_read_as(net_model* model, int32_t index, int32_t dtype, const int64_t* strides) {
    if (!model || !net_input(index)) return NET_ARGUMENT;
    if (!model->planned) return NET_UNPLANNED;
    const net_value& value = input_values[index];
    if (dtype != value.dtype && !(dtype == NET_U8 && input_entries[index].as_bytes)) return NET_ARGUMENT;
    model->dtypes[index] = dtype;
    dense_strides(model->sizes[index], value.rank, ROW_MAJOR, model->strides[index]);
    for (int32_t axis = 0; strides && axis < value.rank; ++axis) model->strides[index][axis] = strides[axis];
    return NET_OK;
}

int32_t net_run(net_model* model, const void* const* inputs, void* const* outputs, int32_t threads) {
    if (!model || threads < 0) return NET_ARGUMENT;
    if (!model->planned) return NET_UNPLANNED;
    if (!complete(inputs, 0, kInputs, model) || !complete(outputs, kInputs, kOutputs, model)) return NET_ARGUMENT;
    const int cores = intaglio_cores(), most = threads && threads < cores ? threads : cores;
    if (model->allowed != most)
        model->threads = threads_worth(*model->program, model->amounts, most), model->allowed = most;
    uint8_t* external[kExternals + 1] = {};
    uint8_t as_bytes[kExternals + 1] = {};
    int64_t strides[5 * kExternals + 1] = {};
    for (int32_t i = 0; i < kInputs; ++i) {
        const int32_t at = input_entries[i].external, rank = input_values[i].rank, read = rank < 5 ? rank : 5;
        if (at < 0) continue;
        int64_t own[kRank];
        external[at] = const_cast<uint8_t*>(readable(model, i, inputs[i], own, model->threads));
        memcpy(strides + 5 * at, own + rank - read, sizeof *own * size_t(read));
        as_bytes[at] = model->dtypes[i] == NET_U8;
    }
    for (int32_t i = kValues - 1; i >= kInputs; --i)
        external[entry_of(i).external] = writable(model, i, outputs[i - kInputs]);
    int32_t outside = 0;
    Run run = {model->dims, model->offsets, model->arena, model->weights + model->program->first, external, strides,
               nullptr, as_bytes, nullptr, &outside, nullptr, nullptr};
    model->program->run(&run, 0, model->threads, net_parallel_shared);
    if (outside) return NET_INDEX;
    give_back(model, external, outputs, model->threads);
    return NET_OK;
}
