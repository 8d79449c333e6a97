// Sizes and strides of tensors, and copies between memory orders. net.cpp includes this file inside its unnamed
// namespace.

// Return the bytes of an element.
int64_t bytes_of(int32_t dtype) {
    static const int8_t bytes[] = {0, 1, 1, 2, 2, 4, 8, 2, 2, 4, 8, 1};
    return bytes[dtype];
}

// Return the number of elements of a tensor.
int64_t elements(const int64_t* sizes, int32_t rank) {
    int64_t count = 1;
    for (int32_t axis = 0; axis < rank; ++axis) count *= sizes[axis];
    return count;
}

// Compute the strides of a dense tensor in the memory order of a layout, in elements.
void dense_strides(const int64_t* sizes, int32_t rank, Layout layout, int64_t* strides) {
    int64_t step = 1;
    const int32_t last = layout == CHANNELS_LAST ? 1 : rank;
    if (last < rank) strides[last] = step, step *= sizes[last] > 1 ? sizes[last] : 1;
    for (int32_t axis = rank - 1; axis >= 0; --axis) {
        if (axis == last) continue;
        strides[axis] = step;
        step *= sizes[axis] > 1 ? sizes[axis] : 1;
    }
}

// Return whether two sets of strides give the same addresses. The stride of an axis of size 1 does not matter.
bool same_places(const int64_t* a, const int64_t* b, const int64_t* sizes, int32_t rank) {
    for (int32_t axis = 0; axis < rank; ++axis)
        if (sizes[axis] > 1 && a[axis] != b[axis]) return false;
    return true;
}

// A copy of a tensor: strides are in elements of `bytes` bytes.
struct Copy {
    uint8_t* to;
    const uint8_t* from;
    const int64_t *sizes, *to_strides, *from_strides;
    int32_t rank;
    int64_t bytes;
};

// Copy elements along one axis; steps are in bytes.
template <typename T>
void copy_line(uint8_t* to, const uint8_t* from, int64_t count, int64_t to_step, int64_t from_step) {
    for (int64_t i = 0; i < count; ++i) memcpy(to + i * to_step, from + i * from_step, sizeof(T));
}

// Copy this thread's part of the lines along the last axis.
void copy_lines(void* context, int thread, int threads) {
    const Copy& c = *static_cast<const Copy*>(context);
    const int32_t last = c.rank - 1;
    const int64_t lines = elements(c.sizes, last), to_step = c.to_strides[last] * c.bytes, from_step = c.from_strides[last] * c.bytes;
    for (int64_t line = shard_begin(lines, thread, threads); line < shard_begin(lines, thread + 1, threads); ++line) {
        uint8_t* to = c.to;
        const uint8_t* from = c.from;
        int64_t left = line;
        for (int32_t axis = last - 1; axis >= 0; left /= c.sizes[axis], --axis) {
            to += left % c.sizes[axis] * c.to_strides[axis] * c.bytes;
            from += left % c.sizes[axis] * c.from_strides[axis] * c.bytes;
        }
        if (c.bytes == 1) copy_line<uint8_t>(to, from, c.sizes[last], to_step, from_step);
        if (c.bytes == 2) copy_line<uint16_t>(to, from, c.sizes[last], to_step, from_step);
        if (c.bytes == 4) copy_line<uint32_t>(to, from, c.sizes[last], to_step, from_step);
        if (c.bytes == 8) copy_line<uint64_t>(to, from, c.sizes[last], to_step, from_step);
    }
}

// Copy all elements in logical order.
void copy_strided(Copy copy, int threads) {
    if (copy.rank == 0) {
        memcpy(copy.to, copy.from, size_t(copy.bytes));
    } else if (elements(copy.sizes, copy.rank)) {
        net_parallel_shared(copy_lines, &copy, threads);
    }
}
