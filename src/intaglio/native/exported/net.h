// How a program calls the exported network. Plain C; what stands here keeps its meaning as long as NET_ABI stays.
//
// A handle (net_model) is used by one thread at a time; any number of handles may be used at once. Nothing here
// prints, exits or throws: what goes wrong is the status that comes back, and the handle stays as it was.
#ifndef NET_H
#define NET_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NET_ABI 1

// Of this export: how many inputs and outputs, and the largest rank among them.
enum { NET_INPUTS = @INPUTS@, NET_OUTPUTS = @OUTPUTS@, NET_RANK = @RANK@ };

typedef struct net_model net_model;

// What functions return.
enum {
    NET_OK = 0,
    NET_ARGUMENT = 1,   // a null pointer, an index or an element type that is none
    NET_FILE = 2,       // the file of weights cannot be read; errno says why
    NET_FOREIGN = 3,    // not weights, or those of another network or export
    NET_DAMAGED = 4,    // some bytes of the weights are not what was exported
    NET_PROCESSOR = 5,  // exported for none of the instruction sets of this processor
    NET_MEMORY = 6,     // the system gives no more memory
    NET_SHAPE = 7,      // sizes the network does not take; the previous ones still hold
    NET_UNPLANNED = 8,  // net_resize has not succeeded yet
    NET_INDEX = 9       // an id among the inputs is none of the table's rows; outputs hold anything
};

// Element types.
enum {
    NET_U8 = 1, NET_S8 = 2, NET_U16 = 3, NET_I16 = 4, NET_I32 = 5, NET_I64 = 6, NET_F16 = 7, NET_BF16 = 8,
    NET_F32 = 9, NET_F64 = 10, NET_BOOL = 11
};

// An input or output: its name, its shape as text ("[n, 3, 224, 224]"), its element type, and its sizes, -1 where they
// are free.
typedef struct {
    const char* name;
    const char* shape;
    int32_t dtype;
    int32_t rank;
    const int64_t* sizes;
} net_value;

// NET_ABI of the library that runs.
int32_t net_abi(void);

// One line of English; never NULL.
const char* net_error(int32_t status);

int32_t net_inputs(void);
int32_t net_outputs(void);

// NULL if there is none of this index.
const net_value* net_input(int32_t index);
const net_value* net_output(int32_t index);

// A new handle with the weights in a file, which is mapped: several handles and processes hold them once.
int32_t net_open(const char* path, net_model** opened);

// The same with the bytes of that file in memory, from a multiple of 64 on; they must stay until the handle is closed.
int32_t net_open_memory(const void* weights, size_t bytes, net_model** opened);

// Gives everything back. NULL is fine.
void net_close(net_model* model);

// The instruction set it runs: the best of those exported that this processor has.
const char* net_isa(const net_model* model);

// Plans a call: sizes[i] are those of input i. Takes microseconds, and memory only when it needs more than ever before.
// Inputs are then dense, of their element type.
int32_t net_resize(net_model* model, const int64_t* const* sizes);

// As planned; NULL and 0 before, and where there is no such output or input.
const int64_t* net_output_sizes(const net_model* model, int32_t index);
size_t net_output_bytes(const net_model* model, int32_t index);
size_t net_input_bytes(const net_model* model, int32_t index);

// Until the next net_resize an input comes with these strides (in elements; NULL: dense) and in this element type: its
// own, or NET_U8 where the network was quantized for images as bytes.
int32_t net_read_as(net_model* model, int32_t index, int32_t dtype, const int64_t* strides);

// One call: inputs[i] are read, outputs[i] are written, dense. At most so many threads work, and fewer where more would
// gain nothing; 0: as many as the processor has. Results have the same bits with any number.
int32_t net_run(net_model* model, const void* const* inputs, void* const* outputs, int32_t threads);

#ifdef __cplusplus
}
#endif
#endif
