"""Annotations on nodes and edges: what is written, what it comes to, what cannot be."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from intaglio import stages
from intaglio.annotation import (
    Annotation,
    Composed,
    CustomObserver,
    Dynamic,
    Fixed,
    Observed,
    QuantizedAs,
    SameAs,
    annotate_node,
    annotation_of,
)
from intaglio.errors import CalibrationError, InputError, SelectorError, UnsupportedError
from intaglio.fxgraph.node_info import info
from intaglio.fxgraph.nodes import operator
from intaglio.quant.calibrate.calibration_loop import calibrate
from intaglio.quant.calibrate.prepare import Prepared, prepare
from intaglio.quant.calibrate.ranges import Ranges
from intaglio.quant.qdq.convert import convert
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from support import nets
from support.annotators import Extremum, Shifted, X, conv, counts, prepared, reference
from support.lowering import assert_equal_quantized
from support.nets import Body
from support.slow_params import slow_params

U8, WEIGHT = QuantizedAs(), QuantizedAs("s8")
CONV = "aten.conv2d.default"


class By:
    """An annotator from a table: operator -> function of a node that gives its annotation."""

    def __init__(self, **rules):
        self.rules = rules

    def annotate(self, module):
        for node in module.graph.nodes:
            for name, rule in self.rules.items():
                if operator(node).split(".")[1:2] == [name]:
                    annotate_node(node, rule(node))


def layer(node, x=U8, output=None, sharing=True) -> Annotation:
    return Annotation({node.args[0]: x, node.args[1]: WEIGHT}, output, sharing)


def reads(quantized_as=U8, output=None):
    return lambda node: Annotation(dict.fromkeys(node.all_input_nodes, quantized_as), output)


def test_only_what_is_annotated_is_quantized():
    model = Body(lambda m, x: torch.sigmoid(m.b(F.relu(m.a(x)))), a=conv(), b=conv(4))
    stage = prepared(model, By(conv2d=layer))
    assert [region.name for region in stage.annotations.regions] == ["conv2d", "conv2d"]
    assert {skip.origin.operator: skip.reason for skip in stage.annotations.skipped} == {
        "aten.relu.default": "the annotator did not annotate it",
        "aten.sigmoid.default": "the annotator did not annotate it",
    }


def test_a_chain_quantized_inside_is_two_regions():
    def relu(node):
        return Annotation(output=U8)

    model = Body(lambda m, x: F.relu(m.a(x)), a=conv())
    assert [r.name for r in prepared(model, By(conv2d=layer, relu=relu)).annotations.regions] == ["anchor_clamp"]

    split = By(conv2d=lambda n: layer(n, output=U8), relu=lambda n: Annotation({n.args[0]: U8}, SameAs(n.args[0])))
    assert [r.name for r in prepared(model, split).annotations.regions] == ["conv2d", "clamp"]


@pytest.mark.case("frontends B15")
def test_three_annotated_readers_have_a_dequantize_each_and_the_float_one_its_own():
    """B15: no quantize beside the producer's."""
    model = Body(
        lambda m, x: (lambda y: m.b(y) + m.c(y) + m.d(y) + torch.exp(y))(m.a(x)),
        a=conv(),
        b=conv(4),
        c=conv(4),
        d=conv(4),
    )
    found = reference(model, By(conv2d=layer))
    quantizes = [n for n in found.module.graph.nodes if operator(n).endswith("quantize_per_tensor.default")]
    (y,) = [n for n in quantizes if "dequantize" not in operator(n) and operator(n.args[0]) == CONV]
    assert sorted(operator(user) for node in y.users for user in node.users) == [CONV] * 3 + ["aten.exp.default"]
    assert len(y.users) == 4


def test_quantized_values_around_a_float_operator_are_rounded():
    """An operator without a kernel for it reads and gives dequantized quantized values."""
    model = Body(lambda m, x: torch.softmax(m.a(x), 1), a=conv())
    found = reference(model, By(softmax=reads(U8, QuantizedAs(spec=Fixed(1 / 256, 0)))))
    assert counts(found) == "2:2:0"
    y = found(X)
    assert torch.equal(y, torch.round(y * 256) / 256)
    lowered = stages.requantize(found)
    assert torch.allclose(stages.compile(lowered)(X), y)


