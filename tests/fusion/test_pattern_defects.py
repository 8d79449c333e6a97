"""Defects D1 to D14 of the pattern framework that ours follows, each with a test that would have found it, and the
conformance cases of sharing."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import intaglio
from intaglio import numerics, stages
from intaglio.calibration import (
    AverageMaxCalibrationCallback,
    CalibrationCallback,
    Calibrator,
    GlobalCalibrationCallback,
)
from intaglio.patterns import QuantizerPattern, builtin, op
from intaglio.stages import Quantizer
from support import nets
from support.custom_operators import WEIGH, weigh
from support.nets import Body
from support.slow_params import slow_params

DRAW = torch.Generator().manual_seed(3)


def all_stages(model, data, *names, calibration=None, patterns=(), operators=()):
    """Reference and integer graph of a model that these patterns quantize."""
    given = [*builtin(*names, calibration=calibration), *patterns]
    captured = stages.capture(model.eval(), data[0])
    prepared = stages.prepare(captured, Quantizer(patterns=given, operators=operators))
    reference = stages.convert(prepared, Calibrator(prepared, data).calibrate())
    return reference, stages.requantize(reference)


def noise(found, exact) -> float:
    return float((found - exact).detach().abs().max())


@pytest.mark.case("patterns D1")
def test_the_scale_of_a_bias_is_that_of_the_accumulator():
    model = nets.randomize(nn.Sequential(nn.Linear(16, 8)))
    with torch.no_grad():
        model[0].bias += 50
    data = [torch.rand(32, 16, generator=DRAW)]
    reference, lowered = all_stages(model, data, "dense", calibration=AverageMaxCalibrationCallback())
    x, w = reference.qparams["#0/input.input_1"], reference.qparams["0.weight"]
    (bias,) = [array for array in lowered.graph.constants.values() if array.dtype == np.int32]
    unit = np.float64(x.step) * np.array(w.scales)
    assert np.array_equal(bias, np.rint(model[0].bias.detach().numpy().astype(np.float64) / unit))
    assert noise(lowered(data[0]), model(data[0])) < 0.05


def shifted(padding=1, **rest):
    """A convolution whose input has its zero in the middle of the quantized values."""
    model = nets.randomize(nn.Sequential(nn.Conv2d(2, 4, 3, padding=padding, **rest)))
    return model, GlobalCalibrationCallback(1 / 64, 100)


@pytest.mark.case("patterns D2")
@pytest.mark.parametrize("padding", [1, (2, 0), "same"])
def test_borders_are_padded_with_the_zero_point(padding):
    model, callback = shifted(padding)
    x = torch.full((1, 2, 5, 5), 1.5)
    exact = model(x)
    _, lowered = all_stages(model, [x], "conv2d", calibration=callback)
    assert noise(lowered(x), exact) < 0.02, "1.5 is a level, so only weights are rounded"


@pytest.mark.case("patterns D3")
def test_height_and_width_are_padded_in_any_memory_format():
    model, callback = shifted(padding=(2, 0))
    x = torch.rand(3, 2, 6, 9, generator=DRAW)
    _, lowered = all_stages(model, [x], "conv2d", calibration=callback)
    compiled = stages.compile(lowered)
    last = x.to(memory_format=torch.channels_last)
    assert compiled(last).shape == model(x).shape == (3, 4, 8, 7)
    assert torch.equal(compiled(last), compiled(x))
    assert torch.equal(compiled(x), lowered(x))


@pytest.mark.case("patterns D4")
@pytest.mark.parametrize("name", ["add", "multiply"])
def test_sums_and_products_subtract_zero_points(name):
    """Operands of unlike parameters; what rounding of two operands and the result can do, and no more."""
    model = Body(lambda m, x, y: x + y if name == "add" else x * y)
    x, y = torch.rand(64, 4, generator=DRAW) - 0.3, 3 * torch.rand(64, 4, generator=DRAW) + 1
    reference, lowered = stages_of_two(model, x, y, name)
    parameters = [q for key, q in reference.qparams.items() if "input" in key]
    assert [q.zero > 0 for q in parameters] == [True, False]
    steps = [q.step for q in reference.qparams.values()]
    bound = sum(steps) / 2 if name == "add" else (steps[0] * 4 + steps[1] * 0.7 + steps[2]) / 2
    assert noise(lowered(x, y), model(x, y)) <= 1.01 * bound


def stages_of_two(model, x, y, *names):
    captured = stages.capture(model.eval(), (x, y))
    patterns = builtin(*names, calibration=AverageMaxCalibrationCallback())
    prepared = stages.prepare(captured, Quantizer(patterns=patterns))
    reference = stages.convert(prepared, Calibrator(prepared, [(x, y)]).calibrate())
    return reference, stages.requantize(reference)


@pytest.mark.case("patterns D5")
def test_the_range_of_one_sided_data_is_not_halved():
    model = nets.randomize(nn.Sequential(nn.Linear(16, 8)))
    data = [torch.rand(64, 16, generator=DRAW), torch.rand(64, 16, generator=DRAW)]
    data = [batch.clamp(max=0.99) for batch in data]
    data[0][0, 0] = data[1][0, 0] = 1.0
    reference, _ = all_stages(model, data, "dense", calibration=AverageMaxCalibrationCallback())
    q = reference.qparams["#0/input.input_1"]
    assert (q.step, q.zero) == (float(np.float32(1 / 255)), 0)


@pytest.mark.case("patterns D6")
@pytest.mark.parametrize("layer", [nn.Conv2d(3, 6, 3, groups=3), nn.ConvTranspose2d(3, 6, 3), nn.Linear(8, 6)])
def test_scales_per_channel_are_each_channels_own(layer):
    model = nets.randomize(nn.Sequential(layer))
    axis = 1 if isinstance(layer, nn.ConvTranspose2d) else 0
    with torch.no_grad():
        layer.weight.movedim(axis, 0)[2] = 0
        layer.weight.movedim(axis, 0)[3] *= 20
        layer.bias[2] = 0
    shape = (8,) if isinstance(layer, nn.Linear) else (3, 8, 8)
    x = torch.randn(8, *shape, generator=DRAW)
    reference, lowered = all_stages(
        model, [x], *("conv2d", "conv_transpose2d", "linear"), calibration=AverageMaxCalibrationCallback()
    )
    absmax = layer.weight.detach().movedim(axis, 0).flatten(1).abs().amax(1).numpy()
    assert reference.qparams["0.weight"].scales == tuple(map(float, numerics.symmetric_scale(absmax, 127)))
    assert reference.qparams["0.weight"].scales[2] == 1, "a channel of zeros"
    found, exact = (values.movedim(1, 0).flatten(1) for values in (lowered(x), model(x)))
    rest = [0, 1, 3, 4, 5]
    assert torch.all((found - exact)[rest].square().mean(1) < 4e-4 * exact[rest].square().mean(1)), "34 dB a channel"
    assert torch.equal(found[2], torch.zeros_like(found[2]))


@pytest.mark.case("patterns D6")
@pytest.mark.parametrize("cut", [1, 7, 64])
def test_averages_weight_batches_equally(cut):
    model = nets.randomize(nn.Sequential(nn.Linear(4, 2)))
    x = torch.rand(64, 4, generator=DRAW).clamp(max=0.9)
    x[:, 0] = 1.0
    callback = AverageMaxCalibrationCallback(per_channel=False)
    reference, _ = all_stages(model, list(x.split(cut)), "dense", calibration=callback)
    assert reference.qparams["#0/input.input_1"].step == float(np.float32(1 / 255))
    assert len(set(reference.qparams["0.weight"].scales)) == 1


@pytest.mark.case("patterns D7")
def test_a_model_of_several_results_gives_them_all():
    layers = {"c": nn.Linear(4, 4), "d": nn.Linear(4, 2)}
    model = nets.randomize(Body(lambda m, x: {"a": m.c(x), "b": (m.d(m.c(x)), x)}, **layers))
    x = torch.randn(5, 4, generator=DRAW)
    reference, lowered = all_stages(model, [x], "dense", calibration=AverageMaxCalibrationCallback())
    for found in (reference(x), lowered(x), stages.compile(lowered)(x)):
        assert list(found) == ["a", "b"]
        assert found["b"][0].shape == (5, 2)
        assert torch.equal(found["b"][1], x)


@pytest.mark.case("patterns D8", "calibration 31")
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.c(x) + (y := m.c(x)) * y,
        lambda m, x: (y := F.relu(x)) + y,
        *slow_params(lambda m, x: torch.cat([x * x, x * x], 1), reason="a concatenation of what is read twice"),
    ],
)
def test_a_value_read_twice_has_one_site(body):
    model = nets.randomize(Body(body, c=nn.Linear(4, 4)))
    x = torch.rand(8, 4, generator=DRAW)
    reference, lowered = all_stages(model, [x], "dense", "add", "multiply", calibration=AverageMaxCalibrationCallback())
    values = [site.value for site in reference.annotations.sites if site.role == "activation"]
    assert len(values) == len(set(values))
    assert noise(lowered(x), model(x)) < 0.05
    assert torch.equal(stages.compile(lowered)(x), lowered(x))


@pytest.mark.case("patterns D9")
def test_sites_are_those_of_the_operands_that_are_quantized():
    """The operator's first operand is a constant; the only site of an input is the second's."""
    seen = []

    class Names(CalibrationCallback):
        def calibrate(self, info):
            seen.append((info.sites.inputs, [x.shape for x in info.unquantized_inputs(0)]))
            return {info.sites.inputs[0]: (0.5, 3)}

    model = nets.randomize(Body(lambda m, x: weigh(m.g, x), g=nn.Parameter(torch.rand(3))))
    pattern = QuantizerPattern("weigh", op("weigh"), calibration=Names())
    x = torch.rand(2, 3, 4, 4, generator=DRAW)
    captured = stages.capture(model, x)
    prepared = stages.prepare(captured, Quantizer(patterns=[pattern], operators=[WEIGH]))
    reference = stages.convert(prepared, Calibrator(prepared, [x]).calibrate())
    assert seen == [(("#0/input.args_0",), [(2, 3, 4, 4)])]
    assert reference.qparams["#0/input.args_0"].zero == 3


@pytest.mark.case("patterns D10")
def test_padding_is_the_zero_point_and_a_mean_has_its_own_range():
    layers = {"c": nn.Conv2d(3, 4, 1)}
    model = nets.randomize(Body(lambda m, x: F.pad(m.c(x), (1, 1, 1, 1)).mean((2, 3)), **layers))
    x = torch.randn(4, 3, 6, 6, generator=DRAW)
    patterns = ("conv2d", "pad", "adaptive_avg_pool2d")
    reference, lowered = all_stages(model, [x], *patterns, calibration=AverageMaxCalibrationCallback())
    conv, mean = (reference.qparams[name] for name in ("c#0/conv2d.0", "#0/mean.0"))
    assert conv.zero > 0
    assert mean.step < conv.step / 2, "a mean varies less than what it is of"
    assert noise(lowered(x), model(x)) < conv.step / 2


@pytest.mark.case("patterns D10")
def test_a_square_root_is_computed_in_float():
    layers = {"c": nn.Linear(4, 4), "d": nn.Linear(4, 4)}
    model = nets.randomize(Body(lambda m, x: m.d(torch.sqrt(F.relu(m.c(x)) + 1)), **layers))
    x = torch.rand(16, 4, generator=DRAW)
    reference, lowered = all_stages(model, [x], "dense", calibration=AverageMaxCalibrationCallback())
    assert any("sqrt" in skip.origin.operator for skip in reference.annotations.skipped)
    assert noise(lowered(x), model(x)) < 0.03


@pytest.mark.slow(reason="quantizes a residual network twice")
@pytest.mark.case("patterns D11")
def test_constants_are_folded_only_if_no_bit_changes():
    """Scales per channel, and two roundings in a row where a value has two readers of unlike parameters."""
    model = nets.randomize(nets.Residual())
    x = nets.example(model, 8)
    reference, lowered = all_stages(model, [x], "conv2d", "linear", "add", calibration=AverageMaxCalibrationCallback())
    axes = [kind.q.axis for name, kind in lowered.graph.types.items() if kind.q and name.endswith("_acc")]
    assert axes
    assert all(axis is not None for axis in axes)
    assert noise(lowered(x), reference(x)) < 0.02 * float(reference(x).abs().max())
    assert torch.equal(stages.compile(lowered)(x), lowered(x))


@pytest.mark.case("patterns D12")
def test_quantize_gives_callbacks_their_data():
    class Seen(CalibrationCallback):
        batches = 0

        def calibrate(self, info):
            self.batches = info.batches
            return {}

    callback, model = Seen(), nets.randomize(nn.Sequential(nn.Linear(4, 4)))
    data = (torch.randn(2, 4, generator=DRAW) for _ in range(3))
    intaglio.quantize(model, data, quantizer=stages.Quantizer(patterns=builtin("dense", calibration=callback)))
    assert callback.batches == 3


@pytest.mark.case("patterns D13", "calibration 33")
def test_operators_on_integer_tensors_match_no_pattern():
    model = nets.randomize(Body(lambda m, x, i: (m.c(x) + m.c(x), i + 1, i + i), c=nn.Linear(4, 4)))
    args = torch.randn(2, 4, generator=DRAW), torch.arange(3)
    captured = stages.capture(model, args)
    prepared = stages.prepare(captured, Quantizer(patterns=builtin("dense", "add")))
    assert [match.reason for match in prepared.annotations.rejected] == ["its result is not a float32 tensor but i64"]
    found = stages.requantize(stages.convert(prepared, stages.calibrate(prepared, [args])))(*args)
    assert [part.tolist() for part in found[1:]] == [[1, 2, 3], [0, 2, 4]]


@pytest.mark.case("patterns D14")
def test_the_documented_patterns_give_the_documented_graph():
    model = nets.randomize(nn.Sequential(nn.Flatten(), nn.Linear(49, 16), nn.ReLU(), nn.Linear(16, 10), nn.Softmax(1)))
    names = ("conv2d_bias", "conv2d", "dense", "add", "multiply")
    x = torch.rand(5, 1, 7, 7, generator=DRAW)
    _, lowered = all_stages(model, [x], *names, calibration=AverageMaxCalibrationCallback())
    kinds = [op.kind for op in lowered.graph.ops]
    assert kinds == ["quantize", "reshape", "linear", "requantize", "linear", "dequantize", "loop"]
    assert noise(lowered(x), model(x)) < 0.02


# -- sharing ----------------------------------------------------------------------------------------------------------


@pytest.mark.case("calibration 28")
def test_calls_of_one_module_have_ranges_of_their_own_and_one_weight():
    model = nets.randomize(Body(lambda m, x: m.c(3 * F.relu(m.c(x))), c=nn.Linear(4, 4)))
    data = [torch.rand(8, 4, generator=DRAW)]
    reference, _ = all_stages(model, data, "linear", calibration=AverageMaxCalibrationCallback())
    assert [name for name in reference.qparams if name.endswith("weight")] == ["c.weight"]
    first, second = (reference.qparams[name] for name in ("#0/input.args_0", "#0/mul.0"))
    assert first != second


@pytest.mark.case("calibration 29")
def test_a_weight_of_two_layers_is_quantized_once():
    model = nets.randomize(Body(lambda m, x: m.d(F.relu(m.c(x))), c=nn.Linear(4, 4), d=nn.Linear(4, 4)))
    model.d.weight = model.c.weight
    reference, lowered = all_stages(model, [torch.rand(8, 4, generator=DRAW)], "linear")
    assert sum(site.role == "weight" for site in reference.annotations.sites) == 1
    assert sum(array.dtype == np.int8 for array in lowered.graph.constants.values()) == 1


@pytest.mark.case("calibration 30")
def test_one_quantize_whatever_reads_a_value_and_the_float_reader_reads_floats():
    layers = {name: nn.Linear(4, 4) for name in "abc"}
    model = nets.randomize(Body(lambda m, x: (m.a(x), m.b(x), m.c(x), torch.tan(x)), **layers))
    x = torch.rand(8, 4, generator=DRAW)
    _, lowered = all_stages(model, [x], "linear", calibration=AverageMaxCalibrationCallback())
    assert [op.kind for op in lowered.graph.ops].count("quantize") == 1
    assert torch.equal(lowered(x)[3], torch.tan(x))
