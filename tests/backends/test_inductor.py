"""A reference model compiled by TorchInductor: the same numbers, int8 calls where there are some, nobody's settings."""

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import intaglio
from intaglio import stages
from intaglio.backends.channel_zero_points import byte_inputs
from intaglio.backends.inductor.inductor_graph import graph_for_inductor, graph_with_byte_inputs, is_int8_layer
from intaglio.backends.inductor.inductor_sizes import sizes_of_inputs
from intaglio.errors import BuildError, InputError, UnsupportedError
from intaglio.ops.dynamic_quant import quantize_dynamic
from intaglio.quant.annotate.per_token import decompositions
from support import torchvision_stub as beside
from support.processor import HAS_VNNI, needs_vnni

compiles = pytest.mark.slow(reason="Inductor compiles with the headers of PyTorch, for twenty seconds at first")
imports = pytest.mark.slow(reason="importing Inductor takes five seconds")

OWN_SUMS = 1e-5
"""Share of the largest result by which float sums in another order differ."""


UNSATURATED = {} if HAS_VNNI else {"*": {"activations_dtype": "u7"}}
"""Activations whose products with weights oneDNN adds without saturation on this processor."""


def converted(model, *inputs, recipe=UNSATURATED, dynamic_shapes=None, image=None):
    captured = stages.capture(model.eval(), inputs, dynamic_shapes=dynamic_shapes)
    prepared = stages.prepare(captured, stages.Quantizer(intaglio.Recipe.of(recipe), input=image))
    ranges = stages.calibrate(prepared, [inputs]) if prepared.observers else None
    return stages.convert(prepared, ranges)


def assert_close(got, wanted):
    """No quantized value differs: inputs are drawn so that no value lies as near the middle of two as rounding errors
    are."""
    assert (got - wanted).abs().max() <= OWN_SUMS * wanted.abs().max()


def placed(model):
    return [(str(one.origin.operator), one.kind, one.call) for one in model.report.operators]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(n, 16, 3, padding=1) for n in (3, 16, 16))
        self.norm, self.pool, self.head = nn.BatchNorm2d(16), nn.MaxPool2d(2), nn.Linear(16 * 16, 10)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = torch.relu(self.norm(self.third(torch.relu(self.second(x)))) + x)
        return self.head(self.pool(x).flatten(1))


@pytest.fixture(scope="module")
def residual():
    """A reference and its model, compiled while others have set what they like."""
    from torch._inductor import config as inductor_config

    torch.manual_seed(0)
    reference = converted(Residual(), torch.randn(8, 3, 8, 8))
    with inductor_config.patch(freezing=False, pre_grad_custom_pass=_refuse):
        before = inductor_config.get_config_copy()
        model = stages.compile(reference, backend="inductor")
        assert inductor_config.get_config_copy() == before
    return reference, model


def _refuse(graph):
    raise AssertionError("a pass of somebody else's ran")


@compiles
def test_layers_are_int8_calls_with_fused_operators(residual):
    assert placed(residual[1]) == [
        ("aten.conv2d.default", "int8 call", "qconv + relu -> uint8"),
        ("aten.relu.default", "fused", ""),
        ("aten.conv2d.default", "int8 call", "qconv + relu -> uint8"),
        ("aten.relu.default", "fused", ""),
        ("aten.conv2d.default", "int8 call", "qconv + sum + relu -> uint8"),
        ("aten.add.Tensor", "fused", ""),
        ("aten.relu.default", "fused", ""),
        ("aten.max_pool2d.default", "generated", ""),
        ("aten.view.default", "generated", ""),
        ("aten.linear.default", "int8 call", "qlinear -> float32"),
    ]
    assert "4 int8 call, 4 fused, 2 generated" in repr(residual[1])
    assert [one.origin.path for one in residual[1].report.of("int8 call")] == ["first", "second", "third", "head"]


@compiles
@pytest.mark.parametrize("batch", [1, 3, 7])
def test_any_batch_gives_the_results_of_the_reference(residual, batch):
    reference, model = residual
    x = torch.randn(batch, 3, 8, 8).to(memory_format=torch.channels_last)
    assert_close(model(x), reference(x))


@compiles
def test_sizes_of_two_and_more_share_a_program(residual):
    _, model = residual
    model(torch.randn(2, 3, 8, 8))
    count = len(model._programs)
    model(torch.randn(11, 3, 8, 8))
    assert len(model._programs) == count <= 2


@compiles
def test_calls_of_an_inductor_model_are_checked_like_native_ones(residual):
    with pytest.raises(InputError, match="shape"):
        residual[1](torch.randn(1, 3, 8, 9))


