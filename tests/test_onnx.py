"""References as ONNX files: ONNX Runtime computes what the reference does, and in int8."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import intaglio
import nets
from compare import tensors
from intaglio.errors import BuildError, InputError, UnsupportedError
from intaglio.quant import Quantizer, Recipe, Reference, calibrate, convert, prepare
from intaglio.quant.patterns import builtin
from nets import Body, randomize

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

WEIGHTS_ALONE = intaglio.Setting(activations="float", weights_dtype="s4", weights="group:16")
APART = tuple(row for row in builtin() if not row.name.startswith("anchor_add"))


def reference_of(model: nn.Module, *x: Any, recipe: Recipe | None = None, **quantizer: Any) -> Reference:
    captured = intaglio.capture(model.eval(), x)
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

    def __init__(self, reference: Reference, folder: Path) -> None:
        path, optimized = folder / "model.onnx", folder / "optimized.onnx"
        self.reference, self.file = reference, intaglio.to_onnx(reference, path)
        onnx.checker.check_model(path, full_check=True)
        self.model = onnx.load(path)
        self.plain, self.fast = session(path), session(path, optimized=optimized)
        self.operators, self.engine = operators(path), operators(optimized)

    @property
    def constants(self) -> dict[str, Any]:
        return {entry.name: entry for entry in self.model.graph.initializer}

    def assert_close(self, *x: Tensor, level: float, given: tuple[Tensor, ...] | None = None) -> None:
        """At most a level apart, and the same class; as written, most values are equal but for the order of sums."""
        for running in (self.plain, self.fast):
            for got, wanted in zip(results(running, *(given or x)), tensors(self.reference(*x)), strict=True):
                wanted = wanted.detach().numpy()
                assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
                far = np.abs(got.astype(np.float64) - wanted)
                assert far.max() <= 1.01 * level
                assert running is self.fast or np.median(far) <= 1e-5 * np.abs(wanted).max()
                assert got.ndim != 2 or np.array_equal(got.argmax(-1), wanted.argmax(-1))


def level_of(reference: Reference) -> float:
    """The widest step of an activation."""
    return max(q.step for q in reference.qparams.values() if q.axis is None and isinstance(q.scale, tuple))


# ---- networks of images


@pytest.mark.parametrize(
    "net", [nets.ConvBnRelu, nets.Residual, nets.MaxPoolNet, nets.Grouped, nets.OptionA, nets.MultiOutput]
)
def test_a_network_of_convolutions_at_any_batch(net, tmp_path):
    model = randomize(net())
    written = Written(reference_of(model, nets.example(model)), tmp_path)
    for batch in (1, 3, 7):
        written.assert_close(nets.example(model, batch), level=level_of(written.reference))
    assert written.engine["QLinearConv"] >= 1


def test_every_convolution_and_layer_runs_in_int8_where_sums_stand_apart(tmp_path):
    model = randomize(nets.Residual())
    written = Written(reference_of(model, nets.example(model), patterns=APART), tmp_path)
    written.assert_close(nets.example(model, 3), level=level_of(written.reference))
    assert written.engine["QLinearConv"] == written.operators["Conv"] == 6
    assert written.engine["QLinearAdd"] == 2
    assert written.engine["QGemm"] == 1
    assert not {"Conv", "FusedConv", "Gemm"} & set(written.engine)


def test_images_are_taken_as_bytes(tmp_path):
    model, image = randomize(nets.ConvBnRelu()), intaglio.Image((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    pixels = torch.randint(256, (3, 3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    x = image.normalize(pixels)
    written = Written(reference_of(model, x, input=image), tmp_path)
    assert written.file.inputs == {"input": "UINT8[n,3,12,12]"}
    assert "bytes" in written.file.notes[0]
    written.assert_close(x, given=(pixels,), level=level_of(written.reference))


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


def test_a_transformer_block_runs_in_int8(tmp_path):
    model, x = block()
    written = Written(reference_of(model, x), tmp_path)
    for batch in (1, 3, 7):
        written.assert_close(torch.randn(batch, 10, 32), level=level_of(written.reference))
    assert written.operators["MatMul"] == written.engine["MatMulIntegerToFloat"] == 8
    assert "MatMul" not in written.engine


def test_rows_quantized_while_the_model_runs(tmp_path):
    model, x = block()
    written = Written(reference_of(model, x, recipe=Recipe.named("int8_dynamic")), tmp_path)
    assert written.engine["MatMulInteger"] == 6
    for batch in (1, 3, 7):
        written.assert_close(torch.randn(batch, 10, 32), level=0.02)


@pytest.mark.parametrize("mode", ["token", "tensor"])
def test_scales_of_rows_are_the_references(mode, tmp_path):
    recipe = Recipe(default=intaglio.Setting(activations=mode))
    torch.manual_seed(0)
    model = nn.Linear(24, 5, bias=mode == "token")
    written = Written(reference_of(model, torch.randn(2, 3, 24), recipe=recipe), tmp_path)
    x = torch.randn(4, 3, 24) * torch.tensor([1e-3, 1, 1e3])[:, None]
    got, wanted = results(written.plain, x)[0], written.reference(x).detach().numpy()
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


# ---- weights of few bits, tables, other levels


def test_weights_of_groups_alone_are_int4_in_blocks(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 8)), torch.randn(3, 5, 64)
    written = Written(reference_of(model, x, recipe=Recipe(default=WEIGHTS_ALONE)), tmp_path)
    levels = [entry for entry in written.constants.values() if entry.data_type == onnx.TensorProto.INT4]
    assert [list(entry.dims) for entry in levels] in ([[64, 16], [16, 8]], [[16, 8], [64, 16]])
    assert written.engine["MatMulNBits"] == 2
    np.testing.assert_allclose(results(written.plain, x)[0], written.reference(x).detach().numpy(), atol=1e-5)


def test_weights_of_groups_beside_quantized_activations_are_int8(tmp_path):
    """ONNX Runtime multiplies int4 by floats only."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 8)), torch.randn(3, 5, 64)
    recipe = Recipe(default=intaglio.Setting(weights_dtype="s4", weights="group:16"))
    written = Written(reference_of(model, x, recipe=recipe), tmp_path)
    assert written.engine["MatMulIntegerToFloat"] == 2
    assert written.constants["0.weight"].data_type == onnx.TensorProto.INT8
    written.assert_close(x, level=level_of(written.reference))


