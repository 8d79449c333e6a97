"""Quantizers of torchao: at the same places as the x86 preset, and as good as in its own flow."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import intaglio
from intaglio import stages
from intaglio.annotation import X86Quantizer
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.qdq.convert import convert
from support import nets
from support.annotators import conv, counts
from support.nets import Body
from support.x86_models import DYNAMIC, HALF, IMAGE, MODELS, TRAINING, linear, reference

PT2E = "torchao.quantization.pt2e"


@pytest.fixture
def x86():
    """Not imported with this file: it changes settings of Inductor, which other tests look at."""
    return pytest.importorskip(f"{PT2E}.quantizer.x86_inductor_quantizer", reason="needs torchao with this module")


@pytest.mark.parametrize("name", MODELS)
def test_quantize_nodes_are_where_torchao_inserts_them(x86, name):
    config = x86.get_default_x86_inductor_quantization_config()
    quantizer = x86.X86InductorQuantizer().set_global(config)
    if "products" in name:
        quantizer.set_function_type_qconfig(torch.matmul, config)
    assert counts(reference(MODELS[name][0], quantizer)) == MODELS[name][1]


def test_an_executorch_style_quantizer_agrees_with_torchaos_own_flow():
    flow = pytest.importorskip(f"{PT2E}.quantize_pt2e", reason="needs torchao with this module")
    xnnpack = pytest.importorskip("torchao.testing.pt2e._xnnpack_quantizer", reason="needs torchao with this module")
    model = nets.randomize(
        Body(
            lambda m, x: m.l(F.relu(m.b(F.relu(m.a(x))) + m.c(x)).mean((2, 3))),
            a=conv(),
            b=conv(4),
            c=conv(),
            l=linear(4, 5),
        )
    )

    def quantizer():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return xnnpack.XNNPACKQuantizer().set_global(xnnpack.get_symmetric_quantization_config(is_per_channel=True))

    theirs = flow.prepare_pt2e(torch.export.export(model, (IMAGE,)).module(), quantizer())
    theirs(IMAGE)
    found = reference(model, quantizer())
    real, other = model(IMAGE), flow.convert_pt2e(theirs)(IMAGE)
    assert (found(IMAGE) - real).norm() < 1.5 * (other - real).norm() + 0.01 * real.norm()
    assert not stages.requantize(found).islands


@pytest.mark.parametrize("name", ["convolution and norm", "function and pool", "no norm"])
def test_torchaos_own_quantizer_trains(x86, name):
    """It looks for norms, to round what they give. Here they are folded when it looks: a float reader has floats."""
    body, _ = TRAINING[name]
    model = nets.randomize(Body(body, a=conv(), b=nn.BatchNorm2d(4))).train()
    theirs = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config(is_qat=True))
    prepared = stages.prepare(stages.capture(model, IMAGE, train=True), theirs, qat=True)
    prepared(IMAGE).square().mean().backward()
    assert counts(stages.convert(prepared)) == ("3:3:1" if "pool" in name else "1:1:1")


def test_torchaos_own_quantizer_stores_float16_weights(x86):
    theirs = x86.X86InductorQuantizer().set_global(x86.get_x86_inductor_linear_dynamic_fp16_config())
    model, ours = MODELS["linear and function"][0], X86Quantizer().set_global(HALF)
    assert reference(model, theirs).text() == reference(model, ours).text()


@pytest.mark.parametrize("dynamic", ["attention", "a sum of two linear", "linear in series"])
def test_dynamic_quantization_matches_torchao(x86, dynamic):
    theirs = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=True))
    ours = X86Quantizer().set_global(DYNAMIC)
    assert reference(MODELS[dynamic][0], theirs).text() == reference(MODELS[dynamic][0], ours).text()


@pytest.mark.case("frontends C7")
def test_composed_quantizers_of_torchao_are_supported(x86):
    """C7: embedding and static convolution by quantizers of theirs, composed by theirs."""
    composed = pytest.importorskip(f"{PT2E}.quantizer", reason="needs torchao with this module")
    embedding = pytest.importorskip(f"{PT2E}.quantizer.embedding_quantizer", reason="needs torchao with this module")
    convolutions = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    model = Body(lambda m, ids: m.c(m.t(ids).permute(0, 3, 1, 2)), t=nn.Embedding(10, 3), c=conv())
    ids = torch.randint(0, 10, (2, 8, 8))
    run_on_all_ranks = composed.ComposableQuantizer([embedding.EmbeddingQuantizer(), convolutions])
    stage = prepare(stages.capture(nets.randomize(model), ids), run_on_all_ranks)
    assert [table.reason for table in stage.annotations.tables] == [None]
    assert [region.name for region in stage.annotations.regions] == ["conv2d"]
    stage(ids)
    assert (convert(stage)(ids) - model(ids)).norm() < 0.02 * model(ids).norm()


@pytest.mark.case("backend 35")
@pytest.mark.parametrize("folded", [True, False])
def test_models_converted_by_torchao_are_taken_unchanged(x86, folded):
    """Case 35: a residual network, weights stored as integers or behind quantize and dequantize."""
    flow = pytest.importorskip(f"{PT2E}.quantize_pt2e", reason="needs torchao with this module")

    def body(m, x):
        return m.l(F.relu(m.b(y := F.max_pool2d(F.relu(m.a(x)), 2)) + y).mean((2, 3)))

    model = nets.randomize(Body(body, a=conv(), b=conv(4), l=linear(4, 5)))
    program = torch.export.export(model, (IMAGE,), dynamic_shapes={"args": ({0: torch.export.Dim.AUTO},)})
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = flow.prepare_pt2e(program.module(), quantizer)
    prepared(IMAGE)
    with pytest.raises(intaglio.errors.CaptureError, match="another tool has prepared the model"):
        intaglio.quantize(prepared, [IMAGE], progress=False)
    given = flow.convert_pt2e(prepared, fold_quantize=folded)
    found = stages.from_qdq(given, IMAGE)
    lowered = stages.requantize(found)
    assert lowered.macs[0] == lowered.macs[1] > 0
    assert torch.equal(stages.compile(lowered)(IMAGE), lowered(IMAGE))
    assert (found(IMAGE) - given(IMAGE)).abs().max() < 0.01 * given(IMAGE).abs().max()
    with pytest.raises(intaglio.errors.UnsupportedError, match="quantized already"):
        intaglio.quantize(given, [IMAGE], progress=False)
