"""Names of results and operators in comparisons."""

import math
import re

import torch
from torch import nn

import intaglio
from intaglio import stages
from support import nets
from support.lowering import lowered
from support.nets import Body


class Detector(nn.Module):
    """A model with a group norm and two named results."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)
        self.body, self.head = nn.Conv2d(8, 4, 3), nn.Linear(4, 5)

    def forward(self, x):
        features = self.body(torch.relu(self.norm(self.stem(x))))
        return {"logits": self.head(features.mean((2, 3))), "features": features}


@torch.no_grad()
def test_results_in_dictionaries_have_names():
    model, x = nets.randomize(Detector()), torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    captured = stages.capture(model, x)
    report = intaglio.compare(captured, lowered(captured, x)[0], [x])
    assert report.names == ("logits", "features")
    assert report.to_dict()["names"] == ["logits", "features"]
    heading, *_, end = str(report).splitlines()
    logits, features = report.results
    assert heading == f"results: logits {logits:.1f} dB, features {features:.1f} dB over 4 samples"
    assert end.startswith("verdict for logits: ")
    assert [row.name for row in report.rows if row.path == "norm" and "reshape" not in row.operator] == [
        "norm (aten.layer_norm.default, part of aten.group_norm.default)",
        "norm (aten.group_norm.default)",
    ]
    advice = next(line for line in report.advice(len(report.rows)) if line.startswith("skip='norm'"))
    assert re.search(r"part of aten\.group_norm\.default\).* and \d exact operators$", advice)


class Boxes:
    def __init__(self, scores, corners) -> None:
        self.scores, self.corners = scores, corners


@torch.no_grad()
def test_results_in_attributes_of_objects_are_compared():
    def forward(m, x):
        result = m.inner(x)
        return Boxes(result["logits"], [result["features"]])

    x = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    model = Body(forward, inner=nets.randomize(Detector())).eval()
    prepared = intaglio.eager.prepare(model, x)
    prepared(x)
    report = intaglio.compare(model, intaglio.eager.convert(prepared), [x])
    assert report.names == ("scores", "corners.0")
    assert all(20 < sqnr < math.inf for sqnr in report.results)