def test_tables_of_levels_stay_levels(tmp_path):
    torch.manual_seed(0)
    model, ids = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 4)), torch.randint(50, (3, 5))
    written = Written(reference_of(model, ids, recipe=Recipe(default=intaglio.Setting(embeddings="int8"))), tmp_path)
    assert any(e.data_type == onnx.TensorProto.UINT8 and list(e.dims) == [50, 16] for e in written.constants.values())
    written.assert_close(torch.randint(50, (7, 9)), level=level_of(written.reference))


@pytest.mark.parametrize(
    "setting",
    [
        intaglio.Setting(bits=7), intaglio.Setting(shortcut=16), intaglio.Setting(activations_dtype="s16"),
        intaglio.Setting(activations_dtype="f8e4m3", weights_dtype="f8e4m3"), intaglio.Setting(weights="tensor"),
        intaglio.Setting(activations="float", weights_dtype="f16"),
    ],
    ids=lambda setting: setting.activations_dtype or setting.weights_dtype or str(setting.bits or setting.weights),
)  # fmt: skip
def test_levels_of_other_kinds(setting, tmp_path):
    model = randomize(nets.Residual())
    written = Written(reference_of(model, nets.example(model), recipe=Recipe(default=setting)), tmp_path)
    x = nets.example(model, 3)
    for running in (written.plain, written.fast):
        wanted = written.reference(x).detach().numpy()
        np.testing.assert_allclose(results(running, x)[0], wanted, atol=0.01 * np.abs(wanted).max())


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("recipe", [Recipe(), Recipe.named("int8_dynamic")], ids=["static", "dynamic"])
def test_recurrent_layers_run_in_float_on_integer_weights(layer, recipe, tmp_path):
    """Hidden states are not rounded there, which the note says."""
    torch.manual_seed(0)
    model, x = layer(11, 21, num_layers=2, bidirectional=True, batch_first=True), torch.randn(7, 5, 11)
    written = Written(reference_of(model, x, recipe=recipe), tmp_path)
    assert any("hidden states are not rounded" in note for note in written.file.notes)
    for got, wanted in zip(results(written.plain, x), tensors(written.reference(x)), strict=True):
        np.testing.assert_allclose(got, wanted.detach().numpy(), atol=0.02)