@imports
def test_settings_are_those_of_inductor():
    from torch._inductor import config as inductor_config

    from intaglio.backends.inductor.inductor_model import SETTINGS

    assert set(SETTINGS) <= set(inductor_config.get_config_copy())


@imports
def test_errors_of_inductor_are_build_errors_and_settings_come_back():
    from torch._inductor import config as inductor_config

    from intaglio.backends.inductor.inductor_model import configured_inductor

    freezing = inductor_config.freezing
    with pytest.raises(BuildError, match="no such thing"), configured_inductor():
        raise RuntimeError("no such thing\nand a long trace")
    assert inductor_config.freezing is freezing


@compiles
def test_arguments_of_the_native_backend_are_refused(residual):
    with pytest.raises(InputError, match="the inductor backend has no option isa; its options are example_inputs"):
        stages.compile(residual[0], backend="inductor", isa="avx2")
    with pytest.raises(InputError, match="'tvm' is not a backend"):
        stages.compile(residual[0], backend="tvm")


# ---- what Inductor's patterns would take for something else ---------------------------------------------------------


def graph(model, *inputs, **options):
    """What is handed over, after it gave the reference's result."""
    reference = converted(model, *inputs, **options)
    handed = graph_for_inductor(reference)
    with torch.no_grad():
        assert_close(handed(*inputs)[0], reference(*inputs))
    return handed


def targets(handed):
    return [str(node.target) for node in calls(handed)]


def calls(handed):
    return [node for node in handed.graph.nodes if node.op == "call_function"]


class AddsWhatIsNotItsOwn(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.offset = nn.Linear(16, 16), nn.Linear(16, 16), nn.Parameter(torch.randn(4, 16))

    def forward(self, x, y):
        return self.second(self.first(x) + y) + self.offset


@compiles
def test_a_sum_does_not_overwrite_an_input_or_a_constant():
    """Inductor would let oneDNN write it there: the second call would give another result."""
    torch.manual_seed(0)
    inputs = torch.randn(4, 16), torch.randn(4, 16)
    fixed = {"x": None, "y": None}
    floats = {"second": {"quantize": False}}
    reference = converted(AddsWhatIsNotItsOwn(), *inputs, recipe={**UNSATURATED, **floats}, dynamic_shapes=fixed)
    model = stages.compile(reference, backend="inductor", example_inputs=inputs)
    kept = [tensor.clone() for tensor in inputs]
    assert_close(model(*inputs), reference(*kept))
    assert_close(model(*inputs), reference(*kept))
    assert all(map(torch.equal, inputs, kept))


@compiles
@pytest.mark.parametrize(
    ("layer", "call"), [(nn.Linear, "qlinear"), (partial(nn.Conv2d, kernel_size=1), "qconv")], ids=["linear", "conv"]
)
def test_ranges_narrower_than_the_type_are_clamped(layer, call):
    torch.manual_seed(0)
    net = nn.Sequential(layer(16, 16), nn.ReLU(), layer(16, 8))
    x = torch.randn(8, 16) if layer is nn.Linear else torch.randn(8, 16, 2, 2)
    reference = converted(net, x, recipe={"*": {"activations_dtype": "u7"}})
    model = stages.compile(reference, backend="inductor", example_inputs=x)
    assert_close(model(8 * x), reference(8 * x))
    assert [one.call for one in model.report.of("int8 call")] == [f"{call} + relu -> uint8", f"{call} -> float32"]


def test_a_transposed_convolution_is_computed_in_float():
    torch.manual_seed(0)
    handed = graph(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 8, 3)), torch.randn(2, 3, 8, 8))
    assert targets(handed).count("quantized_decomposed.dequantize_per_channel.default") == 1


def test_layers_of_one_weight_have_scales_of_their_own():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x):
            return self.layer(torch.relu(self.layer(x)))

    handed = graph(Twice(), torch.randn(4, 16))
    weights = [node for node in calls(handed) if "per_channel" in str(node.target)]
    assert len({node.args[0] for node in weights}) == 1
    assert len({node.args[1] for node in weights}) == len(weights) == 2


@pytest.mark.parametrize(
    "setting",
    [{"weights": "tensor"}, {"activations": "float"}, {"activations_dtype": "f8e4m3", "weights_dtype": "f8e4m3"}],
)
def test_constant_operands_are_scalars_or_per_channel(setting):
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    handed = graph(net, torch.randn(4, 16), recipe={"*": setting})
    constant = [node for node in calls(handed) if "dequantize" in str(node.target) and node.args[0].op == "get_attr"]
    assert all("quantized_decomposed.dequantize_per_channel" in str(node.target) for node in constant)


