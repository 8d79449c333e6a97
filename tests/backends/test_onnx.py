"""References as ONNX files: ONNX Runtime computes what the reference does, and in int8."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

import intaglio
from intaglio import stages
from intaglio.errors import BuildError, InputError, UnsupportedError
from intaglio.quant.calibrate.calibration_loop import calibrate
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.qdq.convert import Reference, convert
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from intaglio.quant.recipes.user_patterns import builtin
from support import nets
from support.lowering import ROUNDED, tensors
from support.nets import Body, randomize
from support.processor import HAS_VNNI, needs_vnni
from support.slow_params import slow_params

onnx = pytest.importorskip("onnx", reason="needs onnx")
ort = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
pytest.importorskip("onnxscript", reason="needs onnxscript")
pytestmark = pytest.mark.usefixtures("operators_read_once")

WEIGHTS_ALONE = intaglio.Setting(activations="float", weights_dtype="s4", weights="group:16")
DYNAMIC = Recipe.named("int8_dynamic")
APART = tuple(row for row in builtin() if not row.name.startswith("anchor_add"))


def reference_of(model: nn.Module, *x: Any, recipe: Recipe | None = None, **quantizer: Any) -> Reference:
    captured = stages.capture(model.eval(), x)
    prepared = prepare(captured, Quantizer(recipe or Recipe(), **quantizer))
    return convert(prepared, calibrate(prepared, lambda run: run(*x)))


def session(path: Path, *, optimized: Path | None = None) -> Any:
    """ONNX Runtime on a file, as it is written or optimized, the result of which goes to ``optimized``."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    if optimized is None:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    else:
        options.optimized_model_filepath = str(optimized)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def results(running: Any, *x: Tensor) -> list[np.ndarray]:
    return running.run(None, {entry.name: t.numpy() for entry, t in zip(running.get_inputs(), x, strict=True)})


class Written:
    """A file and both ways of running it."""

    def __init__(self, reference: Reference, folder: Path, sums: str = "float") -> None:
        path, optimized = folder / "model.onnx", folder / "optimized.onnx"
        self.reference, self.file = reference, stages.compile(reference, backend="onnx", path=path, sums=sums)
        onnx.checker.check_model(path, full_check=True)
        self.model = onnx.load(path)
        self.plain, self.fast = session(path), session(path, optimized=optimized)
        self.operators, self.engine = operators(path), operators(optimized)

    @property
    def constants(self) -> dict[str, Any]:
        return {entry.name: entry for entry in self.model.graph.initializer}

    def assert_close(self, *x: Tensor, max_steps: float = 1, given: tuple[Tensor, ...] | None = None) -> None:
        """Assert that every result is at most ``max_steps`` steps of its last site away, and of the same class.

        Without optimizations, most values are equal except for the order of sums in float32.
        """
        wanted = [t.detach().numpy() for t in tensors(self.reference(*x))]
        steps = [last_step(node) for node in tensors_of_output(self.reference)]
        for running in (self.plain, self.fast) if HAS_VNNI else (self.plain,):
            for got, y, step in zip(results(running, *(given or x)), wanted, steps, strict=True):
                assert (got.shape, got.dtype) == (y.shape, y.dtype)
                far, order = np.abs(got.astype(np.float64) - y), 1e-5 * np.abs(y).max()
                assert far.max() <= max_steps * step + order
                assert running is self.fast or max_steps > 1 or np.median(far) <= order
                assert got.ndim != 2 or np.array_equal(got.argmax(-1), y.argmax(-1))


def tensors_of_output(reference: Reference) -> list[fx.Node]:
    (output,) = reference.module.graph.find_nodes(op="output")
    return [value for value in output.args[0] if isinstance(value, fx.Node)]


def last_step(node: fx.Node) -> float:
    """The widest step of the quantized values that a result is, or that its last layer reads; of rows, whose scales are
    made as the model runs, 2.5 / 127: inputs of layers are behind layer norms here. 0 for what no quantized values lead
    to."""
    if node.op != "call_function" or ".dequantize_per_channel" in str(node.target):
        return 0.0
    if ".dequantize_rows" in str(node.target):
        return 2.5 / 127
    if ".dequantize_per_tensor" in str(node.target):
        return float(node.args[1])
    return max((last_step(value) for value in node.all_input_nodes), default=0.0)


# ---- networks of images


