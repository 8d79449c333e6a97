"""What a reference model promises to whoever takes it further."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import intaglio
from intaglio import stages
from intaglio.annotation import Annotation, QuantizedAs, annotate_node
from intaglio.errors import InputError, SelectorError, UnsupportedError
from intaglio.fxgraph.node_info import info, origin
from intaglio.fxgraph.nodes import operator
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.qdq.convert import convert
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from support import nets
from support.lowering import ROUNDED
from support.nets import Body
from support.slow_params import slow_params

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def conv(inputs: int = 3, outputs: int = 4) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def backbone() -> nn.Module:
    return nets.randomize(nn.Sequential(conv(), nn.ReLU(), conv(4), nn.Flatten(), nn.Linear(256, 5)))


def reference(model, *example, quantizer=None):
    example = example or (X,)
    stage = prepare(stages.capture(model, example), quantizer)
    stage(*example)
    return convert(stage)


def quantizing(found) -> list:
    return [node for node in found.module.graph.nodes if operator(node).startswith("quantized_decomposed.")]


def test_weights_are_stored_as_integers_with_a_dequantize():
    """2.6, 2.10.15: folding covers what stands before the quantize of a weight, and nothing behind it."""
    model = nets.randomize(
        Body(lambda m, x: F.linear(x.flatten(1), m.w.t().contiguous() * 2), w=nn.Parameter(torch.ones(192, 5)))
    )
    found = reference(model)
    (weight,) = (node for node in quantizing(found) if node.args[-1] is torch.int8)
    assert weight.args[0].op == "get_attr"
    assert getattr(found.module, weight.args[0].target).dtype == torch.int8


def test_constants_that_are_not_weights_are_unchanged():
    table = torch.randn(4, 8, 8)
    model = Body(lambda m, x: torch.sin(m.a(x)) * m.table, a=conv(), table=nn.Parameter(table))
    found = reference(model.eval())
    kept = [getattr(found.module, n.target) for n in found.module.graph.nodes if n.op == "get_attr"]
    assert any(tensor.shape == table.shape and torch.equal(tensor, table) for tensor in kept)


@pytest.mark.case("frontends C9")
def test_quantize_and_dequantize_nodes_have_the_origin_of_their_value():
    """C9: a dequantize is its reader's, a quantize its producer's; weights keep their names."""
    found = reference(backbone())
    for node in quantizing(found):
        if "dequantize" in operator(node) and next(iter(node.users)).op != "output":
            assert origin(node).path == origin(next(iter(node.users))).path
            assert origin(node).source
        elif node.args[0].op == "call_function":
            assert origin(node) == origin(node.args[0])
    paths = {info(node).path for node in found.module.graph.nodes if node.op == "get_attr"}
    assert {"0.weight", "2.weight", "4.weight"} <= paths


TAG = "quantization_tag"


class Tagging:
    """Convolutions, each with its name for a tag."""

    def annotate(self, module):
        for node in module.graph.nodes:
            if node.target is torch.ops.aten.conv2d.default:
                annotate_node(node, Annotation({node.args[0]: QuantizedAs(), node.args[1]: QuantizedAs("s8")}))
                node.meta[TAG] = node.name


@pytest.mark.case("frontends C9")
@pytest.mark.parametrize("annotates", [True, False])
def test_tags_are_copied_to_quantize_and_dequantize(annotates):
    """C9: a quantizer's or a user's own; from a reader to its dequantize, from a producer to its quantize."""
    captured = stages.capture(nets.randomize(nn.Sequential(conv(), conv(4), nn.Tanh())), X)
    for node in captured.module.graph.nodes if not annotates else ():
        node.meta |= {TAG: node.name} if operator(node) == "aten.conv2d.default" else {}
        node.meta |= {TAG: "kept"} if info(node).path == "1.weight" else {}
    stage = prepare(captured, Tagging() if annotates else stages.Quantizer(ROUNDED))
    stage(X)
    found = convert(stage)
    for node in quantizing(found):
        of = next(iter(node.users)) if "dequantize" in operator(node) else node.args[0]
        assert node.meta.get(TAG) == of.meta.get(TAG)
    tagged = [node.meta[TAG] for node in quantizing(found) if TAG in node.meta]
    assert {"conv2d", "conv2d_1"} == set(tagged)
    assert tagged.count("conv2d_1") == (3 if annotates else 4)
    weight = next(node for node in found.module.graph.nodes if info(node).path == "1.weight")
    assert weight.meta.get(TAG) == (None if annotates else "kept")


@pytest.mark.case("frontends C9")
def test_tags_survive_what_is_folded_and_rewritten():
    model = nets.randomize(nn.Sequential(conv(), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(256, 5)))
    captured = stages.capture(model, X)
    for node in captured.module.graph.nodes:
        node.meta |= {TAG: origin(node).path} if node.op == "call_function" else {}
    stage = prepare(captured)
    stage(X)
    calls = [node for node in convert(stage).module.graph.nodes if node.op == "call_function" and origin(node).path]
    assert {origin(node).path for node in calls} == {"0", "3", "4"}
    assert all(node.meta[TAG] == origin(node).path for node in calls)


@pytest.mark.slow(reason="exports and captures a model once more")
@pytest.mark.case("frontends C9")
@pytest.mark.parametrize(
    "again",
    [
        lambda model: torch.export.export(model, (X,), dynamic_shapes=FREE).run_decompositions({}).module(),
        *slow_params(
            copy.deepcopy,
            lambda model: torch.export.export(model, (X,), dynamic_shapes=FREE).module(),
            reason="names are kept by fewer steps, too",
        ),
    ],
    ids=["decomposed", "copied", "exported"],
)
def test_names_of_sites_are_the_same_for_every_form_of_a_model(again):
    """C9: what identifies a value is the same in every form of one model; so are parameters that go by it."""
    parts = (conv(), nn.BatchNorm2d(4), nn.GELU(), conv(4), nn.Flatten(), nn.Linear(256, 5))
    model = nets.randomize(nn.Sequential(*parts))
    first, second = reference(model), reference(again(model))
    assert list(second.qparams) == list(first.qparams)
    assert torch.equal(second(X), first(X))
    sources = [origin(node).path for node in second.module.graph.nodes]
    assert sources == [origin(node).path for node in first.module.graph.nodes]


FREE = {"input": {0: torch.export.Dim.AUTO}}


@pytest.mark.parametrize(
    "recipe", [*slow_params("default", reason="fewer operators than with scales made per call"), "int8_dynamic"]
)
def test_a_reference_survives_torch_export_save_and_load(recipe):
    found = reference(backbone(), quantizer=Quantizer(Recipe.named(recipe)))
    batch = ({0: torch.export.Dim.AUTO},)
    program = torch.export.export(found.as_module(), (X,), dynamic_shapes={"args": batch})
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again = torch.export.load(file).module()
    assert torch.equal(again(X), found(X))
    assert torch.equal(again(X[:2]), found(X[:2]))


def test_a_reference_can_be_part_of_a_float_model():
    """Called as the float part was: structure of the result, dictionaries, keywords."""
    part = Body(lambda m, x: {"y": (m.a(x), m.a(x) + 1)}, a=conv())
    found = reference(part.eval())
    outer = Body(lambda m, x: m.part(torch.exp(x))["y"][1].mean((2, 3)), part=found.as_module())
    assert torch.equal(outer(X), found(torch.exp(X))["y"][1].mean((2, 3)))


@pytest.mark.case("frontends C11")
def test_a_quantized_submodule_is_unchanged_when_the_model_is_quantized():
    """C11: prepare and convert go over the whole model again; the part keeps its integers and runs with the rest."""
    part = reference(backbone())
    whole = nn.Sequential(part.as_module(), nn.Linear(5, 2)).eval()
    found = reference(whole)
    before = {tuple(tensor.shape): tensor for tensor in part.module.buffers() if tensor.dtype == torch.int8}
    after = {tuple(tensor.shape): tensor for tensor in found.module.buffers() if tensor.dtype == torch.int8}
    assert len(after) == len(before) + 1
    assert all(torch.equal(tensor, after[shape]) for shape, tensor in before.items())
    lowered = stages.requantize(found)
    assert not lowered.islands
    model = stages.compile(lowered)
    assert model.coverage.macs == 1
    assert not model.coverage.islands
    assert (model(X) - found(X)).abs().max() < 0.05


@pytest.mark.slow(reason="trains a part; a quantized part is unchanged by the same rule")
@pytest.mark.case("frontends C11")
def test_a_trained_submodule_is_unchanged_when_the_model_is_calibrated():
    """C11: a submodule is trained and converted, then the model around it goes through post-training quantization."""
    part = nets.randomize(nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())).train()
    trained = stages.prepare(stages.capture(part, X, train=True), qat=True)
    trained(X).square().mean().backward()
    inner = stages.convert(trained)
    whole = nn.Sequential(nn.Tanh(), inner.as_module(), nn.Linear(256, 5)).eval()
    found = reference(whole)
    kinds = (torch.int8, torch.int32)
    before, after = ([b for b in one.module.buffers() if b.dtype in kinds] for one in (inner, found))
    assert len(before) == 2
    assert all(any(b.shape == a.shape and torch.equal(a, b) for a in after) for b in before)
    assert (found(X) - whole(X)).abs().max() < 0.05 * whole(X).abs().max()
    model = stages.compile(found)
    assert model.coverage.macs == 1
    assert (model(X) - found(X)).abs().max() < 0.05


@pytest.mark.case("frontends C11")
@pytest.mark.parametrize("stage", ["part", *slow_params("whole", reason="a whole model is named like a part")])
def test_converted_models_are_not_converted_or_prepared_again(stage):
    """C11: each of them says which call makes what it takes."""
    found = reference(backbone())
    if stage == "whole":
        found = reference(nn.Sequential(found.as_module(), nn.Linear(5, 2)).eval())
    for step in (convert, prepare, lambda given: stages.prepare(given, qat=True)):
        with pytest.raises(InputError, match="got a Reference"):
            step(found)


@pytest.mark.case("frontends C11")
def test_tracing_a_native_part_is_an_error():
    whole = nn.Sequential(intaglio.quantize(backbone(), [X]), nn.Linear(5, 2))
    assert whole(X).shape == (4, 2)
    with pytest.raises(intaglio.errors.CaptureError, match="quantized already"):
        stages.capture(whole, X)


@pytest.mark.case("frontends C11")
def test_an_observer_taken_out_by_hand_does_not_stop_the_conversion():
    """C11, 2.6: the value with several readers keeps the parameters its statistics give."""
    model = nets.randomize(Body(lambda m, x: (lambda y: m.b(y) + m.c(y))(m.a(x)), a=conv(), b=conv(4), c=conv(4)))
    stage = prepare(stages.capture(model, X))
    stage(X)
    wanted = convert(stage)
    for node in list(stage.module.graph.nodes):
        if node.op == "call_module":
            node.replace_all_uses_with(node.args[0])
            stage.module.graph.erase_node(node)
    stage.module.recompile()
    assert convert(stage).text() == wanted.text()


def test_converting_a_converted_model_names_the_accepted_types():
    with pytest.raises(InputError, match="takes a Prepared, got a Reference"):
        convert(reference(backbone()))


@pytest.mark.parametrize(
    ("body", "integers"),
    [
        (lambda m, x: m.a(x), [True]),
        (lambda m, x: F.relu(m.a(x)), [True]),
        *slow_params(
            (lambda m, x: (torch.softmax(m.a(x), 1), m.a(x).argmax(1)), [True, False]),
            reason="two results, by the rules of one",
        ),
        (lambda m, x: {"x": x, "y": m.a(x) + 1}, [False, True]),
    ],
)
def test_results_leave_as_integers_with_scale_and_zero_point(body, integers):
    """Of operators that make float32; integers, and inputs that are passed on, stay as they are."""
    model = nets.randomize(Body(body, a=conv()))
    found = reference(model, quantizer=Quantizer(outputs="int8"))
    native = stages.compile(found)

    def results(stage):
        given = stage(X)
        return list(given.values()) if isinstance(given, dict) else [given] if hasattr(given, "scale") else list(given)

    for one, other, wanted in zip(results(found), results(native), integers, strict=True):
        assert hasattr(one, "scale") == hasattr(other, "scale") == wanted
        if wanted:
            assert one.values.dtype == other.values.dtype == torch.uint8
            assert (one.scale, one.zero_point) == (other.scale, other.zero_point)
            assert (one.values.int() - other.values.int()).abs().max() <= 1
            assert torch.equal(one.dequantize(), (one.values.int() - one.zero_point).float() * one.scale)


def test_integer_results_are_the_quantized_values_of_the_reference():
    found = reference(backbone(), quantizer=Quantizer(outputs="int8"))
    q = found.qparams["4#0/linear.0"]
    (quantized,) = (n for n in quantizing(found) if operator(n.args[0]) == "aten.linear.default")
    given = found(X)
    held = {}

    class Keep(torch.fx.Interpreter):
        def run_node(self, node):
            held[node.name] = super().run_node(node)
            return held[node.name]

    Keep(found.module).run(X)
    assert torch.equal(given.values, held[quantized.name])
    assert (given.scale, given.zero_point) == (q.step, q.zero)


@pytest.mark.slow(reason="compiles and loads a model; results leave as integers above")
def test_a_model_that_gives_integers_survives_its_file(tmp_path):
    model = intaglio.quantize(backbone(), [X], quantizer=stages.Quantizer(outputs="int8"))
    model.save(tmp_path / "model.intaglio")
    for again in (intaglio.load(tmp_path / "model.intaglio"), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(X).values, model(X).values)
        assert again(X)[1:] == model(X)[1:]


def test_unknown_outputs_are_refused():
    with pytest.raises(SelectorError, match="'float' and 'int8'"):
        Quantizer(outputs="u8")
    with pytest.raises(UnsupportedError, match="results must be u8"):
        reference(backbone(), quantizer=Quantizer(Recipe.of({"4": {"activations_dtype": "s16"}}), outputs="int8"))
