"""Whole models through the export door: modes, copies, files of recipes and ranges."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intaglio import stages
from intaglio.errors import ArtifactError
from intaglio.quant.calibrate.calibration_loop import calibrate
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.calibrate.ranges import Ranges
from intaglio.quant.qdq.convert import convert
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from support import nets
from support.int8_models import assert_same, compiled, picture
from support.lowering import assert_equal_quantized, captured_net, kinds, lowered, quantized, sqnr
from support.nets import Body

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def conv(inputs: int = 3, outputs: int = 4, kernel: int = 3, **rest) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **rest)


@pytest.mark.case("frontends A9")
def test_a_concatenation_of_a_single_tensor_then_a_pool_shares_all_the_way():
    """A9: of one tensor; of two, and of one twice, are in ops/test_binary_operators.py."""
    reference, graph = quantized(
        nets.randomize(Body(lambda m, x: m.d(F.max_pool2d(torch.cat([m.c(x)], 1), 2)), c=conv(), d=conv(4))), X
    )
    assert not graph.islands
    leaders = reference.annotations.leaders
    assert leaders["#0/max_pool2d.0"] == leaders["c#0/conv2d.0"] == "c#0/conv2d.0"
    assert reference.qparams["#0/max_pool2d.0"] == reference.qparams["c#0/conv2d.0"]
    assert_equal_quantized(reference, graph, X)


def functional(m: nn.Module, x: Tensor) -> Tensor:
    y = F.relu(F.conv2d(x, m.k, padding=1) + m.c(x))
    return F.linear(torch.sigmoid(F.avg_pool2d(y, 2)).flatten(1), m.w)


@pytest.mark.slow(reason="quantizes twice; files of recipes and of ranges have tests in quant")
@pytest.mark.case("frontends A12", "problem 30")
def test_a_recipe_and_ranges_from_files_reproduce_the_model(tmp_path):
    """A12: a model of the same weights, never calibrated, gives the same integers, functional operators included."""
    parts = {"k": nn.Parameter(torch.ones(4, 3, 3, 3)), "w": nn.Parameter(torch.ones(5, 64))}
    model = nets.randomize(Body(functional, c=conv(), **parts))
    recipe = Recipe.of({"c": {"weights": "tensor"}, "op:aten.linear": {"method": "minmax"}})
    prepared = prepare(stages.capture(model, X), Quantizer(recipe))
    ranges = calibrate(prepared, [X])
    ranges.save(tmp_path / "ranges.json")
    recipe.save(tmp_path / "recipe.toml")
    original = convert(prepared, ranges)

    fresh = copy.deepcopy(model)
    again = prepare(stages.capture(fresh, X[:1]), Quantizer(Recipe.load(tmp_path / "recipe.toml")))
    loaded = convert(again, Ranges.load(tmp_path / "ranges.json"))
    assert loaded.text() == original.text()
    assert loaded.qparams == original.qparams
    assert torch.equal(loaded(X), original(X))
    first, second = (stages.requantize(stage).graph for stage in (original, loaded))
    assert all((first.constants[name] == second.constants[name]).all() for name in first.constants)


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 3 * inputs
        self.expand = nn.Sequential(nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6())
        depthwise = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False)
        self.depthwise = nn.Sequential(depthwise, nn.BatchNorm2d(wide), nn.ReLU6())
        self.project = nn.Sequential(nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.depthwise(self.expand(x)))
        return x + y if self.shortcut else y


class SmallMobileNet(nn.Module):
    """MobileNetV2 (Sandler et al. 2018) in small: depthwise, ReLU6, linear bottlenecks, dropout, functional pool."""

    shape = (3, 24, 24)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        shapes = ((8, 8, 1), (8, 12, 2), (12, 12, 1), (12, 12, 1))
        self.blocks = nn.Sequential(*[InvertedResidual(*shape) for shape in shapes])
        self.dropout, self.classifier = nn.Dropout(0.2), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1)
        return self.classifier(self.dropout(torch.flatten(y, 1)))


@pytest.mark.slow(reason="compiles a network of depthwise convolutions")
@pytest.mark.case("frontends A14")
def test_a_small_mobilenet_is_int8_throughout_and_agrees():
    """A14: at least 97 % of random images keep their class; all MACs in int8."""
    model = nets.randomize(SmallMobileNet())
    reference, graph = quantized(model, nets.example(model, 32))
    assert not graph.islands
    assert graph.macs[0] == graph.macs[1] > 0
    x = nets.example(model, 200, seed=5)
    exact = model(x)
    for stage in (reference, graph):
        assert (stage(x).argmax(1) == exact.argmax(1)).float().mean() >= 0.97
        assert sqnr(stage(x), exact) > 20


STAGES = ("captured", "prepared", "reference", "lowered")


@pytest.fixture(scope="module")
def all_stages():
    model, captured = captured_net(nets.Residual)
    prepared = prepare(captured)
    calibrate(prepared, [nets.example(model, 4)])
    reference = convert(prepared)
    return dict(zip(STAGES, (captured, prepared, reference, stages.requantize(reference)), strict=True))


@pytest.mark.case("frontends B11")
@pytest.mark.parametrize("name", STAGES)
def test_a_copy_of_a_stage_is_independent(name, all_stages):
    """B11."""
    copied, x = copy.deepcopy(all_stages[name]), picture()
    assert copied.text() == all_stages[name].text()
    assert torch.equal(copied(x), all_stages[name](x))
    if name == "prepared":
        before = convert(all_stages[name]).text()
        assert convert(copied).text() == before
        calibrate(copied, [100 * x])
        assert convert(copied).text() != before == convert(all_stages[name]).text()


@pytest.mark.case("frontends B11")
def test_stages_that_cannot_be_pickled_say_what_to_save(all_stages):
    """B11: all_stages that are torch.fx graphs would come back without types and sites."""
    again = pickle.loads(pickle.dumps(all_stages["lowered"]))
    assert torch.equal(again(picture()), all_stages["lowered"](picture()))
    for name in ("captured", "prepared", "reference"):
        with pytest.raises(ArtifactError, match="cannot be pickled") as raised:
            pickle.dumps(all_stages[name])
        assert "ranges.save(path)" in raised.value.remedy


@pytest.mark.case("frontends B24", "problem 8")
def test_train_and_eval_of_results_do_nothing_or_warn(all_stages):
    """B24: an int8 model warns on train() and stays; the all_stages have no mode to switch; twice is as once."""
    model, _ = compiled(nets.Residual)
    expected = model(picture())
    for _ in range(2):
        with pytest.warns(UserWarning, match="cannot be trained"):
            model.train()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.eval()
            model.train(False)
        assert_same(model(picture()), expected)
    for name in STAGES:
        assert not hasattr(all_stages[name], "train")
    before = all_stages["reference"](picture())
    all_stages["reference"].module.train()
    all_stages["prepared"].module.train()
    assert torch.equal(all_stages["reference"](picture()), before)
    assert all("dropout" not in str(node.target) for node in all_stages["prepared"].module.graph.nodes)


@pytest.mark.case("frontends B24")
def test_the_float_model_keeps_the_mode_it_had():
    """B24: half of it in training, half in evaluation, before and after."""
    model = nets.randomize(nets.Residual())
    model.blocks.train()
    modes = [module.training for module in model.modules()]
    graph = lowered(stages.capture(model, picture()), picture())[1]
    assert [module.training for module in model.modules()] == modes
    assert kinds(graph).count("island") == 0
