"""Sums of squares: the compiled kernel gives the bits of NumPy, and the sums that the definition states."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from intaglio.native import native_library
from intaglio.native.statistics import squared_sums, squared_sums_numpy
from intaglio.quant.calibrate.sums_of_squares import sums_of_squares


@given(
    count=st.integers(0, 70_000) | st.sampled_from([1, 15, 16, 17, 4095, 4096, 4097, 300_001]),
    threads=st.integers(1, 3),
    infinities=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_the_kernel_gives_the_bits_of_numpy(runtime_library, count, threads, infinities, seed):
    make = np.random.default_rng(seed)
    exact = (make.standard_normal(count) * 10.0 ** make.integers(-20, 18)).astype(np.float32)
    other = exact + (make.standard_normal(count) * 10.0 ** make.integers(-20, 18)).astype(np.float32)
    if infinities and count:
        places = make.integers(0, count, 5)
        exact[places] = [math.inf, -math.inf, math.nan, math.inf, math.nan]
        other[make.integers(0, count)] = math.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_library, "runtime_if_built", lambda: runtime_library)
        found = squared_sums(exact, other, threads)
    np.testing.assert_array_equal(found, squared_sums_numpy(exact, other))


@given(
    shape=st.lists(st.integers(0, 9), max_size=4),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]),
    permuted=st.booleans(),
    infinite=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_sums_are_those_of_the_definition_in_any_layout(shape, dtype, permuted, infinite, seed):
    make = torch.Generator().manual_seed(seed)
    exact, found = ((torch.randn(shape, generator=make) * 3).to(dtype) for _ in range(2))
    if permuted:
        exact = exact.permute(list(range(len(shape)))[::-1])
        found = found.permute(list(range(len(shape)))[::-1]).contiguous()
    if infinite and exact.numel() and exact.is_floating_point():
        exact[(0,) * exact.dim()] = math.inf
    sums = sums_of_squares(exact, found)
    pairs = [(a, b) for a, b in zip(exact.flatten().tolist(), found.flatten().tolist(), strict=True) if a != math.inf]
    expected = [math.fsum(terms) for terms in zip(*((a * a, b * b, (a - b) ** 2) for a, b in pairs), strict=True)]
    assert list(sums) == pytest.approx(expected or [0.0, 0.0, 0.0], rel=1e-12)


def test_arrays_of_different_sizes_are_refused():
    with pytest.raises(ValueError, match=r"arrays of 3 and 4 values"):
        squared_sums(np.zeros(3, np.float32), np.zeros(4, np.float32))