@pytest.mark.parametrize("mode", ["row", "tensor"])
def test_per_token_quantize_is_decomposed_bit_identically(mode):
    x = torch.randn(3, 5, 8) * torch.logspace(-30, 30, 5)[:, None]
    x[0, 0, 0], x[1, 1], x[2, 2, 1] = float("nan"), 0, float("inf")
    reference = decompositions()[torch.ops.intaglio.quantize_rows.default]
    for got, wanted in zip(reference(x, mode), quantize_dynamic(x.numpy(), mode), strict=True):
        np.testing.assert_array_equal(got.numpy(), wanted)


def test_per_token_linear_layers_are_int8_calls():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    handed = graph(net, torch.randn(4, 16), recipe={"*": {"activations": "token"}})
    assert "intaglio.dequantize_rows.default" not in targets(handed)


@compiles
@pytest.mark.parametrize("offsets", [None, torch.full((5, 3), 0.01)])
def test_imported_weights_of_groups_are_decomposed(offsets):
    torch.manual_seed(0)
    integers = torch.randint(-8, 8, (5, 24)).to(torch.int8)
    weight = stages.QuantizedWeight.of(integers, torch.rand(5, 3) * 0.1, offsets)
    reference = converted(stages.with_weights(nn.Sequential(nn.Linear(24, 5)), {"0": weight}), torch.randn(2, 24))
    x = torch.randn(4, 24)
    assert_close(stages.compile(reference, "inductor")(x), reference(x))


def test_data_movement_is_on_quantized_values():
    torch.manual_seed(0)
    handed = graph(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0), torch.randn(2, 6, 32))
    moved = [node for node in handed.graph.nodes if str(node.target) == "aten.permute.default"]
    assert moved
    assert not any("dequantize" in str(node.args[0].target) for node in moved)


# ---- free sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda x: (y := torch.relu(x @ torch.ones(9, 4))).view(y.shape[0] * y.shape[1], -1), {"x_1"}),
        (lambda x: torch.zeros(nn.functional.avg_pool1d(x, 3, 2).shape), {"x_1"}),
        (lambda x: torch.zeros(torch.nonzero(x).shape[0], x.sum(1).shape[1]), {"x_1", "nonzero"}),
    ],
    ids=["as_they_are", "computed", "found_in_values"],
)
def test_sizes_are_read_off_inputs(function, wanted):
    made = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(torch.ones(2, 5, 9))
    sizes_of_inputs(made.graph)
    made.graph.lint()
    made.recompile()
    assert {node.args[0].name for node in calls(made) if node.target is torch.ops.aten.sym_size.int} == wanted
    x = torch.randn(3, 8, 9)
    assert torch.equal(made(x), function(x))


# ---- images ---------------------------------------------------------------------------------------------------------

IMAGE = intaglio.Image((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))