@pytest.mark.case("frontends B18")
def test_sites_with_fixed_parameters_have_no_observer():
    """B18: sigmoid gives 1/256, tanh 2/256 around 128."""
    model = Body(lambda m, x: m.b(torch.tanh(m.a(torch.sigmoid(x)))), a=conv(), b=conv(4))
    rules = By(
        sigmoid=reads(U8, QuantizedAs(spec=Fixed(1 / 256, 0))),
        tanh=reads(U8, QuantizedAs(spec=Fixed(2 / 256, 128))),
        conv2d=lambda n: layer(
            n,
            QuantizedAs(spec=Fixed(1 / 256, 0) if "sigmoid" in n.args[0].name else Fixed(2 / 256, 128)),
            U8 if n.name == "conv2d" else None,
        ),
    )
    stage = prepared(model, rules)
    assert set(stage.observers) == {"#0/input.args_0", "a#0/conv2d.0"}
    stage(X)
    qparams = convert(stage).qparams
    assert (qparams["#0/sigmoid.0"].step, qparams["#0/sigmoid.0"].zero) == (1 / 256, 0)
    assert (qparams["#0/tanh.0"].step, qparams["#0/tanh.0"].zero) == (2 / 256, 128)


@pytest.mark.case("frontends B18")
@pytest.mark.parametrize("zero_point", [300, -60])
def test_fixed_zero_points_are_quantized_values(zero_point):
    """A convolution pads with the zero point, which must fit into a byte."""
    fixed = QuantizedAs(spec=Fixed(1 / 256, zero_point))
    annotator = By(conv2d=lambda n: Annotation({n.args[0]: fixed, n.args[1]: QuantizedAs("s8")}))
    model = Body(lambda m, x: m.a(torch.sigmoid(x)), a=nn.Conv2d(3, 4, 3, padding=1))
    with pytest.raises(UnsupportedError, match=f"zero point {zero_point} of Fixed is outside of its quantized values"):
        reference(model, annotator)


@pytest.mark.parametrize("scale", [-1 / 32, 0.0, float("nan"), float("inf")])
def test_fixed_scales_are_positive_finite_numbers(scale):
    with pytest.raises(UnsupportedError, match="of Fixed is not a positive, finite number"):
        Fixed(scale, 128)


def test_equal_fixed_parameters_on_both_sides_of_a_value_are_one():
    """B18: a value that is fixed where it is made and where it is read is rounded once, however many read it."""
    fixed = QuantizedAs(spec=Fixed(1 / 256, 0))
    model = Body(lambda m, x: (lambda y: y + torch.sigmoid(m.a(x)) + y)(torch.sigmoid(x[:, :1])), a=conv(3, 1))
    rules = By(
        sigmoid=lambda n: Annotation(output=fixed),
        add=lambda n: Annotation({value: fixed for value in n.all_input_nodes if "sigmoid" in value.name}),
    )
    stage = prepared(model, rules)
    assert not stage.observers
    assert counts(reference(model, rules)) == "2:3:0"


@pytest.mark.case("frontends B16")
@pytest.mark.parametrize("owner", [0, 1, 2])
def test_a_cycle_of_shared_specs_with_one_owner_is_one_group(owner):
    """B16: each shares with the next, around; whichever states quantized values has the parameters of all."""
    model = Body(lambda m, x: torch.cat([m.a(x), m.b(x)], 1), a=conv(), b=conv())

    def cat(node):
        first, second = node.args[0]
        places = [(first, node), (second, node), node]
        said = [U8 if place == owner else SameAs(places[(place + 1) % 3]) for place in range(3)]
        return Annotation({first: said[0], second: said[1]}, said[2])

    stage = prepared(model, By(conv2d=layer, cat=cat))
    assert len({stage.annotations.leaders[s] for s in ("a#0/conv2d.0", "b#0/conv2d.0", "#0/cat.0")}) == 1
    without = By(conv2d=layer, cat=lambda n: Annotation({n.args[0][0]: SameAs(n)}, SameAs((n.args[0][0], n))))
    with pytest.raises(UnsupportedError, match="none of them"):
        prepared(model, without)


@pytest.mark.case("frontends B16")
def test_a_site_may_share_with_a_later_site():
    """B16: anchor later in the graph, and transitive."""
    model = Body(lambda m, x: m.a(x) + m.b(x), a=conv(), b=conv())

    def add(node):
        first, second = node.args
        return Annotation({first: SameAs((second, node)), second: SameAs(node)}, U8)

    stage = prepared(model, By(conv2d=layer, add=add))
    assert len({stage.annotations.leaders[s] for s in ("a#0/conv2d.0", "b#0/conv2d.0", "#0/add.0")}) == 1
    stage(X)
    assert len(stage.observers) == 2
    found = convert(stage)
    assert found.qparams["a#0/conv2d.0"] == found.qparams["b#0/conv2d.0"] == found.qparams["#0/add.0"]
    assert_equal_quantized(found, stages.requantize(found), X)


