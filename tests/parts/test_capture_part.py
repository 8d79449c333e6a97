"""Captures of submodules with the arguments of their calls."""

import pytest
import torch
from torch import nn

from intaglio.parts.call_recorder import recorded_calls
from intaglio.parts.capture_part import PartCandidate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sizes_that_differ_between_calls_are_free(dtype):
    module = nn.Linear(8, 4).to(dtype)
    with recorded_calls({"layer": module}, {}, most=1) as logs:
        for length in (5, 3):
            module(torch.randn(2, length, 8, dtype=dtype))
    captured = PartCandidate.of("layer", module, logs["layer"], None).captured
    assert captured.signature.inputs[0].type.shape[2] == 8
    assert not any(isinstance(size, int) for size in captured.signature.inputs[0].type.shape[:2])
