"""Dimensions, the verifier, the printer, the matcher."""

import operator
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intaglio.fusion.matcher import match
from intaglio.fusion.pattern import const, op, seq, wildcard
from intaglio.ir import (
    DType,
    Graph,
    ModelInfo,
    Op,
    Origin,
    QParams,
    TensorType,
    c_expression,
    evaluate,
    fresh,
    graph_text,
    numel,
    prune,
    symbol,
    symbols_of,
)
from intaglio.ir.rewrite import run_passes
from intaglio.ir.verify import VerifyError
from intaglio.ops import verify

N, H = symbol("n"), symbol("h")
SIZES = st.fixed_dictionaries({"n": st.integers(0, 9), "h": st.integers(1, 99)})


@st.composite
def formulas(draw, depth=4):
    """A function of integers or dimensions alike, built from + - * and // by a number."""
    if depth == 0 or draw(st.booleans()):
        leaf = draw(st.one_of(st.sampled_from(["n", "h"]), st.integers(-5, 5)))
        return (lambda env: env[leaf]) if isinstance(leaf, str) else (lambda env: leaf)
    left, right = draw(formulas(depth - 1)), draw(formulas(depth - 1))
    divisor = draw(st.integers(1, 6))
    act = draw(st.sampled_from([operator.add, operator.sub, operator.mul, None]))
    return (lambda env: left(env) // divisor) if act is None else (lambda env: act(left(env), right(env)))


@given(formulas(), SIZES)
def test_dimensions_evaluate_to_what_integers_give(formula, sizes):
    dim = formula({"n": N, "h": H})
    assert evaluate(dim, sizes) == formula(sizes)
    assert symbols_of(dim) <= {"n", "h"}


@given(formulas(), SIZES)
def test_c_expressions_of_nonnegative_dimensions_are_equivalent(formula, sizes):
    dim = formula({"n": N, "h": H})
    text = c_expression(dim)
    assert eval(text.replace("/", "//"), dict(sizes)) == formula(sizes)


def test_equal_dimensions_are_one_value():
    assert N + H == H + N
    assert N * (H + 1) == N + N * H
    assert (N * 4) // 2 == N * 2
    assert N - N == 0
    assert str((H + 1) // 2 * N) == "(h + 1)//2*n"
    assert str(N * 2 - 1) == "n*2 - 1"
    assert numel((N, 3, 4)) == N * 12
    assert numel(()) == 1


def test_a_symbol_without_a_value_is_named():
    with pytest.raises(KeyError, match="h"):
        evaluate(N * H, {"n": 2})


Q = QParams((0.5,), (3,), 0, 255)
U8 = TensorType((N, 4), DType.U8, Q)
ACC = TensorType((N, 2), DType.I32, QParams((0.25,), (0,), -(2**31), 2**31 - 1))
OUT = TensorType((N, 2), DType.U8, Q)
F32 = TensorType((N, 2), DType.F32)


def small(**changes) -> Graph:
    """x -> quantize -> linear -> requantize -> dequantize, one thing changed."""
    types = {
        "x": TensorType((N, 4), DType.F32),
        "w": TensorType((2, 4), DType.S8),
        "b": TensorType((2,), DType.I32),
        "m": TensorType((1,), DType.F32),
        "q": U8,
        "acc": ACC,
        "y": OUT,
        "f": F32,
    }
    ops = {
        "q": Op("quantize", ("x",), ("q",)),
        "acc": Op("linear", ("q", "w", "b"), ("acc",), origin=Origin("fc", "aten.linear.default")),
        "y": Op("requantize", ("acc", "m"), ("y",), {"low": 0, "high": 255}),
        "f": Op("dequantize", ("y",), ("f",)),
    }
    constants = {"w": np.ones((2, 4), np.int8), "b": np.zeros(2, np.int32), "m": np.ones(1, np.float32)}
    types.update(changes.get("types", {}))
    ops.update(changes.get("ops", {}))
    constants.update(changes.get("constants", {}))
    for name in changes.get("untyped", ()):
        del types[name]
    return Graph(changes.get("inputs", ("x",)), changes.get("outputs", ("f",)), types, tuple(ops.values()), constants)


def test_the_verifier_accepts_a_sound_graph():
    graph = small()
    assert verify(graph) is graph


BROKEN = {
    "read before it is computed": {"ops": {"q": Op("quantize", ("y",), ("q",))}},
    "computed twice": {"ops": {"again": Op("dequantize", ("y",), ("f",))}},
    "an input is also a constant": {"inputs": ("x", "w")},
    "%w has no type": {"untyped": ("w",)},
    "%y has no type": {"untyped": ("y",)},
    "is not computed": {"outputs": ("nowhere",)},
    "is an accumulator": {"outputs": ("f", "acc")},
    "has 2 readers": {"ops": {"z": Op("dequantize", ("acc",), ("z",))}, "types": {"z": F32}, "outputs": ("f", "z")},
    "constant %w has shape": {"constants": {"w": np.ones((4, 2), np.int8)}},
    "expects 3 operands, but has 2": {"ops": {"acc": Op("linear", ("q", "w"), ("acc",))}},
    "%w is f32": {"types": {"w": TensorType((2, 4), DType.F32)}},
    "its result is f32": {"types": {"acc": F32}},
    "quantized values need quantization parameters": {"types": {"y": TensorType((N, 2), DType.U8)}},
}


@pytest.mark.parametrize("reason", BROKEN)
def test_the_verifier_rejects(reason):
    with pytest.raises(VerifyError, match=reason):
        verify(small(**BROKEN[reason]), after="some_pass")


def test_a_pass_that_breaks_the_graph_is_named():
    def careless(graph):
        return graph.replace(ops=graph.ops[:-2]), 1

    with pytest.raises(VerifyError, match="output %f is not computed after careless"):
        run_passes(small(), [careless], verify)


def test_the_printer_shows_types_parameters_and_origins(golden):
    golden(graph_text(small()))


def test_pruning_keeps_inputs_and_drops_what_no_output_needs():
    graph = prune(small(outputs=("q",)))
    assert graph.inputs == ("x",)
    assert [o.kind for o in graph.ops] == ["quantize"]
    assert not graph.constants
    assert set(graph.types) == {"x", "q"}


def test_a_graph_pickles_and_compares_by_text():
    assert graph_text(pickle.loads(pickle.dumps(small()))) == graph_text(small())
    assert fresh({"a": 1, "a_2": 1}, "a") == "a_3"
    assert fresh({}, "a") == "a"


@pytest.mark.parametrize(
    "bad",
    [
        lambda: QParams((0.0,), (0,), 0, 255),
        lambda: QParams((1.0,), (0,), 5, 5),
        lambda: QParams((1.0, 2.0), (0, 0), 0, 255),
        lambda: QParams((1.0,), (0, 0), 0, 255, 0),
        lambda: QParams((float("inf"),), (0,), 0, 255),
    ],
)
def test_parameters_that_make_no_sense_are_refused(bad):
    with pytest.raises(ValueError, match=r"scale|qmin"):
        bad()


class View:
    """name -> (kind, operands); what has no entry is a leaf, capital leaves are constants."""

    def __init__(self, outputs=(), **nodes):
        self.nodes, self.outputs = nodes, outputs

    def kinds(self, node):
        return self.nodes[node][:1] if node in self.nodes else ()

    def operands(self, node):
        return tuple(self.nodes[node][1:]) if node in self.nodes else ()

    def readers(self, node):
        return sum(n[1:].count(node) for n in self.nodes.values()) + list(self.outputs).count(node)

    def constant(self, node):
        return node.isupper()

    def position(self, node):
        return list(self.nodes).index(node) if node in self.nodes else -1


RESIDUAL = op("add", op("conv", wildcard("x")), wildcard("other"), commutative=True)


def test_a_chain_matches_from_its_root():
    view = View(c=("conv", "x"), r=("relu", "c"))
    found = match(seq("conv", "relu"), "r", view)
    assert found.nodes == ("r", "c")
    assert found.anchor == "c"
    assert found["x"] == "x"
    assert match(seq("conv", "relu"), "c", view) is None


@pytest.mark.parametrize("operands", [("c", "y"), ("y", "c")])
def test_commutative_operands_match_in_either_order(operands):
    found = match(RESIDUAL, "a", View(c=("conv", "x"), a=("add", *operands)))
    assert found.nodes == ("a", "c")
    assert found["other"] == "y"


def test_the_later_of_two_candidates_is_fused():
    assert match(RESIDUAL, "a", View(c=("conv", "x"), d=("conv", "x"), a=("add", "c", "d"))).anchor == "d"


def test_an_inner_value_with_a_second_reader_is_not_matched():
    assert match(RESIDUAL, "a", View(c=("conv", "x"), a=("add", "c", "y"), s=("sin", "c"))) is None
    assert match(RESIDUAL, "a", View(c=("conv", "x"), a=("add", "c", "y"), outputs=("c",))) is None
    assert match(RESIDUAL, "a", View(c=("conv", "x"), a=("add", "c", "c"))) is None


def test_the_earlier_candidate_is_taken_when_the_later_one_has_another_reader():
    view = View(c=("conv", "x"), d=("conv", "x"), a=("add", "c", "d"), outputs=("d",))
    assert match(RESIDUAL, "a", view).anchor == "c"


def test_a_shared_name_makes_a_diamond():
    swish = op("mul", wildcard("x"), op("sigmoid", wildcard("x")), commutative=True)
    assert match(swish, "m", View(s=("sigmoid", "v"), m=("mul", "s", "v")))["x"] == "v"
    assert match(swish, "m", View(s=("sigmoid", "v"), m=("mul", "s", "w"))) is None


SELF_GATED = op("mul", op("conv", wildcard("x"), name="y"), op("sigmoid", wildcard("y")), commutative=True)


@pytest.mark.parametrize("operands", [("c", "s"), ("s", "c")])
def test_an_operator_with_a_name_may_be_read_twice_inside_the_pattern(operands):
    inside = {"c": ("conv", "x"), "s": ("sigmoid", "c"), "m": ("mul", *operands)}
    assert set(match(SELF_GATED, "m", View(**inside)).nodes) == {"m", "c", "s"}
    assert match(SELF_GATED, "m", View(**inside, t=("tanh", "c"))) is None
    assert match(SELF_GATED, "m", View(**{**inside, "s": ("sigmoid", "x")})) is None


def test_an_operator_read_twice_may_appear_twice_in_the_pattern():
    conv = op("conv", wildcard("x"), name="y")
    both = op("mul", op("sigmoid", conv), op("tanh", conv))
    inside = {"c": ("conv", "x"), "s": ("sigmoid", "c"), "t": ("tanh", "c"), "m": ("mul", "s", "t")}
    assert match(both, "m", View(**inside)).nodes == ("m", "s", "c", "t")
    assert match(both, "m", View(**{**inside, "d": ("conv", "x"), "t": ("tanh", "d")})) is None


def test_patterns_may_have_constants_missing_operands_and_conditions():
    scaled = op("mul", wildcard("x"), const("k"))
    assert match(scaled, "m", View(m=("mul", "x", "K")))["k"] == "K"
    assert match(scaled, "m", View(m=("mul", "x", "k"))) is None
    assert match(RESIDUAL, "a", View(c=("conv", "x"), a=("add", "c", None))) is None
    assert match(op("conv", wildcard(), where=lambda node: node == "d"), "c", View(c=("conv", "x"))) is None


def test_texts_of_stages_are_computed_when_they_are_read_and_kept():
    computed: list[int] = []
    made = ModelInfo().with_stage(early="a").with_stage(late=lambda: (computed.append(1), "b")[1])
    assert (list(made.texts), len(made.texts), made.texts["early"]) == (["early", "late"], 2, "a")
    more = made.with_stage(early="c")
    assert not computed
    assert [more.texts["late"], more.texts["late"], more.texts["early"]] == ["b", "b", "c"]
    assert len(computed) == 1
    assert dict(pickle.loads(pickle.dumps(more)).texts) == {"early": "c", "late": "b"}
