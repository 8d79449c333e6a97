"""The kernel that sorts along an axis, called directly, against its reference in NumPy and against PyTorch."""

import ctypes
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from intaglio.ir import DType, Op, TensorType
from intaglio.native.compile import build, load
from intaglio.ops.direct.along_axis import ARGSORT
from support.indexing_arguments import Axes, padded
from support.matmul_library import CPP_ISA_PARAMS, EXPORT

KEYS = {"float": np.float32, "int64_t": np.int64, "uint8_t": np.uint8}
SOURCE = '#include "sequences/indexing.h"\n' + "".join(
    f"""{EXPORT} void order_{name}(const struct Lines* l, int descending, int64_t count, int threads) {{
    for (int thread = 0; thread < threads; ++thread) places_in_order<{name}>(l, descending, count, thread, threads);
}}
"""
    for name in KEYS
)
ISAS = pytest.mark.parametrize("isa", CPP_ISA_PARAMS)


class Lines(ctypes.Structure):
    """Mirror of ``struct Lines``."""

    _fields_ = (
        ("sizes", Axes),
        ("source", ctypes.c_void_p),
        ("to", ctypes.c_void_p),
        ("from_stride", Axes),
        ("to_stride", Axes),
        *((name, ctypes.c_int64) for name in ("size", "from_step", "to_step")),
    )


@cache
def library(isa):
    return load(build(SOURCE, name="order", isa=isa))


FLOATS = st.one_of(st.sampled_from([0.0, -0.0, 1.0, np.nan, np.inf, -np.inf, 1e-45]), st.floats(width=32))
INTEGERS = st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1))
ELEMENTS = {"float": FLOATS, "int64_t": INTEGERS, "uint8_t": st.integers(0, 1)}


@st.composite
def sorts(draw):
    """Draw keys with many equal ones, whose lines have any strides, and how many first places are wanted."""
    key = draw(st.sampled_from(sorted(KEYS)))
    outer, size = draw(st.lists(st.integers(1, 4), max_size=2)), draw(st.one_of(st.integers(0, 5), st.integers(0, 70)))
    axis = draw(st.integers(0, len(outer)))
    shape = [*outer[:axis], size, *outer[axis:]]
    few = draw(st.lists(ELEMENTS[key], min_size=1, max_size=4))
    drawn = draw(st.lists(st.one_of(st.sampled_from(few), ELEMENTS[key]), min_size=1, max_size=20))
    picked = np.random.default_rng(draw(st.integers(0, 99))).integers(0, len(drawn), shape)
    keys = np.array(drawn, KEYS[key])[picked] if picked.size else np.zeros(shape, KEYS[key])
    order = draw(st.permutations(range(len(shape))))
    keys = np.ascontiguousarray(keys.transpose(order)).transpose(np.argsort(order))
    return key, keys, axis, draw(st.booleans()), draw(st.one_of(st.just(size), st.integers(0, size)))


def expected_places(keys, axis, descending, count):
    attrs = {"axis": axis, "descending": descending, "count": count}
    kind = TensorType(keys.shape, DType.F32)
    return ARGSORT.reference(Op("argsort", ("x",), ("y",), attrs), [keys], [kind], kind)


@ISAS
@given(drawn=sorts(), threads=st.integers(1, 3))
def test_the_first_places_are_those_of_the_reference(isa, drawn, threads):
    key, keys, axis, descending, count = drawn
    places = expected_places(keys, axis, descending, count)
    found = np.full(places.shape, -1, np.int64)
    steps, to_steps = ([n // array.itemsize for n in array.strides] for array in (keys, found))
    without = [keys.shape, steps, to_steps]
    sizes, strides, to_strides = ([*values[:axis], *values[axis + 1 :]] for values in without)
    lines = Lines(padded(sizes, 1), keys.ctypes.data, found.ctypes.data, padded(strides, 0), padded(to_strides, 0))
    lines.size, lines.from_step, lines.to_step = keys.shape[axis], steps[axis], to_steps[axis]
    getattr(library(isa), f"order_{key}")(ctypes.byref(lines), int(descending), ctypes.c_int64(count), threads)
    assert np.array_equal(found, places)


@given(drawn=sorts())
def test_the_reference_is_the_stable_sort_of_pytorch(drawn):
    key, keys, axis, descending, count = drawn
    tensor = torch.from_numpy(np.ascontiguousarray(keys))
    tensor = tensor.bool() if key == "uint8_t" else tensor
    exact = torch.sort(tensor, dim=axis, descending=descending, stable=True).indices.narrow(axis, 0, count)
    assert np.array_equal(expected_places(tensor.numpy(), axis, descending, count), exact.numpy())