@pytest.mark.parametrize(
    "net",
    [
        nets.Grouped,
        *slow_params(
            *(nets.MultiOutput, nets.Residual, nets.ConvBnRelu, nets.MaxPoolNet, nets.OptionA),
            reason="other operators are in tests of their own, and a residual network too",
        ),
    ],
)
def test_a_convolutional_network_matches_at_any_batch(net, tmp_path):
    model = randomize(net())
    written = Written(reference_of(model, nets.example(model), recipe=ROUNDED), tmp_path)
    for batch in (1, 3, 7):
        written.assert_close(nets.example(model, batch))
    assert written.engine["QLinearConv"] >= 1


@pytest.mark.slow(reason="a residual network; a network of grouped convolutions runs above")
@pytest.mark.case("problem 32")
@pytest.mark.parametrize(
    "how",
    [{}, *slow_params({"patterns": APART}, reason="sums that the recipe keeps apart")],
    ids=["default", "sums_apart"],
)
def test_every_convolution_and_layer_runs_in_int8(how, tmp_path):
    """Check that all convolutions and the linear layer run in int8.

    By default the file rounds the operands of two sums, which the reference does not round; each can add a step.
    """
    model = randomize(nets.Residual())
    written = Written(reference_of(model, nets.example(model), **how), tmp_path, sums="uint8")
    assert any("results of 2 convolutions are rounded to u8" in note for note in written.file.notes) is not bool(how)
    written.assert_close(nets.example(model, 3), max_steps=1 if how else 3)
    assert written.engine["QLinearConv"] == written.operators["Conv"] == 6
    assert written.engine["QLinearAdd"] == 2
    assert written.engine["QGemm"] == 1
    assert not {"Conv", "FusedConv", "Gemm"} & set(written.engine)


@pytest.mark.slow(reason="runs sums of saturated values; what sums may read is tested below")
@pytest.mark.parametrize(
    "relu", [nn.ReLU(), *slow_params(nn.Identity(), reason="a sum with a function is one too")], ids=["relu", "sum"]
)
def test_quantizing_before_a_sum_clips_no_value(relu, tmp_path):
    """Values far outside of what was calibrated saturate in the sum, as without it."""
    body = Body(
        lambda m, x: m.pool(m.last(m.conv(x) + m.first(x))),
        conv=nn.Conv2d(4, 4, 3, padding=1),
        last=relu,
        first=nn.MaxPool2d(3, 1, 1),
        pool=nn.MaxPool2d(2),
    )
    x = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    reference = reference_of(randomize(body), x)
    exact, rounded = (tmp_path / f"{sums}.onnx" for sums in ("float", "uint8"))
    stages.compile(reference, backend="onnx", path=exact, sums="float")
    stages.compile(reference, backend="onnx", path=rounded)
    assert operators(rounded)["QuantizeLinear"] == operators(exact)["QuantizeLinear"] + 1
    other, own = (reference.qparams[name].step for name in reference.qparams if "max_pool" in name)
    for gain in (0.1, 1, 4):
        y, z = (results(session(path), gain * x)[0] for path in (exact, rounded))
        assert np.abs(y - z).max() <= 1.001 * (own + (own + other) / 2)


@pytest.mark.slow(reason="exports two sums that stay as they are")
def test_a_sum_of_operands_without_ranges_stays_float(tmp_path):
    """A number; the same value twice."""
    body = Body(
        lambda m, x: torch.relu(m.conv(x) + 2.0) + torch.relu(m.twice(x) * 1.0),
        conv=nn.Conv2d(3, 4, 3),
        twice=Body(lambda m, x: (lambda y: y + y)(m.conv(x)), conv=nn.Conv2d(3, 4, 3)),
    )
    reference = reference_of(randomize(body), torch.randn(2, 3, 8, 8))
    assert not stages.compile(reference, backend="onnx", path=tmp_path / "model.onnx").notes


def test_the_sums_option_is_uint8_or_float(tmp_path):
    with pytest.raises(InputError, match="OnnxOptions: sums takes 'uint8' or 'float', got 'int8'"):
        stages.compile(
            reference_of(nn.Linear(8, 8), torch.randn(3, 8)), backend="onnx", path=tmp_path / "model.onnx", sums="int8"
        )


