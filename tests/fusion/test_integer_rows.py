"""Rows of the integer graph: what they match there, and why they refuse."""

import numpy as np
import pytest

from intaglio.fusion import table
from intaglio.fusion.fusion_record import FusionLevel, check_longest_first, match_rows
from intaglio.fusion.integer_graph_view import IntegerGraphView
from intaglio.fusion.matcher import matches
from intaglio.fusion.pattern import op, reads, wildcard
from intaglio.ir import DType, Graph, Op, QParams, TensorType

F, U = TensorType((2, 4), DType.F32), TensorType((2, 4), DType.U8, QParams((0.1,), (3,), 0, 255))
NUMBER = TensorType((), DType.F32)


def loop(inputs: tuple[str, ...], output: str, *steps: Op, types=None, constants=None) -> Op:
    """A loop over [2, 4]; all values that ``types`` does not name are floats."""
    names = {*inputs, output, *(name for step in steps for name in (*step.inputs, *step.outputs))}
    kinds = dict.fromkeys(names, F) | (types or {})
    return Op("loop", inputs, (output,), {}, Graph(inputs, (output,), kinds, steps, constants or {}))


def negated(x: str, y: str) -> Op:
    return loop((x,), y, Op("neg", (x,), (y,)))


def graph(outputs: tuple[str, ...], *ops: Op, types=None, constants=None) -> Graph:
    names = {name for one in ops for name in (*one.inputs, *one.outputs)}
    kinds = dict.fromkeys(names, F) | (types or {})
    return Graph(("x",), outputs, kinds, ops, constants or {})


def found(row, root: str, view: IntegerGraphView) -> list[str]:
    """What the row joins with an operator."""
    return [match.anchor for match in row.find(root, view)]


def test_a_pattern_matches_with_any_order_of_operands():
    both = loop(("a", "b"), "c", Op("add", ("a", "b"), ("c",)))
    view = IntegerGraphView(graph(("c", "a"), negated("x", "a"), negated("x", "b"), both))
    shared, private = reads("loop", op("loop", shared=True)), reads("loop", op("loop"))
    assert [match.anchor for match in matches(shared, "c", view)] == ["a", "b"]
    assert [match.anchor for match in matches(private, "c", view)] == ["b"], "a is a result of the graph too"
    assert [match["value"] for match in matches(reads("loop", wildcard("value")), "c", view)] == ["a", "b"]


def test_a_loop_joins_the_loop_that_it_reads():
    view = IntegerGraphView(graph(("b",), negated("x", "a"), negated("a", "b")))
    assert found(table.LOOP_LOOP, "b", view) == ["a"]
    assert found(table.LOOP_LOOP, "a", view) == []


def test_an_operator_between_two_loops_keeps_them_apart():
    island = Op("island", ("a",), ("i",), {"key": "k"})
    last = loop(("a", "i"), "b", Op("add", ("a", "i"), ("b",)))
    view = IntegerGraphView(graph(("b",), negated("x", "a"), island, last))
    (match,) = matches(table.LOOP_LOOP.pattern, "b", view)
    assert table.LOOP_LOOP.where(match, view) == "a third operator depends on the first loop, and the second on it"


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [(("q",), None), (("q", "number"), None), (("q", "x"), "it reads more than one value")],
    ids=["one value", "a number", "a second value"],
)
def test_a_loop_of_one_quantized_value_is_a_table(inputs, reason):
    types = {"q": U, "y": U, "number": NUMBER}
    body = [Op("dequantize", ("q",), ("r",)), Op("quantize", ("r",), ("y",))]
    body += [Op("add", ("r", name), (f"{name}_sum",)) for name in inputs[1:]]
    view = IntegerGraphView(
        graph(
            ("y",),
            Op("quantize", ("x",), ("q",)),
            loop(inputs, "y", *body, types={name: types[name] for name in (*inputs, "y") if name in types}),
            types=types,
            constants={"number": np.float32(2)},
        )
    )
    match = next(match for match in matches(table.LOOP_TABLE.pattern, "y", view) if match["quantized"] == "q")
    assert table.LOOP_TABLE.where(match, view) == reason


def test_a_function_that_is_read_as_float_stays_exact():
    types = {"y": U}
    exact = loop(("x",), "y", Op("gelu", ("x",), ("g",)), Op("quantize", ("g",), ("y",)), types=types)
    read = loop(("x",), "y", *exact.body.ops, Op("neg", ("g",), ("n",)), types=types)
    assert found(table.QUANTIZED_FUNCTION, "g", IntegerGraphView(exact.body)) == ["g"]
    assert found(table.QUANTIZED_FUNCTION, "g", IntegerGraphView(read.body)) == []


def test_an_accumulator_with_epilogue_and_lookup_is_one_match():
    accumulator = TensorType((2, 4), DType.I32, QParams((0.1,), (0,), -(2**31), 2**31 - 1))
    ops = (
        Op("linear", ("q", "w", "bias"), ("acc",)),
        Op("requantize", ("acc", "m"), ("r",)),
        Op("table", ("r", "t"), ("y",)),
    )
    view = IntegerGraphView(graph(("y",), *ops, types={"acc": accumulator, "r": U, "y": U}))
    hits = match_rows(table.ACCUMULATOR_FUSIONS, ["acc", "r", "y"], view, lambda row, nodes: (row.name, nodes), set())
    assert hits == [("product_tail_table", ("acc", "r", "y"))]
    view = IntegerGraphView(graph(("y", "r"), *ops, types={"acc": accumulator, "r": U, "y": U}))
    hits = match_rows(table.ACCUMULATOR_FUSIONS, ["acc", "r", "y"], view, lambda row, nodes: (row.name, nodes), set())
    assert hits == [("product_tail", ("acc", "r"))], "the quantized values are a result too"


def test_every_fusion_row_has_a_unique_name_purpose_and_level():
    names = [row.name for row in table.FUSIONS]
    assert len(set(names)) == len(names)
    assert all(row.purpose for row in table.FUSIONS)
    assert {row.level for row in table.FUSIONS} == set(FusionLevel)


def test_a_longer_fusion_row_after_a_shorter_one_is_refused():
    with pytest.raises(ValueError, match="longest pattern first"):
        check_longest_first(tuple(reversed(table.ACCUMULATOR_FUSIONS)))