# ---- the file


def test_inputs_outputs_dimensions_and_nodes_have_the_models_names(tmp_path):
    def body(m, image, scale):
        features = torch.relu(m.conv(image))
        return {"features": features, "pair": (m.fc(features.mean((2, 3))), scale * 2, 7)}

    model = randomize(Body(body, conv=nn.Conv2d(3, 8, 3), fc=nn.Linear(8, 4)))
    x = torch.randn(2, 3, 9, 9), torch.randn(2)
    written = Written(reference_of(model, *x), tmp_path)
    assert list(written.file.inputs.values()) == ["FLOAT[n,3,9,9]", "FLOAT[n]"]
    assert written.file.outputs == {"features": "FLOAT[n,8,7,7]", "pair_0": "FLOAT[n,4]", "pair_1": "FLOAT[n]"}
    assert any("'pair_2' is left out: it is no tensor but 7" in note for note in written.file.notes)
    assert any("features, pair_0, pair_1" in note for note in written.file.notes)
    names = [node.name for node in written.model.graph.node]
    assert len(set(names)) == len(names)
    assert {"conv/Conv", "fc/Gemm"} <= set(names)
    assert written.constants["conv.weight"].data_type == onnx.TensorProto.INT8
    assert [o.version for o in written.model.opset_import if not o.domain] == [21]
    assert {o.domain for o in written.model.opset_import} == {""}


def test_state_is_handed_in_and_out(tmp_path):
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


def test_an_operator_onnx_has_not_is_refused_with_its_place(tmp_path):
    class Odd(nn.Module):
        def forward(self, x):
            return torch.special.bessel_j0(x)

    model = nn.Sequential(nn.Linear(8, 8), Odd(), nn.Linear(8, 8))
    with pytest.raises(UnsupportedError, match="no ONNX operators") as caught:
        intaglio.to_onnx(reference_of(model, torch.randn(3, 8)), tmp_path / "model.onnx")
    assert caught.value.where == "1"
    assert "bessel_j0" in caught.value.operator
    assert not (tmp_path / "model.onnx").exists()


def test_another_stage_is_refused(tmp_path):
    with pytest.raises(InputError, match="takes a Reference"):
        intaglio.to_onnx(nn.Linear(2, 2), tmp_path / "model.onnx")


def test_a_missing_package_is_named_with_the_extra_that_brings_it(tmp_path, monkeypatch):
    reference = reference_of(nn.Linear(8, 8), torch.randn(3, 8))
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(BuildError, match=r"onnxscript[\s\S]*pip install 'intaglio\[onnx\]'"):
        intaglio.to_onnx(reference, tmp_path / "model.onnx")


def test_the_comparison_sees_another_scale(tmp_path):
    model = randomize(nets.ConvBnRelu())
    x = nets.example(model)
    written = Written(reference_of(model, x), tmp_path)
    other = Written(reference_of(model, x * 1.5), tmp_path)
    other.reference = written.reference
    with pytest.raises(AssertionError):
        other.assert_close(x, level=level_of(written.reference))
