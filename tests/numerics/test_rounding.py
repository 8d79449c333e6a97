"""Rounding is defined in `numerics` alone: every other place calls it, or stands in the list below with its reason."""

import ast
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from intaglio import numerics
from support.project_files import syntax_nodes

SOURCES = Path(__file__).parents[2] / "src" / "intaglio"
ROUNDING = frozenset({"rint", "round", "round_"})
EXEMPT = {
    "ops": "the operator `round` itself",
    "cut_islands.py": "a node of the graph of a float island",
    "qdq_to_u8.py": "nodes of a graph that write the rule out",
    "operator_aliases.py": "the operator `round` itself",
    "biases.py": "sums kept in fixed point, so that they add up exactly",
    "per_channel_inputs.py": "a count of steps, and a test of whether values lie on a grid",
    "range_methods.py": "bins outside of the range are left out, not clamped",
    "image.py": "a zero point rounded to a whole number",
    "fake_quantize.py": "a trained zero point rounded to a whole number, and the gradient of rounding",
    "row_errors.py": "errors of weights in integers of two bytes, which no result of a model has",
    "op_error.py": "values outside of the range are counted before they are clamped",
    "pair.py": "values outside of the range are counted before they are clamped",
}
"""Folder or file -> why it rounds by itself."""


def calls_of_rounding(path: Path) -> list[int]:
    attributes = (node for node in syntax_nodes(path) if isinstance(node, ast.Attribute) and node.attr in ROUNDING)
    return [node.lineno for node in attributes]


def test_only_numerics_rounds():
    found = {}
    for path in SOURCES.rglob("*.py"):
        place = path.relative_to(SOURCES)
        if place.parts[0] == "numerics" or place.parts[0] in EXEMPT or place.name in EXEMPT:
            continue
        if lines := calls_of_rounding(path):
            found[str(place)] = lines
    assert not found, f"call numerics.quantize or numerics.round_clamp instead: {found}"


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40),
    st.integers(-128, 255),
    st.sampled_from([(0, 255), (-127, 127), (-8, 7), (0, 65534)]),
)
def test_round_clamp_is_the_same_for_arrays_and_tensors(values, zero_point, bounds):
    steps = np.array(values, np.float32)
    expected = np.clip(np.rint(steps) + np.float32(zero_point), *map(np.float32, bounds))
    assert np.array_equal(numerics.round_clamp(steps, *bounds, zero_point), expected)
    assert np.array_equal(numerics.round_clamp(torch.from_numpy(steps), *bounds, zero_point).numpy(), expected)


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40), st.floats(2.0**-10, 8, width=32))
def test_quantize_is_round_clamp_of_the_product_with_the_reciprocal(values, scale):
    x = np.array(values, np.float32)
    product = x * numerics.reciprocal(scale)
    assert np.array_equal(numerics.quantize(x, scale, 7, 0, 255), numerics.round_clamp(product, 0, 255, 7))


def test_numpy_and_cpp_round_ties_to_even():
    halves = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5], np.float32)
    expected = [-2, -2, -0.0, 0, 2, 2]
    assert numerics.round_clamp(halves, -9, 9).tolist() == expected
    assert numerics.round_clamp(torch.from_numpy(halves), -9, 9).tolist() == expected
