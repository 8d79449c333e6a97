"""Remedies of errors of `autotune` and `compare`: each is provoked by a small model, then followed."""

import pytest
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.errors import IntaglioError
from intaglio.tune.accuracy import Criterion
from support import nets

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def model(width: int = 8) -> nn.Module:
    return nets.randomize(nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4)))


def reference(float_model: nn.Module) -> stages.Reference:
    prepared = stages.prepare(stages.capture(float_model, X))
    return stages.convert(prepared, stages.calibrate(prepared, [X], progress=False))


def metric(found: object, **options: object) -> float:
    return Criterion(lambda _: found, **options).metric_of(None, "the float model")


REMEDIES = {
    "a metric that is no function": (
        lambda: Criterion(0.9),
        "pass a function that takes a model and returns its metric",
        lambda: Criterion(lambda model: 0.9),
    ),
    "a negative loss": (
        lambda: metric(0.9, max_drop=-0.01),
        "pass max_drop=0.01 to accept a loss of 1 %",
        lambda: metric(0.9, max_drop=0.01),
    ),
    "a single evaluation": (
        lambda: metric(0.9, evaluations=1),
        "pass evaluations=2 or more",
        lambda: metric(0.9, evaluations=2),
    ),
    "a metric of several numbers": (
        lambda: metric(torch.ones(3)),
        "return one finite number, where higher is better; for a loss, return its negative",
        lambda: [metric(torch.ones(3).mean()), metric(-0.5)],
    ),
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
