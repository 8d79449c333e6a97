"""Layers that read two bytes of their operand, of their weight or of both, because one byte would cost too much.

A layer of an operand x and a weight w is computed as ``layer(high(x), high(w)) + layer(low(x), high(w)) +
layer(high(x), low(w))``. Here ``high(x)`` is x in steps of its range, rounded to integers, and ``low(x)`` is what this
rounding leaves, in steps that are 256 times finer. ``high(w)`` is the weight rounded to int8, and ``low(w)`` is the
rest, with scales of its own. The product of both low bytes, which is left out, is 65,536 times smaller than that of
both high ones. All layers have int8 kernels. Their results are added in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from intaglio import numerics
from intaglio.fxgraph.graph_constants import add_constant
from intaglio.fxgraph.node_info import LayerPart, constant_path, known_type, origin, update_info
from intaglio.fxgraph.nodes import call_before, constant_node, is_constant, layer_operands, replace_node
from intaglio.ir import TensorType
from intaglio.quant.correct.corrections import LayerBytes, TwoBytes
from intaglio.quant.precision.coarse_values import listed_ratios

aten = torch.ops.aten
BYTE_VALUES = 256
"""Number of values of the low byte for one value of the high byte."""
MIDDLE = 128
"""Quantized value of 0 in the low byte, which has as many negative as positive values."""
ADDS_BYTES = "it adds the results for two bytes"
FOLLOWS_BYTES = "it follows the results for two bytes, which are float32"
"""Reasons for operators in float."""


def takes_two_bytes(layer: fx.Node) -> bool:
    """Return whether the weight of a layer is constant, so that each byte can have a weight of its own."""
    return is_constant(layer_operands(layer).weight)


@dataclass(frozen=True)
class SplitLayer:
    """A layer to split.

    Attributes:
        node: the layer.
        bytes: the bytes of its operand and its weight.
        rounded: its weight as int8 values represent it, if the weight has two bytes.
    """

    node: fx.Node
    bytes: LayerBytes
    rounded: torch.Tensor | None = None

    def split(self, module: fx.GraphModule) -> None:
        """Replace the layer by the sum of its parts, which gets its name."""
        layer, name = self.node, self.node.name
        weight, bias = layer_operands(layer)[1:]
        whole = getattr(module, str(weight.target)).detach().double()
        coarse = whole if self.rounded is None else self.rounded.double()
        step, high, low = self._bytes_of_operand()
        parts = [("high bytes", high, coarse * step, bias)]
        if low is not None:
            parts.append(("low byte of the operand", low, coarse * (step / BYTE_VALUES), None))
        if self.rounded is not None and (whole != coarse).any():
            parts.append(("low byte of the weight", high, (whole - coarse) * step, None))
        total: fx.Node | None = None
        for label, operand, values, own_bias in reversed(parts):
            constant = add_constant(module, f"{weight.target}_{label.replace(' ', '_')}", values.float())
            path = f"{constant_path(weight, str(weight.target))}, {label}"
            read = constant_node(module, constant, path)
            more = layer.args[3:]
            call = call_before(layer, known_type(layer), layer.target, operand, read, own_bias, *more, **layer.kwargs)
            update_info(call, part=self._part(label))
            if total is None:
                total = call
                continue
            total = self._call(f"sum with the {label}", "add.Tensor", total, known_type(layer), call)
            update_info(total, float_reason=ADDS_BYTES)
        assert total is not None
        update_info(total, part=self._part(""))
        replace_node(layer, total)
        total.name = name

    def _bytes_of_operand(self) -> tuple[float, fx.Node, fx.Node | None]:
        """Return the step of the high byte of the operand, the high byte, and the low byte if there are two."""
        x = layer_operands(self.node).x
        if self.bytes.operand == 1:
            return 1.0, x, None
        step, zero = numerics.affine_qparams(self.bytes.low, self.bytes.high, 0, BYTE_VALUES - 1)
        kind = known_type(x)
        scaled = self._call("operand in steps", "mul.Scalar", x, kind, 1 / step)
        upper = self._call("high byte of the operand", "round.default", scaled, kind)
        rest = self._call("rest of the operand", "sub.Tensor", scaled, kind, upper)
        lower = self._call("low byte of the operand in finer steps", "mul.Scalar", rest, kind, float(BYTE_VALUES))
        update_info(upper, fixed_parameters=(1.0, zero))
        update_info(lower, fixed_parameters=(1.0, MIDDLE))
        return step, upper, lower

    def _part(self, label: str) -> LayerPart:
        return LayerPart(self.node.name, origin(self.node).operator, label, self.rounded is not None)

    def _call(self, label: str, name: str, x: fx.Node, kind: TensorType, *args: object) -> fx.Node:
        """Insert a call of an ATen operator in front of the layer, at its place in the model."""
        operator, overload = name.split(".")
        node = call_before(self.node, kind, getattr(getattr(aten, operator), overload), x, *args)
        update_info(node, origin=replace(origin(self.node), operator=f"aten.{name}"), part=self._part(label))
        return node


def split_into_bytes(module: fx.GraphModule, layers: Iterable[SplitLayer]) -> None:
    """Replace layers of a graph by sums of the layers for each byte."""
    for layer in layers:
        layer.split(module)
    module.graph.eliminate_dead_code()
    module.recompile()


def notes_on_two_bytes(found: Mapping[fx.Node, TwoBytes]) -> tuple[str, ...]:
    """Return a note on the layers that read two bytes, with the ratios that one byte would leave."""
    if not found:
        return ()
    ratios = ((origin(node).path or node.name, operand.decibels) for node, operand in found.items())
    return (
        "first layers that read their operand in two bytes, because one byte would leave too little signal to noise in "
        f"the results of the model: {listed_ratios(ratios)}",
    )
