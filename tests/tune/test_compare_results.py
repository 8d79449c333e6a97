"""Names of results and operators in comparisons."""

import math
import re

import pytest
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.errors import InputError
from intaglio.quant.qdq.operator_names import projection_of
from intaglio.tune.comparison import ADVICE_DB, PRINTED_ROWS, Comparison, Row
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


def row(name: str, alone: float) -> Row:
    return Row(name, "", name, "aten.linear.default", "", alone, alone, skip=name)


def test_only_the_worst_operators_are_printed():
    rows = tuple(row(f"layer{i}", 20.0 + i) for i in range(PRINTED_ROWS + 3))
    text = str(Comparison(rows, (20.0,), 4))
    assert f"layer{PRINTED_ROWS - 1} " in text
    assert f"layer{PRINTED_ROWS} " not in text
    assert f"not listed: 3 operators from {20.0 + PRINTED_ROWS:.1f} dB alone on (they are in .listed)" in text


def test_operators_that_are_much_better_than_the_worst_are_not_advised_to_skip():
    rows = row("a", 20.0), row("b", 20.0 + ADVICE_DB), row("c", 20.1 + ADVICE_DB)
    advice = Comparison(rows, (20.0,), 4).advice()
    assert advice == [
        "skip='a' leaves in float: a (aten.linear.default)",
        "skip='b' leaves in float: b (aten.linear.default)",
        "all of them: skip=['a', 'b']",
    ]
    assert len(Comparison((rows[0], rows[2]), (20.0,), 4).advice()) == 1


def test_lines_of_installed_packages_are_not_printed_beside_a_module():
    installed = Row("n", "", "a", "aten.relu.default", "/x/site-packages/torch/nn/a.py:3, in forward", 20.0, 20.0)
    own = Row("n", "", "a", "aten.relu.default", "/x/net.py:3, in forward", 20.0, 20.0)
    assert "a.py:3" not in str(installed)
    assert "net.py:3" in str(own)


def test_projections_are_named_after_corrections_too():
    assert projection_of("self_attn_in_proj_weight_32_64_smoothed") == "key"
    assert projection_of("self_attn_out_proj_weight_equalized_fitted") == "output projection"


def test_swapped_arguments_are_an_error():
    model, x = nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(8, 4)
    quantized = intaglio.quantize(model, [x], progress=False)
    with pytest.raises(InputError, match=r"the first argument is an int8 model.*\n  remedy: call compare\(model, int8"):
        intaglio.compare(quantized, model, [x])
    assert isinstance(intaglio.compare(model, quantized, [x]), Comparison)
    nearest = {"*": {"activations": "token", "rounding": "nearest"}}
    assert intaglio.quantize(model, [x], recipe=nearest, progress=False).text("corrections") == "no corrections\n"
