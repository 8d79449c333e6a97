"""Define-by-run's shortcuts change nothing that a model can see: tensors of an earlier call that serve again."""

import pytest
import torch
from torch import nn

from intaglio import eager
from intaglio.eager.recording.torch_functions import METADATA_FUNCTIONS


class Keeping(nn.Module):
    """Leaves values of a call where others find them."""

    def __init__(self):
        super().__init__()
        self.linear, self.relu, self.kept = nn.Linear(8, 8), nn.ReLU(inplace=True), []

    def forward(self, x):
        y = self.linear(x)
        self.kept.append(y)
        z = y + 1.0
        z.note = len(self.kept)
        return self.relu(z * 2.0)


@pytest.fixture(scope="module")
def converted():
    torch.manual_seed(0)
    prepared = eager.prepare(Keeping().eval(), (torch.randn(2, 8),))
    prepared(torch.randn(4, 8))
    return eager.convert(prepared)


def test_a_result_kept_by_the_caller_is_not_overwritten(converted):
    converted.kept.clear()
    a, b = torch.randn(2, 8), torch.randn(2, 8)
    for x in (a, b):
        converted(x)
    first, second = (kept + 0 for kept in converted.kept)
    assert not torch.equal(first, second)
    assert torch.allclose(first, converted.linear(a), atol=1e-5)
    assert torch.allclose(second, converted.linear(b), atol=1e-5)


def test_repeated_calls_of_several_sizes_give_the_same_bits(converted):
    inputs = [torch.randn(n, 8) for n in (1, 4, 2)]
    expected = [converted(x) for x in inputs]
    for _ in range(3):
        converted.kept.clear()
        assert all(torch.equal(converted(x), y) for x, y in zip(inputs, expected, strict=True))


def test_parts_that_calibration_used_are_compiled_by_convert(converted):
    (segment,) = eager.session_of(converted).segments
    before = dict(segment.programs)
    converted(torch.randn(3, 8))
    assert before
    assert segment.programs == before


def test_metadata_queries_are_recognized_by_function():
    assert torch.Tensor.shape.__get__ in METADATA_FUNCTIONS
    assert {torch.Tensor.size, torch.Tensor.dim, torch.is_tensor} <= METADATA_FUNCTIONS
    assert torch.relu not in METADATA_FUNCTIONS
