"""``len(tensor)`` in the code of a model is a dynamic size."""

import sys
import types

import pytest
import torch
from torch import nn

import intaglio
from intaglio.errors import CaptureError
from intaglio.tracing import capture
from intaglio.tracing.during_export.lengths_of_tensors import dynamic_lengths, size_or_length

X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))


class Flattened(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 8), nn.Linear(8, 4)])

    def forward(self, x):
        x = x.reshape(len(x), -1)
        for index in range(len(self.layers)):
            x = self.layers[index](x)
        return x + len([x, x]) + len("three")


class InList(nn.Module):
    """Needs the number of samples as a Python number."""

    def forward(self, x):
        return torch.stack([x[index] * index for index in range(len(x))])


def test_the_batch_of_models_that_read_the_length_of_a_tensor_is_dynamic():
    model = Flattened().eval()
    captured = capture(model, X)
    assert not captured.model_info.notes
    int8 = intaglio.quantize(model, [X, X * 0.7], progress=False)
    for batch in (1, 2, 5):
        x = torch.randn(batch, 3, 4)
        assert captured.module(x)[0].shape == int8(x).shape == model(x).shape


def test_a_length_that_must_be_a_number_fixes_the_batch():
    (note,) = capture(InList().eval(), X).model_info.notes
    assert note.startswith("the batch size is fixed")


class Failing(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > len(x) else x


@pytest.mark.parametrize("kind", [Flattened, Failing])
def test_python_modules_are_as_before(kind):
    before = set(globals())
    try:
        capture(kind().eval(), X)
    except CaptureError:
        assert kind is Failing
    assert set(globals()) == before


def test_python_modules_with_their_own_function_keep_it():
    scope = types.ModuleType("own_lengths")
    scope.len = lambda values: 7
    sys.modules["own_lengths"] = scope
    try:
        kind = type("Own", (nn.Module,), {"__module__": "own_lengths"})
        with dynamic_lengths(kind()):
            assert scope.len(X) == 7
        assert scope.len(X) == 7
    finally:
        del sys.modules["own_lengths"]


def test_lengths_of_other_values_are_those_of_python():
    assert [size_or_length(value) for value in ([1, 2], "abc", {}, X)] == [2, 3, 0, 2]
    with pytest.raises(TypeError):
        size_or_length(torch.tensor(1.0))
