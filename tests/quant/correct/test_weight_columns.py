"""Rounding of weight columns: the compiled kernel gives the bits of PyTorch's loop, with any number of threads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from intaglio.native import native_library
from intaglio.native.cpu import isas
from intaglio.quant.correct.weight_columns import Columns, round_columns, round_columns_torch


@pytest.fixture(params=isas(), scope="module")
def library(request):
    return native_library.open_library(request.param)


@given(
    groups=st.integers(1, 3),
    count=st.integers(1, 70),
    rows=st.integers(1, 100),
    threads=st.integers(1, 3),
    high=st.sampled_from([1, 7, 127]),
    seed=st.integers(0, 2**31),
)
def test_columns_are_rounded_as_by_pytorch(library, groups, count, rows, threads, high, seed):
    make = torch.Generator().manual_seed(seed)
    weight = torch.randn(groups, count, rows, generator=make, dtype=torch.float64)
    steps = torch.rand(groups, count, rows, generator=make, dtype=torch.float64) + 0.01
    start = int(torch.randint(0, count, (), generator=make))
    width = int(torch.randint(1, count - start + 1, (), generator=make))
    lower = torch.randn(groups, width, width, generator=make, dtype=torch.float64).tril()
    expected, found = (Columns.of(weight, steps) for _ in range(2))
    for columns in (expected, found):
        columns.quantized.zero_()
        columns.error.zero_()
    round_columns_torch(expected, start, lower, -high, high)
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_library, "runtime_if_built", lambda: library)
        torch.set_num_threads(threads)
        try:
            round_columns(found, start, lower, -high, high)
        finally:
            torch.set_num_threads(before)
    for name in Columns._fields:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
