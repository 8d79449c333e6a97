"""Remedies of errors of `compare`: each is provoked by a small model, then followed."""

import pytest
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.errors import IntaglioError
from support import nets

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def model(width: int = 8) -> nn.Module:
    return nets.randomize(nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4)))


def reference(float_model: nn.Module) -> stages.Reference:
    prepared = stages.prepare(stages.capture(float_model, X))
    return stages.convert(prepared, stages.calibrate(prepared, [X], progress=False))


REMEDIES = {
    "the reference of another model": (
        lambda: intaglio.compare(model(), reference(model(16)), [X]),
        "compare the reference with the float model that it was made from",
        lambda: intaglio.compare(model(), reference(model()), [X]),
    ),
    "nothing to compare": (
        lambda: intaglio.compare(model(), None, [X]),
        "pass what quantize, convert or eager.convert returns",
        lambda: intaglio.compare(model(), reference(model()), [X]),
    ),
    "results of another number": (
        lambda: intaglio.compare(model(), lambda x: (x, x), [X]),
        "compare a quantized model with its own float model",
        lambda: intaglio.compare(model(), lambda x: x[:, :4], [X]),
    ),
}


@pytest.mark.parametrize(("wrong", "remedy", "right"), REMEDIES.values(), ids=REMEDIES)
def test_following_the_remedy_of_a_tuning_error_removes_it(wrong, remedy, right):
    with pytest.raises(IntaglioError) as raised:
        wrong()
    assert remedy in raised.value.remedy
    right()
