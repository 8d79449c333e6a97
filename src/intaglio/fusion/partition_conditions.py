"""Side conditions of accumulator and partition fusions: what a kernel can compute before and after a product."""

from __future__ import annotations

from typing import Protocol

from intaglio.fusion.integer_graph_view import IntegerGraphView
from intaglio.fusion.loop_conditions import as_loop, has_uniform_parameters
from intaglio.fusion.matcher import GraphView, Match
from intaglio.ir import Dim, Graph, Op
from intaglio.ops import op_def
from intaglio.ops.loop_ops.loop_space import body_of, space
from intaglio.ops.loop_ops.primitives import primitive

MAX_HEAD_CHANNELS = 4096
"""Maximum number of channels of a head's result.

Its tallest tile fits ``WEIGHED_BYTES`` of native/layers/weighed_matmul.cpp, and its terms fit ``TERMS`` of
native/elementwise/pair.cpp.
"""


class PlanView(GraphView[str], Protocol):
    """View of the partitions of a plan; a node is the value that a partition computes."""

    graph: Graph

    def operands(self, node: str) -> tuple[str, ...]:
        """Return the values from outside that a partition reads."""

    def operators(self, node: str) -> tuple[Op, ...]:
        """Return the operators of a partition, anchor first; none for other values."""

    def is_flat(self, node: str) -> bool:
        """Return whether all pixels that a partition computes are contiguous in memory."""

    def has_halo(self, value: str) -> bool:
        """Return whether the images of a value have a halo."""

    def pixel_channels(self, value: str) -> Dim:
        """Return the number of elements per pixel in memory."""


def makes_one_result(found: Match[str], view: IntegerGraphView) -> str | None:
    """Refuse a lookup table after a requantization to 16 bits, which also stores remainders."""
    return None if len(view.op(found.nodes[1]).outputs) == 1 else "the requantization has two results"


def scales_pixel_channels(found: Match[str], view: PlanView) -> str | None:
    """Refuse all but the multiplication of squeeze-and-excite before an ungrouped 1x1 convolution."""
    anchor, product = view.operators(found.root)[0], view.operators(found.anchor)[0]
    types = view.graph.types
    if len(types[anchor.output].shape) != 4 or anchor.attrs["groups"] != 1 or not view.is_flat(found.root):
        return "the convolution does not read one pixel after the other"
    shape, shapes = types[product.output].shape, [types[name].shape for name in product.inputs[:2]]
    if len(shape) != 4 or {*shapes} != {shape, (*shape[:2], 1, 1)}:
        return "the factors are not one per channel of an image"
    image = product.inputs[shapes.index(shape)]
    channels = view.pixel_channels(image)
    if not isinstance(channels, int) or channels > MAX_HEAD_CHANNELS:
        return f"the image has {channels} channels; the kernel supports up to {MAX_HEAD_CHANNELS}"
    return "the image has a halo" if view.has_halo(image) else None


def runs_on_tiles(found: Match[str], view: PlanView) -> str | None:
    """Refuse a loop that cannot run on the tiles of the product it reads, or that reads a later product."""
    product, (loop, *_) = found.anchor, view.operators(found.root)
    if not has_uniform_parameters(loop, view.graph.types):
        return "the quantization parameters are per channel"
    if not _gives_tiles(product, view):
        return "the kernel of the product does not compute tile by tile"
    private = (name for name in dict.fromkeys(view.operands(found.root)) if view.readers(name) == 1)
    if any(view.position(name) > view.position(product) and _gives_tiles(name, view) for name in private):
        return "it also reads a product that is computed later"
    loop = as_loop(loop, view.graph.types)
    body = body_of(loop)
    if not all(primitive(op).elementwise for op in body.ops):
        return "it does not compute element by element"
    read = body.inputs[loop.inputs.index(product)]
    same = all(body.types[name].shape == space(body) for name in (read, *body.outputs))
    return None if same else "the loop computes more elements than the product has"


def _gives_tiles(node: str, view: PlanView) -> bool:
    """Return whether a kernel computes all results of a partition tile by tile.

    The phases of transposed convolutions have another order. Depthwise convolutions pass on tiles of floats only.
    """
    anchor, *tail = view.operators(node) or (None,)
    if anchor is None or not tail or len(tail[-1].outputs) > 1 or op_def(anchor).transposed:
        return False
    if op_def(anchor).multiplies_activations:
        return True
    groups = anchor.attrs.get("groups", 1)
    is_depthwise = groups > 1 and view.graph.constants[anchor.inputs[1]].shape[0] == groups
    return op_def(anchor).multiplies_weight and (not is_depthwise or op_def(tail[0]).dequantizes)
