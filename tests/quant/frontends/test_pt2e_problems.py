"""What users of PyTorch's export flow ran into, by the number in its cases, where no other file has it.

| | |
| --- | --- |
| 1 int8 slower than float | below, as far as no clock is needed; `intaglio bench` and benchmarks/ measure |
| 2 nothing quantized, nothing said | quant/annotate/test_node_annotations.py, quant/recipes/test_recipe.py |
| 3 train and eval overwrite dropout and batch norm; 4 standalone norms; 5 linear and norm of three axes; 6 tied weights; 11 eval | quant/qat/test_training.py |
| 7 sharing | quant/annotate/test_node_annotations.py |
| 8, 9, 10, 12, 14, 16 | below |
| 13 slower from one version to the next | below, by the passes over memory that a call takes; benchmarks/, by the clock |
| 15 folded dequantize | quant/qdq/test_reference_guarantees.py |
"""  # noqa: E501

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import intaglio
from intaglio import stages
from intaglio.annotation import X86Quantizer, get_symmetric_quantization_config
from intaglio.errors import CalibrationError
from intaglio.numerics import quantize
from intaglio.ops import OPS, interpret
from intaglio.quant.calibrate.calibration_loop import calibrate
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.calibrate.tensor_statistics import Statistics
from intaglio.quant.qdq.convert import convert
from intaglio.runtime import QuantizedModel
from support import nets
from support.lowering import lowered as lowered_of
from support.lowering import quantized, sqnr
from support.nets import Body
from support.slow_params import slow_params, slow_params_except

SOURCES = Path(intaglio.__file__).parent


def conv(inputs: int = 3, outputs: int = 4) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


@pytest.mark.case("export problem 1")
def test_fast_defaults_need_no_flag_and_slow_options_say_so():
    from torch._inductor import config

    freezing, x = config.freezing, torch.randn(2, 3, 8, 8)
    model = nets.randomize(conv())
    assert type(intaglio.quantize(model, [x])) is QuantizedModel
    assert config.freezing is freezing
    assert "slower than the float model" in repr(quantized(model, x)[0])


@pytest.mark.slow(reason="calibrates a layer with three shapes")
@pytest.mark.case("export problem 8")
def test_one_layer_sees_inputs_of_several_shapes_and_ranks():
    """Within a call, and from batch to batch; weights in groups too."""

    def body(m, x, rows):
        return m.a(x), m.a(rows), m.a(rows[:, 0])

    model = nets.randomize(Body(body, a=nn.Linear(32, 8)))
    recipe = intaglio.Recipe.of({"a": {"weights": "group:16", "weights_dtype": "s4"}})
    for quantizer in (None, stages.Quantizer(recipe)):
        stage = prepare(stages.capture(model, (torch.randn(4, 32), torch.randn(4, 6, 32))), quantizer)
        calls = [(torch.randn(n, 32), torch.randn(n, 6, 32)) for n in (4, 1, 9)]
        found = convert(stage, calibrate(stage, [list(call) for call in calls]))
        native = stages.compile(found)
        for call in calls:
            for ours, exact in zip(native(*call), model(*call), strict=True):
                assert ours.shape == exact.shape
                assert sqnr(ours, exact) > (30 if quantizer is None else 12)


@pytest.mark.case("export problem 9")
def test_reduced_ranges_have_seven_bits():
    """What saturates elsewhere, and not here: end_to_end/test_native_models.py."""
    annotator = X86Quantizer().set_global(get_symmetric_quantization_config(reduce_range=True))
    stage = prepare(stages.capture(nets.randomize(conv()), torch.randn(2, 3, 8, 8)), annotator)
    kinds = {(site.qmin, site.qmax) for site in stage.annotations.sites if site.role == "activation"}
    assert kinds == {(0, 127)}


@pytest.mark.case("export problem 10")
@pytest.mark.parametrize("span", [1e-38, 1e-30, 1e-6, 1e30])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_ranges_tiny_and_huge_cost_no_memory_and_have_finite_scales(span, offset):
    """A histogram with bins as fine as its range would have as many as that range divides another one."""
    stage = prepare(stages.capture(nets.randomize(conv()), torch.randn(2, 3, 8, 8)))
    for _ in range(2):
        stage(torch.rand(2, 3, 8, 8) * span + offset)
    stage(torch.randn(2, 3, 8, 8) if span < 1 else torch.zeros(2, 3, 8, 8))
    found = convert(stage)
    assert all(0 < scale < float("inf") for q in found.qparams.values() for scale in q.scales)
    counts = [observer.statistics.bins for observer in stage.observers.values()]
    assert {bins.nbytes for bins in counts} == {Statistics().bins.nbytes}


@pytest.mark.case("export problem 10")
def test_infinities_are_named_and_can_be_left_out():
    x = torch.randn(2, 3, 8, 8)
    x[0, 0, 0, 0] = float("inf")
    stage = prepare(stages.capture(nets.randomize(conv()), torch.zeros(2, 3, 8, 8)))
    with pytest.raises(CalibrationError, match="1 infinite values"):
        calibrate(stage, [x])
    found = convert(stage, calibrate(stage, [x], nonfinite="ignore"))
    assert found.qparams["#0/input.input_1"].step < 1


