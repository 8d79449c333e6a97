"""Models that write to their inputs: every stage of quantization does so too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from intaglio import eager, stages
from support.int8_models import assert_same
from support.lowering import sqnr

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


class Writes(nn.Module):
    """Scales its input and replaces two columns of it."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        y = self.linear(x)
        x[:, 3:5] = y[:, :2]
        return y


MODEL = Writes().eval()


@pytest.fixture(scope="module")
def made() -> dict:
    captured = stages.capture(MODEL, X.clone())
    data = X.clone()
    prepared = stages.prepare(captured)
    reference = stages.convert(prepared, stages.calibrate(prepared, [data]))
    assert torch.equal(data, X), "calibration leaves its data unchanged"
    lowered = stages.requantize(reference)
    eager_model = eager.prepare(MODEL, X.clone())
    eager_model(X.clone())
    return {
        "captured": captured,
        "prepared": stages.prepare(captured),
        "reference": reference,
        "reference as a module": reference.as_module(),
        "lowered": lowered,
        "program": stages.compile(lowered),
        "training": stages.prepare(stages.capture(MODEL, X.clone(), train=True), qat=True).eval(),
        "eager": eager.convert(eager_model),
    }


@pytest.mark.parametrize(
    "stage",
    ["captured", "prepared", "reference", "reference as a module", "lowered", "program", "training", "eager"],
)
def test_every_stage_writes_what_the_float_model_writes(made, stage):
    expected, found = X.clone(), X.clone()
    exact, result = MODEL(expected), made[stage](found)
    assert sqnr(result.detach(), exact.detach()) > 25
    assert sqnr(found.detach(), expected.detach()) > 25
    if stage in ("captured", "prepared"):
        assert_same(found, expected.detach())
