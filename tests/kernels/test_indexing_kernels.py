"""The kernel that copies elements at indices, called directly, against its reference in NumPy."""

import ctypes
from functools import cache

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from intaglio.ir import DType, Op, TensorType
from intaglio.native.compile import build, load
from intaglio.ops.direct.direct_operands import MAX_INDEXED_AXES
from intaglio.ops.direct.indexing import INDEX
from support.indexing_arguments import Axes, padded
from support.matmul_library import EXPORT, RUNNABLE_ISAS

SOURCE = f"""#include "sequences/indexing.h"
{EXPORT} void select(const struct Places* p, const struct Index* indices, int count, int32_t* outside, int threads) {{
    for (int thread = 0; thread < threads; ++thread) copy_indexed(p, indices, count, outside, thread, threads);
}}
"""


class Places(ctypes.Structure):
    """Mirror of ``struct Places``."""

    _fields_ = (
        ("sizes", Axes),
        ("source", ctypes.c_void_p),
        ("to", ctypes.c_void_p),
        ("from_stride", Axes),
        ("to_stride", Axes),
        ("bytes", ctypes.c_int64),
    )


class Index(ctypes.Structure):
    """Mirror of ``struct Index``."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("stride", Axes),
        ("limit", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("wraps", ctypes.c_int),
    )


@cache
def library():
    return load(build(SOURCE, name="select", isa=RUNNABLE_ISAS[0]))


def steps(array):
    return [stride // array.itemsize for stride in array.strides]


@st.composite
def selections(draw):
    """Draw an operand and a result with any strides, and neighbouring axes with an index for each."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    first = draw(st.integers(0, len(shape) - 1))
    axes = tuple(range(first, draw(st.integers(first + 1, len(shape)))))
    kind = draw(st.sampled_from([np.uint8, np.float32, np.int64]))
    x = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 99, shape).astype(kind)
    order = draw(st.permutations(range(len(shape))))
    x = np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
    size = draw(st.lists(st.integers(0, 4), min_size=1, max_size=MAX_INDEXED_AXES - len(shape)))
    indices = [draw_index(draw, size, shape[axis]) for axis in axes]
    return x, axes, indices


def draw_index(draw, size, limit):
    own = [1 if draw(st.booleans()) else number for number in size]
    count = int(np.prod(own))
    values = draw(st.lists(st.integers(-limit, limit - 1), min_size=count, max_size=count))
    return np.array(values, np.int64).reshape(own)


@given(drawn=selections(), order=st.randoms(use_true_random=False), threads=st.integers(1, 3))
def test_the_elements_are_those_of_the_reference(drawn, order, threads):
    x, axes, indices = drawn
    place, kind = axes[0], TensorType(x.shape, DType.F32)
    op = Op("index", ("x", *[f"i{axis}" for axis in axes]), ("y",), {"axes": axes, "place": place})
    expected = INDEX.reference(op, [x, *indices], [kind] * (1 + len(axes)), kind)
    shuffled = order.sample(range(expected.ndim), expected.ndim)
    found = np.full([expected.shape[axis] for axis in shuffled], 7, x.dtype).transpose(np.argsort(shuffled))
    rest = [step for axis, step in enumerate(steps(x)) if axis not in axes]
    added = expected.ndim - len(rest)
    along = [*rest[:place], *[0] * added, *rest[place:]]
    places = Places(padded(expected.shape, 1), x.ctypes.data, found.ctypes.data, padded(along, 0))
    places.to_stride, places.bytes = padded(steps(found), 0), x.itemsize
    given_indices = (Index * len(axes))()
    for own, axis, index in zip(given_indices, axes, indices, strict=True):
        strides = [0 if size == 1 else step for size, step in zip(index.shape, steps(index), strict=True)]
        strides = [*[0] * place, *strides, *[0] * (len(rest) - place)]
        own.at, own.stride, own.limit = index.ctypes.data, padded(strides, 0), x.shape[axis]
        own.step, own.wraps = steps(x)[axis], 1
    outside = ctypes.c_int32(0)
    library().select(ctypes.byref(places), given_indices, len(axes), ctypes.byref(outside), threads)
    assert not outside.value
    assert np.array_equal(found, expected)


def test_an_index_outside_of_its_axis_is_told():
    x, found, index = np.zeros((3, 4), np.uint8), np.full((1, 4), 7, np.uint8), np.array([3])
    places = Places(padded([1, 4], 1), x.ctypes.data, found.ctypes.data, padded([0, 1], 0), padded([4, 1], 0), 1)
    given_indices = (Index * 1)(Index(index.ctypes.data, padded([0, 0], 0), 3, 4, 1))
    outside = ctypes.c_int32(0)
    library().select(ctypes.byref(places), given_indices, 1, ctypes.byref(outside), 1)
    assert outside.value == 1
    assert (found == 7).all(), "nothing is copied"