@pytest.mark.case("frontends B16")
@pytest.mark.parametrize(
    ("quantized_as", "problem"),
    [(lambda n: SameAs(n.args[1]), "which has no annotation"), (lambda n: SameAs((n.args[0], n)), "none of them")],
)
def test_sharing_without_an_owner_is_refused(quantized_as, problem):
    """B16, 2.10.7: an anchor that is missing, or that is oneself, is an error and not a recursion."""
    model = Body(lambda m, x: m.a(x) + x.sum(), a=conv())
    with pytest.raises(UnsupportedError, match=problem):
        prepared(model, By(add=lambda n: Annotation({n.args[0]: quantized_as(n)})))


@pytest.mark.case("frontends B16")
def test_without_implicit_sharing_a_reader_has_parameters_of_its_own():
    """B16: the producer's quantized values and the reader's differ; with sharing they are one."""
    model = Body(lambda m, x: m.b(m.a(x)), a=conv(), b=conv(4))

    def rules(sharing):
        return By(conv2d=lambda n: layer(n, output=U8 if n.name == "conv2d" else None, sharing=sharing))

    assert counts(reference(model, rules(True))) == "2:2:2"
    found = reference(model, rules(False))
    assert counts(found) == "3:3:2"
    assert "a#0/alias.0" in found.qparams
    assert not [n for n in found.module.graph.nodes if "alias" in operator(n)]
    assert_equal_quantized(found, stages.requantize(found), X)


def test_readers_with_different_types_get_a_requantize():
    model = Body(lambda m, x: (lambda y: m.b(y) + m.c(y))(m.a(x)), a=conv(), b=conv(4), c=conv(4))
    found = reference(model, By(conv2d=lambda n: layer(n, QuantizedAs("u7") if n.name == "conv2d_2" else U8)))
    assert found.qparams["a#0/conv2d.0"].qmax == 255
    assert found.qparams["a#0/alias.0"].qmax == 127
    assert_equal_quantized(found, stages.requantize(found), X)


def test_a_second_preparation_of_the_same_graph_finds_the_same_sites():
    """Equalization annotates anew."""
    model = Body(lambda m, x: m.b(F.relu(m.a(x))), a=conv(), b=conv(4))
    rules = By(conv2d=lambda n: layer(n, output=U8 if n.name == "conv2d" else None, sharing=False), relu=reads(U8))
    stage = prepared(model, rules)
    again = stages.equalize(stage, [X])
    assert again.annotations.sites_text() == stage.annotations.sites_text()


def test_dynamic_layers_match_the_reference():
    model = Body(lambda m, x: m.b(m.a(x)), a=nn.Linear(8, 8), b=nn.Linear(8, 4))
    stage = prepared(model, By(linear=lambda n: layer(n, QuantizedAs(spec=Dynamic("token")))), X)
    assert not stage.observers
    assert {site.role for site in stage.annotations.sites} == {"token", "weight"}
    found = convert(stage)
    assert torch.allclose(stages.compile(found)(X), found(X), atol=1e-5)


