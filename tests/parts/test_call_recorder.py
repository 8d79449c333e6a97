"""Recorded calls of the parts of a model."""

import pytest
import torch
from torch import nn

from intaglio.parts.call_recorder import recorded_calls

FIRST, SECOND = torch.randn(2, 3), torch.randn(2, 3)


@pytest.mark.parametrize(
    ("calls", "kept"),
    [
        ([FIRST, FIRST.clone(), SECOND], [0, 2]),
        ([FIRST, SECOND, FIRST], [0, 1, 2]),
        ([FIRST, FIRST.double(), FIRST[:1]], [0, 1, 2]),
        ([FIRST, FIRST[:0], FIRST], [0]),
        ([FIRST, FIRST * float("nan"), FIRST * float("nan")], [0, 1, 2]),
    ],
    ids=["repeated", "again", "other types and sizes", "without samples", "nan"],
)
def test_a_call_with_the_arguments_of_the_one_before_is_left_out(calls, kept):
    module = nn.Identity()
    with recorded_calls({"x": module}, {}) as logs:
        for call in calls:
            module(call)
    found = [args[0] for args, _ in logs["x"].calls]
    assert [(x.dtype, x.shape) for x in found] == [(calls[i].dtype, calls[i].shape) for i in kept]
    assert all(torch.equal(x.nan_to_num(), calls[i].nan_to_num()) for x, i in zip(found, kept, strict=True))
    assert logs["x"].seen == len(kept)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "made", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, lambda x: torch.nested.nested_tensor([*x])]
)
def test_tensors_that_no_part_takes_are_recorded_each_time(made):
    module = nn.Identity()
    with recorded_calls({"x": module}, {}) as logs:
        for _ in range(2):
            module(made(torch.ones(2, 3)))
    assert logs["x"].seen == 2


def test_calls_with_other_numbers_or_keywords_are_recorded():
    module = nn.Identity()
    module.forward = lambda x, scale=1, mask=None: x
    with recorded_calls({"x": module}, {}) as logs:
        for settings in ({}, {}, {"scale": 2}, {"scale": 2.0}, {"scale": 2.0}, {"mask": None}, {"mask": FIRST}):
            module(FIRST, **settings)
    assert [kwargs for _, kwargs in logs["x"].calls[:4]] == [{}, {"scale": 2}, {"scale": 2.0}, {"mask": None}]
    assert len(logs["x"].calls) == 5