@pytest.mark.case("export problem 12")
def test_values_at_rounding_boundaries_are_rounded_the_same_everywhere():
    """Halves of a step, and one unit in the last place beside them: torch's operator, the interpreter, the program."""
    model = nets.randomize(Body(lambda m, x: F.relu(m.a(x)), a=nn.Linear(64, 64)))
    captured = stages.capture(model, torch.randn(4, 64))
    reference, graph = lowered_of(captured, torch.randn(64, 64))
    q = reference.qparams["#0/input.args_0"]
    middle = ((np.arange(-320, 320) + 0.5) * q.step).astype(np.float32)
    values = np.concatenate([middle, np.nextafter(middle, np.float32(9)), np.nextafter(middle, np.float32(-9))])
    x = np.resize(values, (30, 64))
    given = (q.step, q.zero, q.qmin, q.qmax)
    theirs = torch.ops.quantized_decomposed.quantize_per_tensor.default(torch.from_numpy(x), *given, torch.uint8)
    assert np.array_equal(theirs.numpy(), quantize(x, *given))
    seen: dict[str, np.ndarray] = {}
    results = interpret(graph.graph, [x], OPS, watch=seen.__setitem__)
    assert np.array_equal(seen["args_0_u8"], theirs.numpy())
    assert np.array_equal(stages.compile(graph)(torch.from_numpy(x)).numpy(), results[0])


def dense(m, x):
    features = [F.relu(m.stem(x))]
    for norm, layer in zip(m.norms, m.layers, strict=True):
        features.append(layer(F.relu(norm(torch.cat(features, 1)))))
    return m.head(torch.cat(features, 1).mean((2, 3)))


def mobile(m, x):
    x = F.hardswish(m.stem(x))
    y = F.hardswish(m.depthwise(F.hardswish(m.expand(x))))
    y = y * F.hardsigmoid(m.rise(F.relu(m.squeeze(y.mean((2, 3), keepdim=True)))))
    return m.head((x + m.project(y)).mean((2, 3)))


def grown(widths: tuple[int, ...]) -> dict[str, nn.Module]:
    norms, layers = [nn.BatchNorm2d(width) for width in widths], [conv(width, 8) for width in widths]
    return {"norms": nn.ModuleList(norms), "layers": nn.ModuleList(layers), "head": nn.Linear(widths[-1] + 8, 10)}


LAYER, CURVED = "conv2d + requantize", "conv2d + requantize + table"
POOL, HEAD = "adaptive_avg_pool2d", "linear + dequantize"
STEPS = {
    dense: (
        {"stem": nets.conv_bn(3, 16), **grown((16, 24))},
        ["pixels", LAYER, "affine", LAYER, "cat", "affine", LAYER, "cat", POOL, HEAD],
    ),
    mobile: (
        {
            "stem": nets.conv_bn(3, 16, 3, 2),
            "expand": nets.conv_bn(16, 64, 1),
            "squeeze": nn.Conv2d(64, 16, 1),
            "depthwise": nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.BatchNorm2d(64)),
            "rise": nn.Conv2d(16, 64, 1),
            "project": nets.conv_bn(64, 16, 1),
            "head": nn.Linear(16, 10),
        },
        ["pixels", CURVED, CURVED, CURVED, POOL, LAYER, CURVED, "mul + conv2d + add", POOL, HEAD],
    ),
}
"""The two networks of the report in small: how they go on, and every pass over memory that their programs take."""


@pytest.mark.slow(reason="compiles a network of depthwise convolutions")
@pytest.mark.case("export problem 13")
@pytest.mark.parametrize("body", slow_params_except(mobile, of=STEPS, reason="another network"))
def test_the_number_of_passes_per_network_does_not_grow(body):
    parts, steps = STEPS[body]
    model = nets.randomize(Body(body, **parts)).eval()
    native = intaglio.quantize(model, [torch.randn(4, 3, 32, 32)], progress=False)
    assert [step.kinds for step in native.artifact.program.steps] == steps
    assert not native.islands


@pytest.mark.case("export problem 14")
@pytest.mark.parametrize(
    "train", [False, *slow_params(True, reason="the batch is free for training by the same capture")]
)
def test_an_example_of_batch_1_leaves_the_batch_free(train):
    model = nets.randomize(nets.ConvBnRelu()).train(train)
    x = nets.example(model, 1)
    stage = stages.prepare(stages.capture(model, x, train=train), qat=train)
    for batch in (1, 5):
        assert len(stage(nets.example(model, batch))) == batch
    if train:
        stage.eval()
    native = stages.compile(stages.convert(stage))
    for batch in (1, 3, 7):
        assert len(native(nets.example(model, batch))) == batch


@pytest.mark.case("export problem 16")
def test_removed_export_functions_of_pytorch_are_not_called():
    gone = re.compile("capture_pre_autograd_graph|export_for_training|export_for_inference|prepare_pt2e|_export\\(")
    of_torchao = re.compile(r"import convert_pt2e, prepare_pt2e|\bprepare_pt2e\(")
    found = []
    for file in SOURCES.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if "from torchao.quantization.pt2e.quantize_pt2e import" in text:
            text = of_torchao.sub("", text)  # these functions of torchao exist
        if gone.search(text):
            found.append(file.name)
    assert not found