@pytest.mark.case("frontends C7")
def test_annotators_are_composed_and_earlier_annotations_are_kept():
    """C7: embedding, run-time linear and static convolution together."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.conv, self.head = nn.Embedding(10, 3), conv(), nn.Linear(4, 5)

        def forward(self, ids):
            x = self.table(ids).permute(0, 3, 1, 2)
            return self.head(self.conv(x).mean((2, 3)))

    ids = torch.randint(0, 10, (2, 8, 8))
    run_on_all_ranks = Composed(
        [
            By(embedding=lambda n: Annotation({n.args[0]: QuantizedAs("u8")})),
            By(linear=lambda n: layer(n, QuantizedAs(spec=Dynamic("token")))),
            By(conv2d=layer),
        ]
    )
    stage = prepared(Net(), run_on_all_ranks, ids)
    assert [table.reason for table in stage.annotations.tables] == [None]
    assert [(r.name, r.dynamic) for r in stage.annotations.regions] == [("conv2d", False), ("linear", True)]


class Changes:
    def annotate(self, module):
        for node in module.graph.nodes:
            if (found := annotation_of(node)) is not None:
                found.output = U8


class Removes:
    def annotate(self, module):
        for node in module.graph.nodes:
            node.meta.pop("quantization_annotation", None)


@pytest.mark.case("frontends C7")
@pytest.mark.parametrize(("second", "done"), [(Changes(), "Changes changed"), (Removes(), "Removes removed")])
def test_changing_a_site_of_an_earlier_annotator_is_an_error(second, done):
    with pytest.raises(UnsupportedError, match=f"{done} an annotation of By"):
        prepared(Body(lambda m, x: m.a(x), a=conv()), Composed([By(conv2d=layer), second]))


def test_a_node_is_annotated_once():
    class Twice(By):
        def annotate(self, module):
            super().annotate(module)
            super().annotate(module)

    with pytest.raises(UnsupportedError, match="already annotated"):
        prepared(Body(lambda m, x: m.a(x), a=conv()), Twice(conv2d=layer))


def test_an_annotation_of_an_unknown_node_is_an_error():
    model = Body(lambda m, x: m.a(x) + 1.0, a=conv())
    with pytest.raises(UnsupportedError, match=r"not an fx\.Node"):
        prepared(model, By(add=lambda n: Annotation({n.args[1]: U8})))


class Doubling(Extremum):
    """Twice the extremum seen, around 128."""

    def calculate_qparams(self):
        return torch.tensor([2 * self.most / 127]), torch.tensor([128])


def test_a_custom_observer_chooses_the_parameters(tmp_path):
    model = Body(lambda m, x: m.a(x), a=conv())
    stage = prepared(model, By(conv2d=lambda n: layer(n, QuantizedAs(spec=Observed(observer=Doubling)))))
    ranges = calibrate(stage, [X])
    wanted = torch.tensor([2 * X.abs().max() / 127]).item()
    q = convert(stage, ranges).qparams["#0/input.args_0"]
    assert (q.step, q.zero) == (wanted, 128)
    ranges.save(tmp_path / "ranges.json")
    assert convert(stage, Ranges.load(tmp_path / "ranges.json")).qparams["#0/input.args_0"] == q
    assert convert(stage).qparams["#0/input.args_0"] == q


def test_the_hook_replaces_the_observer_of_a_whole_group():
    """2.2: one site's spec, and all that share with it follow."""

    class Hooked(By):
        def specs(self, sites):
            (name,) = (site.name for site in sites if site.name.endswith("conv2d.0"))
            return {name: Fixed(0.125, 42)}

    model = Body(lambda m, x: F.max_pool2d(m.a(x), 2), a=conv())
    rules = {"conv2d": layer, "max_pool2d": lambda n: Annotation({n.args[0]: U8}, SameAs((n.args[0], n)))}
    found = reference(model, Hooked(**rules))
    assert found.qparams["a#0/conv2d.0"] == found.qparams["#0/max_pool2d.0"]
    assert (found.qparams["#0/max_pool2d.0"].step, found.qparams["#0/max_pool2d.0"].zero) == (0.125, 42)


def test_a_recipe_decides_what_an_annotator_leaves_open():
    model = Body(lambda m, x: m.b(m.a(x)), a=conv(), b=conv(4))
    captured = stages.capture(nets.randomize(model), X)
    recipe = Recipe.of({"b": None})
    stage = prepare(captured, Quantizer(recipe, annotator=By(conv2d=layer)))
    assert [region.anchor.name for region in stage.annotations.regions] == ["conv2d"]


def test_a_quantizer_argument_must_be_a_quantizer_or_an_annotator():
    captured = stages.capture(conv(), X)
    with pytest.raises(InputError, match="annotate"):
        prepare(captured, "int8")
    with pytest.raises(SelectorError, match="annotator cannot be combined with patterns"):
        Quantizer(patterns=["conv2d"], annotator=By())


@pytest.mark.parametrize(
    "body",
    [
        *slow_params(lambda m, x: m.a(x), reason="annotated otherwise, with the same result"),
        lambda m, x: F.relu(m.a(x)),
        *slow_params(lambda m, x: torch.sin(m.a(x)), reason="annotated otherwise, with the same result"),
    ],
    ids=["conv", "relu", "sin"],
)
def test_int8_outputs_are_uint8_with_any_annotation(body):
    annotator = By(conv2d=layer, relu=lambda n: Annotation())
    quantizer = Quantizer(annotator=annotator, outputs="int8")
    captured = stages.capture(nets.randomize(Body(body, a=conv())), X)
    stage = prepare(captured, quantizer)
    stage(X)
    found = convert(stage)
    given, native = found(X), stages.compile(found)(X)
    assert given.values.dtype == native.values.dtype == torch.uint8
    assert (given.values.int() - native.values.int()).abs().max() <= 1
    assert given[1:] == native[1:]
    plain = convert(_seen(prepare(captured, annotator)))(X)
    assert (given.dequantize() - plain).abs().max() <= given.scale


