"""The kernels that copy between strides, called directly, against NumPy."""

import ctypes
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intaglio.native.compile import build, load
from intaglio.plan.kernel_records import MAX_RUNS
from support.matmul_library import CPP_ISA_PARAMS, EXPORT

SOURCE = f"""#include "elementwise/data_movement.h"
{EXPORT} void run_copy(const struct Copy* c, int threads) {{
    for (int thread = 0; thread < threads; ++thread) copy_strided(c, thread, threads);
}}
{EXPORT} void run_reshape(const struct Side* in, const struct Side* out, int64_t element, int threads) {{
    for (int thread = 0; thread < threads; ++thread) copy_in_logical_order(in, out, element, thread, threads);
}}
"""
TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
ISAS = pytest.mark.parametrize("isa", CPP_ISA_PARAMS)


class Copy(ctypes.Structure):
    """Mirror of ``struct Copy``."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("element", ctypes.c_int64),
        ("size", ctypes.c_int64 * MAX_RUNS),
        ("start", ctypes.c_int64 * MAX_RUNS),
        ("to", ctypes.c_int64 * MAX_RUNS),
    )


class Side(ctypes.Structure):
    """Mirror of ``struct Side``."""

    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_int64 * 7), ("stride", ctypes.c_int64 * 7))


@cache
def library(isa):
    return load(build(SOURCE, name="copies", isa=isa))


def fields(numbers, missing, count):
    return (ctypes.c_int64 * count)(*[missing] * (count - len(numbers)), *numbers)


@st.composite
def copies(draw):
    """Draw a tensor with gaps and any order of its axes in memory, the order of the copy, and that of the result."""
    element = draw(st.sampled_from(sorted(TYPES)))
    sizes = draw(st.lists(st.one_of(st.integers(1, 5), st.integers(1, 70)), min_size=1, max_size=4))
    while np.prod(sizes) > 60_000:
        sizes.remove(max(sizes))
    axes = range(len(sizes))
    memory, loops, result = (draw(st.permutations(axes)) for _ in range(3))
    return element, sizes, memory, loops, result, draw(st.integers(0, 3)), draw(st.integers(1, 3))


def strided(sizes, order, gap, kind, fill):
    """Return an array of a shape whose axes lie in memory in an order, with gaps between the rows."""
    shape = [sizes[axis] for axis in order]
    shape[-1] += gap
    array = fill(shape).astype(kind)
    return array[..., : sizes[order[-1]]].transpose(np.argsort(order)), array


@ISAS
@given(drawn=copies())
def test_copies_between_strides_are_those_of_numpy(isa, drawn):
    element, sizes, memory, loops, result, gap, threads = drawn
    kind = TYPES[element]
    source, _ = strided(sizes, memory, gap, kind, lambda shape: np.random.default_rng(0).integers(0, 2**63, shape))
    made, whole = strided(sizes, result, gap, kind, lambda shape: np.full(shape, 7))
    runs = [(sizes[axis], source.strides[axis], made.strides[axis]) for axis in loops]
    columns = [fields([run[i] for run in runs], int(i == 0), MAX_RUNS) for i in range(3)]
    library(isa).run_copy(ctypes.byref(Copy(source.ctypes.data, made.ctypes.data, element, *columns)), threads)
    expected, expected_whole = strided(sizes, result, gap, kind, lambda shape: np.full(shape, 7))
    expected[...] = source
    np.testing.assert_array_equal(whole, expected_whole)


@ISAS
@given(drawn=copies())
def test_reshapes_follow_the_logical_order(isa, drawn):
    element, sizes, memory, _, result, gap, threads = drawn
    kind = TYPES[element]
    source, _ = strided(sizes, memory, gap, kind, lambda shape: np.random.default_rng(0).integers(0, 2**63, shape))
    shape = [sizes[axis] for axis in result]
    made, whole = strided(shape, memory, gap, kind, lambda shape: np.full(shape, 7))
    sides = [
        Side(array.ctypes.data, fields(array.shape, 1, 7), fields(array.strides, 0, 7)) for array in (source, made)
    ]
    library(isa).run_reshape(*map(ctypes.byref, sides), ctypes.c_int64(element), threads)
    expected, expected_whole = strided(shape, memory, gap, kind, lambda shape: np.full(shape, 7))
    expected[...] = source.reshape(shape)
    np.testing.assert_array_equal(whole, expected_whole)
