"""A model is annotated once; its fusions are matched then, written on the graph, and read by every later stage."""

import pytest
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.fxgraph.node_info import info, update_info
from intaglio.lower.lowering import requantize
from intaglio.patterns import QuantizerPattern, builtin, op, wildcard
from intaglio.quant.annotate import annotate_graph as annotate_stage
from intaglio.quant.calibrate import prepare as prepare_stage
from intaglio.quant.correct import correct_weights
from intaglio.quant.qdq import convert as convert_stage
from intaglio.quant.qdq import integer_regions, qparams
from intaglio.quant.qdq.integer_regions import marked_regions
from intaglio.quant.recipes.recipe import Recipe
from intaglio.quant.recipes.settings import Setting
from support import nets
from support.slow_params import slow_params


class Block(nn.Module):
    """The end of a residual block, a function that is a lookup table, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        y = torch.relu(self.first(x))
        y = torch.relu(self.second(y) + y)
        return self.last(torch.sigmoid(y).mean((2, 3)))


def calibrated() -> stages.Prepared:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 6, 6)
    prepared = stages.prepare(stages.capture(Block().eval(), (x,)))
    prepared(x)
    return prepared


def made_reference() -> stages.Reference:
    return stages.convert(calibrated())


def test_operators_of_a_reference_know_their_fusion():
    reference = made_reference()
    named = {}
    for node in reference.module.graph.nodes:
        if (mark := info(node).region) is not None:
            named.setdefault(mark.index, (mark.fusion, []))[1].append(str(node.target))
    assert [(fusion, len(targets)) for fusion, targets in named.values()] == [
        ("anchor_clamp", 2),
        ("anchor_add_clamp", 3),
        ("sigmoid", 1),
        ("adaptive_avg_pool2d", 1),
        ("reshape", 1),
        ("linear", 1),
    ]
    assert [region.root.name for region in marked_regions(reference.module.graph)] == [
        region.root.name for region in reference.annotations.regions
    ]


def test_lowering_reads_the_matches_of_annotation_and_matches_nothing(monkeypatch):
    prepared = calibrated()

    def refuse(*args):
        pytest.fail("the reference was matched")

    monkeypatch.setattr(integer_regions, "match_rows", refuse)
    assert len(requantize(stages.convert(prepared)).graph.ops) > 4


def written(graph) -> list[tuple[str, list[str]]]:
    """Names of the regions on a graph, and of their operators."""
    return [
        (mark.fusion, [node.name for node in nodes]) for mark, nodes in integer_regions.marked_operators(graph).items()
    ]


def test_regions_of_the_reference_are_those_of_the_annotated_graph():
    prepared = calibrated()
    assert written(prepared.annotations.module.graph) == written(stages.convert(prepared).module.graph)


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return y @ y.transpose(1, 2) + 1, self.layer(y)


def test_operators_without_a_pattern_stay_in_float_beside_quantized_values():
    """A product reads values that layers read quantized: they have no parameters that its kernel takes."""
    x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))
    captured = stages.capture(Products().eval(), (x,))
    prepared = stages.prepare(captured, stages.Quantizer(patterns=["conv2d", "linear", "add"]))
    prepared(x)
    lowered = stages.requantize(stages.convert(prepared))
    kinds = [op.kind for op in lowered.graph.ops]
    assert kinds.count("linear") == 2
    assert "bmm" not in kinds


def test_a_function_that_no_pattern_takes_stays_in_float_between_quantized_values():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8)).eval()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    prepared = stages.prepare(stages.capture(model, (x,)), stages.Quantizer(patterns=["linear"]))
    prepared(x)
    reference = stages.convert(prepared)
    assert [name for name, _ in written(reference.module.graph)] == ["linear", "linear"]


def test_an_operator_without_a_region_stays_in_float():
    reference = made_reference()
    for node in reference.module.graph.nodes:
        if node.target is torch.ops.aten.linear.default:
            update_info(node, region=None)
    lowered = requantize(reference)
    assert lowered.islands or any(op.kind == "linear_f32" for op in lowered.graph.ops)


class Counter:
    """Calls a function and counts the calls."""

    def __init__(self, function):
        self.function, self.count = function, 0

    def __call__(self, *args, **kwargs):
        self.count += 1
        return self.function(*args, **kwargs)


def counter(monkeypatch, name: str, *modules) -> Counter:
    counted = Counter(getattr(modules[0], name))
    for module in modules:
        monkeypatch.setattr(module, name, counted)
    return counted


def test_a_model_is_annotated_once_with_equalization_and_corrections(monkeypatch):
    annotated = counter(monkeypatch, "annotate_graph", prepare_stage, annotate_stage)
    torch.manual_seed(0)
    data = [(torch.randn(16, 3, 6, 6),)]
    prepared = stages.prepare(
        stages.capture(nets.uneven(Block()).eval(), data[0]), stages.Quantizer(Recipe(default=Setting(bias="outputs")))
    )
    assert annotated.count == 1
    prepared = stages.equalize(prepared, data)
    assert prepared.equalization.inputs
    assert prepared.equalization.factors
    assert annotated.count == 1  # regions go along with the graphs that are divided
    ranges = stages.calibrate(prepared, data, progress=False)
    corrections = stages.correct(prepared, ranges, data)
    assert corrections.biases
    reference = stages.convert(prepared, ranges, corrections)
    stages.requantize(reference)
    assert annotated.count == 1


def test_parameters_are_computed_once_for_correct_and_convert(monkeypatch):
    activations = counter(monkeypatch, "activation_qparams", correct_weights, convert_stage)
    weights = counter(monkeypatch, "channel_scales", qparams)
    torch.manual_seed(0)
    data = [(torch.randn(4, 3, 6, 6),)]
    prepared = stages.prepare(stages.capture(Block().eval(), data[0]))
    ranges = stages.calibrate(prepared, data, progress=False)
    stages.convert(prepared, ranges, stages.correct(prepared, ranges, data))
    assert (activations.count, weights.count) == (1, 3)


class Gate(nn.Module):
    """Layers that read what a norm and a function give, which smoothing divides where sums stay in float."""

    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.second(torch.nn.functional.gelu(self.first(self.norm(x))))


@pytest.mark.parametrize("model", [Block(), Gate()], ids=["convolutions", "layers"])
@pytest.mark.parametrize(
    "recipe",
    [
        {},
        *slow_params(
            {"*": {"equalize": 0.5, "residual": "float", "bias": "outputs"}}, reason="corrections change no annotation"
        ),
    ],
)
def test_quantize_annotates_once(model, recipe, monkeypatch):
    annotated = counter(monkeypatch, "annotate_graph", prepare_stage, annotate_stage)
    torch.manual_seed(0)
    x = torch.randn(4, 3, 6, 6) if isinstance(model, Block) else torch.randn(4, 5, 16) * torch.logspace(-2, 2, 16)
    intaglio.quantize(model.eval(), [(x,)], recipe=recipe)
    assert annotated.count == 1


SIGMOID = QuantizerPattern("squash", op("aten.sigmoid.default", wildcard()))


@pytest.mark.parametrize("patterns", [builtin(), [SIGMOID, *builtin()]], ids=["built in", "own"])
def test_regions_of_patterns_go_along_with_the_graphs_that_are_divided(patterns, monkeypatch):
    torch.manual_seed(0)
    data = [(torch.randn(16, 3, 6, 6),)]
    quantizer = stages.Quantizer(Recipe(default=Setting(bias="outputs")), patterns=patterns)
    counted = counter(monkeypatch, "annotate_graph", prepare_stage, annotate_stage)
    prepared = stages.prepare(stages.capture(nets.uneven(Block()).eval(), data[0]), quantizer)
    equalized = stages.equalize(prepared, data)
    assert equalized.equalization.inputs
    assert equalized.equalization.factors
    assert counted.count == 1
    before, after = prepared.annotations, equalized.annotations
    assert [(r.name, r.pattern, len(r.nodes)) for r in after.regions] == [
        (r.name, r.pattern, len(r.nodes)) for r in before.regions
    ]
    assert after.skipped == before.skipped
    ranges = stages.calibrate(equalized, data, progress=False)
    reference = stages.convert(equalized, ranges, stages.correct(equalized, ranges, data))
    assert torch.equal(stages.compile(reference)(*data[0]), stages.requantize(reference)(*data[0]))
    assert counted.count == 1