@pytest.mark.slow(reason="another input of the network that is exported above")
def test_images_are_taken_as_bytes(tmp_path):
    model, image = randomize(nets.ConvBnRelu()), intaglio.Image((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    pixels = torch.randint(256, (3, 3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    x = image.normalize(pixels)
    written = Written(reference_of(model, x, recipe=ROUNDED, input=image), tmp_path)
    assert written.file.inputs == {"input": "UINT8[n,3,12,12]"}
    assert "bytes" in written.file.notes[0]
    assert "Conv" in written.operators
    assert not {"Conv", "FusedConv"} & set(written.engine)
    for batch in (1, 3):
        written.assert_close(x[:batch], given=(pixels[:batch],))


@pytest.mark.slow(reason="calibrates images to find that nothing is declared")
def test_a_per_channel_input_without_a_declaration_takes_no_bytes(tmp_path):
    model = randomize(nets.ConvBnRelu())
    x = torch.rand(3, 3, 12, 12) * torch.tensor([1.0, 5.0, 20.0])[:, None, None]
    captured = stages.capture(model.eval(), x)
    prepared = stages.equalize(
        prepare(captured, Quantizer(Recipe(default=intaglio.Setting(equalize=1.0, results="int8")))), [x]
    )
    written = Written(convert(prepared, calibrate(prepared, [x])), tmp_path)
    assert written.file.inputs == {"input": "FLOAT[n,3,12,12]"}
    assert not {"Conv", "FusedConv"} & set(written.engine)
    written.assert_close(x)


def test_an_image_that_something_reads_in_float_stays_float(tmp_path):
    model = randomize(Body(lambda m, x: (m.conv(x), torch.erf(x)), conv=nn.Conv2d(3, 4, 3)))
    x = torch.randn(2, 3, 8, 8)
    written = Written(reference_of(model, x, input=intaglio.Image(0.5, 0.25)), tmp_path)
    assert list(written.file.inputs.values()) == ["FLOAT[n,3,8,8]"]
    for got, wanted in zip(results(written.plain, x), written.reference(x), strict=True):
        np.testing.assert_allclose(got, wanted.detach().numpy(), atol=1e-5)


# ---- transformers


def block(**settings: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu", **settings)
    return model.eval(), torch.randn(3, 10, 32)


@pytest.mark.slow(
    reason="quantizes and runs a transformer; scales per token and a convolutional network run in other tests"
)
def test_a_transformer_block_runs_in_int8(tmp_path):
    model, x = block()
    written = Written(reference_of(model, x), tmp_path)
    for batch in (1, 3, 7):
        written.assert_close(torch.randn(batch, 10, 32))
    assert written.operators["MatMul"] == written.engine["MatMulIntegerToFloat"] == 8
    assert "MatMul" not in written.engine


@needs_vnni
def test_per_token_quantization_runs_in_int8(tmp_path):
    model, x = block()
    written = Written(reference_of(model, x, recipe=Recipe.named("int8_dynamic")), tmp_path)
    assert written.engine["MatMulInteger"] == 6
    for batch in (1, 3, 7):
        written.assert_close(torch.randn(batch, 10, 32))


@needs_vnni
@pytest.mark.parametrize("mode", ["token", "tensor"])
def test_per_token_scales_match_the_reference(mode, tmp_path):
    recipe = Recipe(default=intaglio.Setting(activations=mode))
    torch.manual_seed(0)
    model = nn.Linear(24, 5, bias=mode == "token")
    written = Written(reference_of(model, torch.randn(2, 3, 24), recipe=recipe), tmp_path)
    x = torch.randn(4, 3, 24) * torch.tensor([1e-3, 1, 1e3])[:, None]
    got, wanted = results(written.plain, x)[0], written.reference(x).detach().numpy()
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


# ---- weights of few bits, tables, other quantized values


def test_weights_of_groups_alone_are_int4_in_blocks(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 8)), torch.randn(3, 5, 64)
    written = Written(reference_of(model, x, recipe=Recipe(default=WEIGHTS_ALONE)), tmp_path)
    int4_constants = [entry for entry in written.constants.values() if entry.data_type == onnx.TensorProto.INT4]
    assert [list(entry.dims) for entry in int4_constants] in ([[64, 16], [16, 8]], [[16, 8], [64, 16]])
    assert written.engine["MatMulNBits"] == 2
    np.testing.assert_allclose(results(written.plain, x)[0], written.reference(x).detach().numpy(), atol=1e-5)


@pytest.mark.parametrize(
    "offsets",
    [
        None,
        *slow_params(
            torch.full((16, 2), -0.01),
            reason="offsets are seen when the integers are written, as in the other weights of groups",
        ),
    ],
)
def test_imported_weights_of_groups_are_int4_in_blocks_if_they_have_no_offsets(offsets, tmp_path):
    torch.manual_seed(0)
    integers, scales = torch.randint(-8, 8, (16, 64)).to(torch.int8), torch.rand(16, 2) * 0.1
    weight = stages.QuantizedWeight.of(integers, scales, offsets)
    model, x = stages.with_weights(nn.Sequential(nn.Linear(64, 16)), {"0": weight}), torch.randn(3, 5, 64)
    written = Written(reference_of(model, x, recipe=Recipe(default=WEIGHTS_ALONE)), tmp_path)
    int4 = [entry for entry in written.constants.values() if entry.data_type == onnx.TensorProto.INT4]
    assert len(int4) == (offsets is None)
    np.testing.assert_allclose(results(written.plain, x)[0], written.reference(x).detach().numpy(), atol=1e-5)


@pytest.mark.slow(reason="exports one more model; groups are written as int4 above")
def test_weights_of_groups_beside_quantized_activations_are_int8(tmp_path):
    """ONNX Runtime multiplies int4 by floats only."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 8)), torch.randn(3, 5, 64)
    recipe = Recipe(default=intaglio.Setting(weights_dtype="s4", weights="group:16"))
    written = Written(reference_of(model, x, recipe=recipe), tmp_path)
    assert written.engine["MatMulIntegerToFloat"] == 2
    assert written.constants["0.weight"].data_type == onnx.TensorProto.INT8
    written.assert_close(x)


@pytest.mark.slow(reason="exports a table; weights of layers are constants in the same way")
def test_quantized_embedding_tables_stay_quantized(tmp_path):
    torch.manual_seed(0)
    model, ids = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 4)), torch.randint(50, (3, 5))
    written = Written(reference_of(model, ids, recipe=Recipe(default=intaglio.Setting(embeddings="int8"))), tmp_path)
    assert any(e.data_type == onnx.TensorProto.UINT8 and list(e.dims) == [50, 16] for e in written.constants.values())
    written.assert_close(torch.randint(50, (7, 9)))


OTHER_SETTINGS = (
    intaglio.Setting(activations_dtype="f8e4m3", weights_dtype="f8e4m3"),
    intaglio.Setting(shortcut=16),
    intaglio.Setting(bits=7),
    intaglio.Setting(activations_dtype="s16"),
    intaglio.Setting(weights="tensor"),
    intaglio.Setting(activations="float", weights_dtype="f16"),
)


@pytest.mark.slow(reason="files of float8 for two runtimes; other types are written in tests of weights above")
@pytest.mark.parametrize(
    ("setting", "net"),
    [
        (intaglio.Setting(activations_dtype="f8e4m3", weights_dtype="f8e4m3"), nets.ConvBnRelu),
        *slow_params(
            *((setting, nets.Residual) for setting in OTHER_SETTINGS),
            reason="other numbers of levels in the same nodes, and a larger network",
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_exported_models_of_other_data_types_match_the_reference(setting, net, tmp_path):
    model = randomize(net())
    written = Written(reference_of(model, nets.example(model), recipe=Recipe(default=setting)), tmp_path)
    x = nets.example(model, 3)
    for running in (written.plain, written.fast):
        wanted = written.reference(x).detach().numpy()
        np.testing.assert_allclose(results(running, x)[0], wanted, atol=0.01 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("layer", "recipe"),
    [
        *slow_params(
            *((nn.GRU, DYNAMIC), (nn.LSTM, Recipe()), (nn.GRU, Recipe()), (nn.LSTM, DYNAMIC), (nn.RNN, Recipe())),
            reason="other layers and recipes, whose hidden states are not rounded either",
        ),
    ],
    ids=["dynamic-GRU", "static-LSTM", "static-GRU", "dynamic-LSTM", "static-RNN"],
)
def test_recurrent_layers_run_in_float_on_integer_weights(layer, recipe, tmp_path):
    """Hidden states are not rounded there, which the note says."""
    torch.manual_seed(0)
    model, x = layer(11, 21, num_layers=2, bidirectional=True, batch_first=True), torch.randn(7, 5, 11)
    written = Written(reference_of(model, x, recipe=recipe), tmp_path)
    assert any("hidden states are not rounded" in note for note in written.file.notes)
    for got, wanted in zip(results(written.plain, x), tensors(written.reference(x)), strict=True):
        np.testing.assert_allclose(got, wanted.detach().numpy(), atol=0.02)


# ---- the file


@pytest.mark.slow(reason="exports a model with nested results; state has names below")
def test_inputs_outputs_dimensions_and_nodes_have_the_models_names(tmp_path):
    def body(m, image, scale):
        features = torch.relu(m.conv(image))
        return {"features": features, "pair": (m.fc(features.mean((2, 3))), scale * 2, 7)}

    model = randomize(Body(body, conv=nn.Conv2d(3, 8, 3), fc=nn.Linear(8, 4)))
    x = torch.randn(2, 3, 9, 9), torch.randn(2)
    written = Written(reference_of(model, *x), tmp_path)
    assert list(written.file.inputs.values()) == ["FLOAT[n,3,9,9]", "FLOAT[n1]"]
    assert written.file.outputs == {"features": "FLOAT[n,8,7,7]", "pair_0": "FLOAT[n,4]", "pair_1": "FLOAT[n1]"}
    assert any("'pair_2' is left out: it is not a tensor but 7" in note for note in written.file.notes)
    assert any("features, pair_0, pair_1" in note for note in written.file.notes)
    names = [node.name for node in written.model.graph.node]
    assert len(set(names)) == len(names)
    assert {"conv/Conv", "fc/Gemm"} <= set(names)
    assert written.constants["conv.weight"].data_type == onnx.TensorProto.INT8
    assert [o.version for o in written.model.opset_import if not o.domain] == [21]
    assert {o.domain for o in written.model.opset_import} == {""}


def test_the_onnx_file_has_state_as_inputs_and_outputs(tmp_path):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("total", torch.zeros(8))

        def forward(self, x):
            self.total.add_(x.sum(0))
            return self.layer(x) + self.total

    torch.manual_seed(0)
    x = torch.randn(3, 8)
    written = Written(reference_of(Counting(), x), tmp_path)
    assert (list(written.file.inputs), list(written.file.outputs)) == (["x", "total"], ["output", "total_after"])
    total = torch.zeros(8)
    for _ in range(2):
        y, after = results(written.plain, x, total)
        np.testing.assert_allclose(y, written.reference(x).detach().numpy(), atol=1e-5)
        total = torch.from_numpy(after)


def test_an_operator_without_an_onnx_equivalent_is_refused_with_its_module(tmp_path):
    class Odd(nn.Module):
        def forward(self, x):
            return torch.special.bessel_j0(x)

    model = nn.Sequential(nn.Linear(8, 8), Odd(), nn.Linear(8, 8))
    with pytest.raises(UnsupportedError, match="no ONNX operators") as caught:
        stages.compile(reference_of(model, torch.randn(3, 8)), backend="onnx", path=tmp_path / "model.onnx")
    assert caught.value.where == "1"
    assert "bessel_j0" in caught.value.operator
    assert not (tmp_path / "model.onnx").exists()


def test_another_stage_is_refused(tmp_path):
    with pytest.raises(InputError, match="takes a Reference"):
        stages.compile(nn.Linear(2, 2), backend="onnx", path=tmp_path / "model.onnx")


def test_a_missing_package_is_named_with_the_extra_that_brings_it(tmp_path, monkeypatch):
    reference = reference_of(nn.Linear(8, 8), torch.randn(3, 8))
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(BuildError, match=r"onnxscript[\s\S]*pip install 'intaglio\[onnx\]'"):
        stages.compile(reference, backend="onnx", path=tmp_path / "model.onnx")


@pytest.mark.parametrize(
    "name", ["0.weight:scale", *slow_params("3.weight:scale", reason="the scale of another layer is spoiled always")]
)
def test_the_comparison_detects_a_wrong_scale(name, tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)), torch.randn(3, 3, 8, 8)
    written = Written(reference_of(model, x), tmp_path)
    written.assert_close(x)
    entry = written.constants[name]
    entry.CopyFrom(onnx.numpy_helper.from_array(1.1 * onnx.numpy_helper.to_array(entry), name))
    onnx.save(written.model, tmp_path / "spoiled.onnx")
    written.fast = written.plain = session(tmp_path / "spoiled.onnx")
    with pytest.raises(AssertionError):
        written.assert_close(x)