def pixels(*shape):
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class Stem(nn.Module):
    """Two convolutions of an image, one of which pads, one not, and groups."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Conv2d(3, 6, 3, stride=2, padding=(2, 1), bias=False)
        self.grouped = nn.Conv2d(3, 6, (4, 3), stride=2, groups=3)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(torch.relu(self.wide(x)).mean((2, 3)) + self.grouped(x).mean((2, 3)))


@pytest.mark.parametrize("image", [IMAGE, intaglio.Image(0.5, 0.25)], ids=["by_channel", "one_mean"])
def test_image_convolutions_are_rewritten_with_one_zero_point(image):
    torch.manual_seed(0)
    bytes_ = pixels(2, 3, 11, 9)
    x = image.normalize(bytes_)
    handed = graph(Stem(), x, image=image)
    assert sum(map(is_int8_layer, handed.graph.nodes)) == 3
    taken = graph_with_byte_inputs(handed, byte_inputs(handed))
    with torch.no_grad():
        np.testing.assert_array_equal(taken(bytes_)[0], handed(x)[0])
    assert not any("addcmul" in target for target in targets(taken))


def test_a_per_channel_input_without_a_declaration_takes_no_bytes():
    torch.manual_seed(0)
    x = torch.rand(8, 3, 11, 9) * torch.tensor([1.0, 5.0, 20.0])[:, None, None]
    captured = stages.capture(Stem().eval(), x)
    prepared = stages.prepare(captured, stages.Quantizer(intaglio.Recipe.of({"*": {"equalize": 1.0}})))
    prepared = stages.equalize(prepared, [x])
    reference = stages.convert(prepared, stages.calibrate(prepared, [x]))
    handed = graph_for_inductor(reference)
    assert not byte_inputs(handed)
    assert sum(map(is_int8_layer, handed.graph.nodes)) == 3
    with torch.no_grad():
        assert_close(handed(x)[0], reference(x))


@needs_vnni  # images have 8 bits
@compiles
def test_images_are_bytes_or_floats(tmp_path):
    torch.manual_seed(0)
    bytes_ = pixels(3, 3, 11, 9)
    x = IMAGE.normalize(bytes_)
    reference = converted(Stem(), x, image=IMAGE)
    model = stages.compile(reference, backend="inductor", example_inputs=bytes_)
    assert model.report.counts["int8 call"] == 3
    for given in (bytes_, x):
        assert_close(model(given), reference(x))
    model.save_package(tmp_path / "model.pt2")
    assert_close(torch._inductor.aoti_load_package(str(tmp_path / "model.pt2"))(bytes_), reference(x))


# ---- larger ---------------------------------------------------------------------------------------------------------


@compiles
def test_a_transformer_block_matches_at_any_batch():
    torch.manual_seed(0)
    x = torch.randn(2, 6, 32)
    reference = converted(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0), x)
    model = stages.compile(reference, backend="inductor")
    assert model.report.counts["int8 call"] == 6
    for batch in (1, 5):
        x = torch.randn(batch, 6, 32)
        assert_close(model(x), reference(x))


@pytest.fixture
def bert():
    beside.import_torchvision()  # transformers imports it where it is installed
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes))


@compiles
def test_bert_runs_with_masks_and_as_an_inductor_package(bert, tmp_path):
    ids, mask = torch.randint(50, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    reference = converted(bert, ids, mask)
    model = stages.compile(reference, backend="inductor", example_inputs=(ids, mask))
    own = "encoder.layer.0."
    assert [(one.origin.path.removeprefix(own), one.call) for one in model.report.of("int8 call")] == [
        ("attention.self.query", "qlinear -> uint8"),
        ("attention.self.key", "qlinear -> uint8"),
        ("attention.self.value", "qlinear -> uint8"),
        ("attention.output.dense", "qlinear + sum -> float32"),
        ("intermediate.dense", "qlinear + gelu -> uint8"),
        ("output.dense", "qlinear + sum -> float32"),
        ("pooler.dense", "qlinear -> float32"),
    ]
    assert [one.origin.operator for one in model.report.of("float call")] == [
        "aten.scaled_dot_product_attention.default"
    ]
    fixed = model.report.operators
    assert model.save_package(tmp_path / "model.pt2").operators == fixed
    package = torch._inductor.aoti_load_package(str(tmp_path / "model.pt2"))
    sizes = {model: [(2, 7), (3, 9), (5, 2), (1, 6)], package: [(2, 7), (3, 9), (1, 6), (4, 1), (1, 1)]}
    for run, shape in [(run, shape) for run, shapes in sizes.items() for shape in shapes]:
        given = torch.randint(50, shape), torch.ones(shape, dtype=torch.long)
        given[1][-1, shape[1] // 2 + 1 :] = 0
        got, wanted = run(*given), reference(*given)
        assert type(got) is type(wanted)
        for name in ("last_hidden_state", "pooler_output"):
            assert_close(got[name], wanted[name])
        assert model.report.operators == fixed
    assert len(model._programs) == 3


@needs_vnni  # recurrent layers are int8 with 8 bits only
@compiles
def test_a_recurrent_layer_is_a_callback_that_no_package_takes(tmp_path):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, x):
            return self.head(self.layer(x)[0])

    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    reference = converted(Recurrent(), x, recipe={})
    model = stages.compile(reference, backend="inductor", example_inputs=x)
    assert_close(model(x), reference(x))
    assert model.report.counts["callback"] == 1
    with pytest.raises(UnsupportedError, match="Python"):
        model.save_package(tmp_path / "model.pt2")


@compiles
def test_an_inductor_package_runs_without_intaglio(residual, tmp_path):
    reference, model = residual
    report = model.save_package(tmp_path / "model.pt2")
    assert report.operators == model.report.operators
    x = torch.randn(5, 3, 8, 8)
    torch.save((x, reference(x)), tmp_path / "call.pt")
    script = (
        "import sys, torch; sys.modules['intaglio'] = None; x, wanted = torch.load('call.pt');"
        "got = torch._inductor.aoti_load_package('model.pt2')(x);"
        "assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
