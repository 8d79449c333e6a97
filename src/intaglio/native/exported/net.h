// The interface of the exported network, in plain C. It keeps its meaning as long as NET_ABI stays the same.
//
// The usual order of calls: net_open, net_resize, then net_run once per call of the network, and net_close at the end.
//
// Only one thread at a time may use a handle (net_model), but any number of handles may be used at the same time. No
// function prints, exits or throws. Functions that can fail return a status, and a failed call does not change the
// handle.
#ifndef NET_H
#define NET_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NET_ABI 1

// Number of inputs and of outputs, and the largest rank of any of them (at least 1).
enum { NET_INPUTS = @INPUTS@, NET_OUTPUTS = @OUTPUTS@, NET_RANK = @RANK@ };

// A handle: the weights, and the memory of calls with the sizes of the last net_resize.
typedef struct net_model net_model;

// Status codes.
enum {
    NET_OK = 0,
    NET_ARGUMENT = 1,   // a null pointer, or an index, element type, alignment or thread count that is not valid
    NET_FILE = 2,       // the file of weights cannot be read; errno has the reason
    NET_FOREIGN = 3,    // not a file of weights, or the weights of another network or export
    NET_DAMAGED = 4,    // the weights are not those that were exported: some bytes have changed
    NET_PROCESSOR = 5,  // the processor supports no exported instruction set
    NET_MEMORY = 6,     // out of memory
    NET_SHAPE = 7,      // the network does not take these sizes; the previous sizes stay valid
    NET_UNPLANNED = 8,  // there has been no successful net_resize yet
    NET_INDEX = 9       // an id in an input is not a row of its table; the contents of the outputs are undefined
};

// Element types.
enum {
    NET_U8 = 1, NET_S8 = 2, NET_U16 = 3, NET_I16 = 4, NET_I32 = 5, NET_I64 = 6, NET_F16 = 7, NET_BF16 = 8,
    NET_F32 = 9, NET_F64 = 10, NET_BOOL = 11
};

// Description of an input or an output.
typedef struct {
    const char* name;
    const char* shape;     // as text: "[n, 3, 224, 224]", with a name for a free size
    int32_t dtype;         // element type: NET_F32 and others
    int32_t rank;          // number of axes
    const int64_t* sizes;  // size of each axis; -1 for a free size, which net_resize sets
} net_value;

// Return the value that NET_ABI had when the library was compiled.
int32_t net_abi(void);

// Return one line of English that explains a status; never NULL.
const char* net_error(int32_t status);

// Return the number of inputs, and of outputs.
int32_t net_inputs(void);
int32_t net_outputs(void);

// Return the description of an input or an output; indices begin at 0. NULL if the index is out of range.
const net_value* net_input(int32_t index);
const net_value* net_output(int32_t index);

// Open a file of weights and set *opened to a new handle. The file is memory-mapped, so all handles and processes that
// open it share one copy in memory. If the weights cannot be opened, *opened is NULL. Only the bytes that were exported
// with this library are opened: their BLAKE2b digest is checked, which takes about 2 ms per MB. The file must not be
// changed or shortened while it is open.
int32_t net_open(const char* path, net_model** opened);

// Open the contents of a file of weights, at an address that is a multiple of 64, and set *opened to a new handle. They
// are checked but not copied: the caller keeps them unchanged until the handle is closed.
int32_t net_open_memory(const void* weights, size_t bytes, net_model** opened);

// Close a handle and free its memory. NULL is allowed.
void net_close(net_model* model);

// Return the name of the instruction set that the handle uses: the best exported one that this processor has.
const char* net_isa(const net_model* model);

// Set the sizes of all inputs: sizes[i] has one size for each axis of input i. Call it before the first net_run, and
// whenever sizes change. It takes microseconds, and allocates memory only if more is needed than ever before. net_run
// then expects inputs dense, in row-major order and in their own element type; net_read_as changes that.
int32_t net_resize(net_model* model, const int64_t* const* sizes);

// Return the sizes of an output, and the bytes of an output or an input, as of the last net_resize. NULL or 0 if there
// was none, or if the index is out of range. The pointer is valid until the next net_resize or net_close.
const int64_t* net_output_sizes(const net_model* model, int32_t index);
size_t net_output_bytes(const net_model* model, int32_t index);
size_t net_input_bytes(const net_model* model, int32_t index);

// Describe how the caller passes an input to net_run until the next net_resize: its strides (in elements, one for each
// axis; NULL: dense) and its element type. The element type is the input's own, or NET_U8 for an image of bytes if the
// network was quantized for such images.
int32_t net_read_as(net_model* model, int32_t index, int32_t dtype, const int64_t* strides);

// Run the network: read inputs[i], and write outputs[i] dense and in row-major order. Use at most `threads`
// threads, or as many as there are cores if it is 0; fewer threads are used if more would not be faster. Results are
// bit-identical with any number of threads.
int32_t net_run(net_model* model, const void* const* inputs, void* const* outputs, int32_t threads);

#ifdef __cplusplus
}
#endif
#endif
