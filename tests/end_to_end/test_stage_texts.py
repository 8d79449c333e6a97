"""Golden texts: one tiny residual net at every stage, from capture to the integer graph."""

import pytest
import torch
from torch import nn

from intaglio.lower.lowering import requantize
from intaglio.quant.calibrate.calibration_loop import calibrate
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.qdq.convert import convert
from intaglio.tracing import capture
from support import nets


class Tiny(nn.Module):
    """conv-bn-relu, a residual sum, a pooled linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*nets.conv_bn(2, 4), nn.ReLU())
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.stem(x)
        return self.head(torch.relu(self.conv(x) + x).mean((2, 3)))


@pytest.fixture(scope="module")
def all_stages() -> dict[str, str]:
    """Stage name -> text. Weights and data are small dyadic numbers: float sums are exact on every machine."""
    model, x = nets.randomize(Tiny()), torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    x = (x * 8).round() / 8
    norm = model.stem[1]
    norm.eps = 0.0
    with torch.no_grad():
        for tensor in (*model.parameters(), norm.running_mean):
            tensor.copy_((tensor * 8).round() / 8)
        norm.running_var.fill_(4)
    prepared = prepare(capture(model, x))
    reference = convert(prepared, calibrate(prepared, [x]))
    return {
        "captured": capture(model, x).text(),
        "sites": prepared.annotations.text(),
        "prepared": prepared.text(),
        "reference": reference.text(),
        "integer": requantize(reference).text(),
    }


@pytest.mark.parametrize("stage", ["captured", "sites", "prepared", "reference", "integer"])
def test_the_text_of_a_stage_is_golden(stage, all_stages, golden):
    golden(all_stages[stage], stage)