def _seen(stage):
    stage(X)
    return stage


def test_result_data_types_that_are_not_supported_are_an_error():
    captured = stages.capture(nets.randomize(Body(lambda m, x: m.a(x), a=conv())), X)
    annotator = By(conv2d=lambda n: layer(n, output=QuantizedAs("s16")))
    stage = prepare(captured, Quantizer(annotator=annotator, outputs="int8"))
    stage(X)
    with pytest.raises(UnsupportedError, match="results must be u8"):
        convert(stage)


def test_nothing_annotated_is_an_error():
    """2.10.2: a quantizer that finds none of its operators says nothing; here it is an error."""
    with pytest.raises(UnsupportedError, match="nothing in it can be quantized"):
        prepared(Body(lambda m, x: m.a(x), a=conv()), By(conv3d=layer))


@pytest.mark.parametrize(("given", "problem"), [({"datatype": "u9"}, "u9"), ({"span": (0, 300)}, r"0\.\.300")])
def test_invalid_annotated_types_are_refused(given, problem):
    with pytest.raises(UnsupportedError, match=problem):
        QuantizedAs(**given)


class Grouped(nn.Module):
    """Four bits for every 8 inputs of an output, written with operators of its own choice."""

    def forward(self, x):
        self.peaks = x.reshape(len(x), -1, 8).abs().amax(-1)
        return x

    def convert(self, module, node):
        ops, graph = torch.ops.quantized_decomposed, module.graph
        module.register_buffer("weight_scales", self.peaks / 7)
        module.register_buffer("weight_zeros", torch.zeros_like(self.peaks, dtype=torch.int64))
        with graph.inserting_before(node):
            given = (graph.get_attr("weight_scales"), graph.get_attr("weight_zeros"), -8, 7, torch.int8, 8)
            quantized_as = graph.call_function(ops.quantize_per_channel_group.default, (node.args[0], *given))
            back = graph.call_function(ops.dequantize_per_channel_group.default, (quantized_as, *given, torch.float32))
        node.replace_all_uses_with(back)
        graph.erase_node(node)


def four_bits(weight):
    scales = weight.reshape(len(weight), -1, 8).abs().amax(-1, keepdim=True) / 7
    quantized_as = (weight.reshape(len(weight), -1, 8) / scales).round().clamp(-8, 7)
    return (quantized_as * scales).reshape(weight.shape)


