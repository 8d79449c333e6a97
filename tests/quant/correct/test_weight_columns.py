"""Rounding of weight columns: the compiled kernel gives the bits of PyTorch's loop, with any number of threads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from intaglio.native import native_library
from intaglio.quant.correct.linalg import COLUMN_BLOCK, OrderedFactor
from intaglio.quant.correct.weight_columns import Columns, round_columns, round_columns_torch


@given(
    groups=st.integers(1, 3),
    count=st.integers(1, 140),
    rows=st.integers(1, 100),
    threads=st.integers(1, 3),
    high=st.sampled_from([1, 7, 127]),
    each_weight=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_columns_are_rounded_as_by_pytorch(runtime_library, groups, count, rows, threads, high, each_weight, seed):
    make = torch.Generator().manual_seed(seed)
    weight = torch.randn(groups, rows, count, generator=make, dtype=torch.float64)
    steps = torch.rand(groups, rows, 1, generator=make, dtype=torch.float64) + 0.01
    if each_weight:
        steps = steps * torch.rand(groups, rows, count, generator=make, dtype=torch.float64)
    order = torch.stack([torch.randperm(count, generator=make) for _ in range(groups)])
    lower = torch.randn(groups, count, count, generator=make, dtype=torch.float64).tril()
    pivots, added = torch.rand(2, groups, count, generator=make, dtype=torch.float64)
    factor = OrderedFactor(order, lower, pivots, added)
    expected, found = (Columns.of(weight, steps, factor) for _ in range(2))
    for columns in (expected, found):
        columns.quantized.zero_()
        columns.error.zero_()
    start = COLUMN_BLOCK * int(torch.randint(0, -(-count // COLUMN_BLOCK), (), generator=make))
    width = min(COLUMN_BLOCK, count - start)
    spread = torch.randn(groups, width, rows, generator=make, dtype=torch.float64)
    round_columns_torch(expected, start, spread, -high, high)
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_library, "runtime_if_built", lambda: runtime_library)
        torch.set_num_threads(threads)
        try:
            round_columns(found, start, spread, -high, high)
        finally:
            torch.set_num_threads(before)
    for name in ("quantized", "error", "totals"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
