"""Fusion rows: what becomes one kernel. Annotation and lowering both read them, so they cannot disagree."""

from __future__ import annotations

from dataclasses import dataclass

from intaglio.ir.rewrite import Pattern, any, op, seq
from intaglio.ops.fused_activations import FUNCTIONS

ANCHORS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear")
ACCUMULATING = (*ANCHORS, "bmm")
"""What gives an int32 accumulator, which may leave its partition dequantized."""
SUMS = ("add", "scaled_add")
"""Both are `add` in the integer graph; the second has a factor per channel."""


NUMBERS = ("mul_number", "div_number")
"""Scale what they read; behind a product of two activations, its unit."""


@dataclass(frozen=True)
class Fusion:
    """A named pattern over operator names; its root is the value that may become a site, inner values never do.

    precise: it holds only where the recipe asks for precise functions; elsewhere the function is a table behind a site.
    """

    name: str
    pattern: Pattern
    precise: bool = False


FUSIONS = (
    Fusion("anchor_function_affine", seq(ANCHORS, FUNCTIONS, "affine"), precise=True),
    Fusion("anchor_add_clamp", op("clamp", op(SUMS, op(ANCHORS, any("x")), any("other"), commutative=True))),
    Fusion("anchor_add", op(SUMS, op(ANCHORS, any("x")), any("other"), commutative=True)),
    Fusion("anchor_clamp", seq(ANCHORS, "clamp")),
    Fusion("product_number", seq("bmm", NUMBERS)),
    Fusion("anchor_function", seq(ANCHORS, FUNCTIONS), precise=True),
    Fusion("add_clamp", op("clamp", op(SUMS, any("a"), any("b")))),
    Fusion("affine_clamp", seq("affine", "clamp")),
)


def check_longest_first(rows: tuple[Fusion, ...]) -> None:
    """Rows are tried in order, so a longer one behind a shorter one would never win."""
    sizes = [row.pattern.size() for row in rows]
    if sizes != sorted(sizes, reverse=True):
        raise ValueError(f"fusion rows must stand longest first; sizes are {sizes}")


check_longest_first(FUSIONS)