@pytest.mark.case("frontends C10")
def test_nodes_inserted_by_an_observer_are_unchanged():
    """C10: int4 per group in front of one linear layer, int8 in the other; integers are folded, dequantize is not."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2))
    model = nets.randomize(Body(lambda m, x: m.b(m.a(x)), a=nn.Linear(16, 16), b=nn.Linear(16, 5)))

    def rule(node):
        weight = CustomObserver(Grouped) if info(node.args[1]).path == "a.weight" else WEIGHT
        return Annotation(
            {node.args[0]: CustomObserver(Shifted) if isinstance(weight, CustomObserver) else U8, node.args[1]: weight}
        )

    found = reference(model, By(linear=rule), x)
    (back,) = (node for node in found.module.graph.nodes if "per_channel_group" in operator(node))
    held = getattr(found.module, back.args[0].target)
    assert (held.dtype, held.min() >= -8, held.max() <= 7) == (torch.int8, True, True)
    written = [operator(n).split(".")[1] for n in found.module.graph.nodes if info(n).observer and operator(n)]
    assert sorted(written) == ["dequantize_per_channel_group", "dequantize_per_tensor", "quantize_per_tensor"]
    step = x.abs().max() / 100
    rounded = ((x / step).round() - 3).clamp(-128, 127) + 3
    wanted = F.linear(rounded * step, four_bits(model.a.weight), model.a.bias)
    inner = found.module.graph.nodes
    (first,) = (node for node in inner if operator(node) == "aten.linear.default" and node.args[1] is back)
    held = {}

    class Keep(torch.fx.Interpreter):
        def run_node(self, n):
            held[n.name] = super().run_node(n)
            return held[n.name]

    with torch.no_grad():
        Keep(found.module).run(x)
    torch.testing.assert_close(held[first.name], wanted)
    lowered = stages.requantize(found)
    for stage in (lowered, stages.compile(lowered)):
        torch.testing.assert_close(stage(x), found(x), atol=0.02, rtol=0)
        assert stage(x[:2]).shape == (2, 5)


def with_own_levels(activation=U8) -> Prepared:
    """A weight in groups of four bits, in front of a layer in int8."""

    def rule(node):
        grouped = info(node.args[1]).path == "a.weight"
        x, weight = (activation, CustomObserver(Grouped)) if grouped else (U8, WEIGHT)
        return Annotation({node.args[0]: x, node.args[1]: weight})

    model = Body(lambda m, x: m.b(m.a(x)), a=nn.Linear(16, 16), b=nn.Linear(16, 5))
    return prepared(model, By(linear=rule), ROWS)


ROWS = torch.randn(4, 16, generator=torch.Generator().manual_seed(2))


@pytest.mark.slow(reason="starts a process; files of models have tests of their own")
@pytest.mark.case("frontends C10")
@pytest.mark.parametrize("activation", [CustomObserver(Shifted), *slow_params(U8, reason="levels of the type itself")])
def test_a_model_converted_by_a_custom_observer_is_saved_and_loaded(activation, tmp_path):
    """C10: in a process that has not imported torch's operators of quantized values either."""
    stage = with_own_levels(activation)
    found = convert(stage, calibrate(stage, [ROWS]))
    program = torch.export.export(found.module, (ROWS,))
    torch.export.save(program, tmp_path / "reference.pt2")
    assert torch.equal(torch.export.load(tmp_path / "reference.pt2").module()(ROWS)[0], found(ROWS))
    model = stages.compile(found)
    model.save(tmp_path / "m", example=ROWS)
    torch.save(ROWS, tmp_path / "rows")
    code = """if True:
        import sys, torch, intaglio
        loaded = intaglio.load(sys.argv[1])
        torch.save(loaded(torch.load(sys.argv[2])), sys.argv[3])"""
    given = [str(tmp_path / name) for name in ("m", "rows", "found")]
    subprocess.run([sys.executable, "-c", code, *given], check=True, timeout=300)
    assert torch.equal(torch.load(tmp_path / "found"), model(ROWS))


@pytest.mark.case("frontends C10")
def test_files_of_ranges_and_parameters_go_with_an_observer_that_has_seen_data(tmp_path):
    """C10: of a weight they are enough; what an observer of activations has seen is in no file, and said so."""
    stage = with_own_levels()
    ranges = calibrate(stage, [ROWS])
    ranges.save(tmp_path / "ranges")
    found = convert(stage, ranges)
    found.parameters.save(tmp_path / "parameters")
    files = (Ranges.load(tmp_path / "ranges"), Parameters.load(tmp_path / "parameters"))
    assert all(torch.equal(convert(with_own_levels(), file)(ROWS), found(ROWS)) for file in files)
    stage = with_own_levels(CustomObserver(Shifted))
    ranges = calibrate(stage, [ROWS])
    wanted = convert(stage, ranges)
    for known in (ranges, wanted.parameters):
        again = with_own_levels(CustomObserver(Shifted))
        with pytest.raises(CalibrationError, match=r"Shifted.* has seen no data\n  remedy: .*prepared\(batch\)"):
            convert(again, known)
        again(ROWS)
        assert torch.equal(convert(again, known)(ROWS), wanted(ROWS))


@pytest.mark.case("frontends C10")
def test_an_observer_with_its_own_conversion_cannot_be_trained():
    captured = stages.capture(nn.Sequential(nn.Linear(16, 5)), ROWS, train=True)
    rule = By(linear=lambda n: Annotation({n.args[0]: U8, n.args[1]: CustomObserver(Grouped)}))
    with pytest.raises(UnsupportedError, match=r"0 .*whose observer writes its own quantize nodes cannot be trained"):
        stages.prepare(captured, rule, qat=True)


@pytest.mark.case("frontends C10")
def test_an_observer_that_does_not_replace_its_node_is_an_error():
    class Forgets(Shifted):
        def convert(self, module, node):
            pass

    with pytest.raises(UnsupportedError, match=r"Forgets\.convert did not remove its node"):
        reference(Body(lambda m, x: m.a(x), a=conv()), By(conv2d=lambda n: layer(n, CustomObserver(Forgets))))
