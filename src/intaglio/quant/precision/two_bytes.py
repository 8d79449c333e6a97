"""Layers that read an input of the model in two bytes, because one byte would cost too much in the results.

The layer is computed as ``layer(high) + layer(low) / 256``. Here ``high`` is the operand in steps of its range, rounded
to integers, and ``low`` is 256 times what this rounding leaves. Both are exact in 8 bits, but for the last half of a
step of ``low``, so that both layers have int8 kernels. Their results are added in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from intaglio import numerics
from intaglio.fxgraph.node_info import constant_path, known_type, origin, update_info
from intaglio.fxgraph.nodes import call_before, constant_node, is_constant, layer_operands, replace_node
from intaglio.fxgraph.unique_names import add_constant
from intaglio.ir import TensorType
from intaglio.quant.correct.corrections import TwoBytes
from intaglio.quant.precision.coarse_values import listed_ratios

aten = torch.ops.aten
BYTE_VALUES = 256
"""Number of values of the low byte for one value of the high byte."""
MIDDLE = 128
"""Quantized value of 0 in the low byte, which has as many negative as positive values."""


def takes_two_bytes(layer: fx.Node) -> bool:
    """Return whether the weight of a layer is constant, so that each byte can have a weight of its own."""
    return is_constant(layer_operands(layer).weight)


def split_into_bytes(module: fx.GraphModule, found: Mapping[fx.Node, TwoBytes]) -> None:
    """Replace layers by sums of two layers, one for each byte of their operand.

    Args:
        module: the graph, which is changed.
        found: the operand of each layer.
    """
    for layer, operand in found.items():
        x, weight, bias = layer_operands(layer)
        step, zero = numerics.affine_qparams(operand.low, operand.high, 0, BYTE_VALUES - 1)
        scaled = _call(layer, "mul.Scalar", x, known_type(x), 1 / step)
        upper = _call(layer, "round.default", scaled, known_type(x))
        rest = _call(layer, "sub.Tensor", scaled, known_type(x), upper)
        lower = _call(layer, "mul.Scalar", rest, known_type(x), float(BYTE_VALUES))
        update_info(upper, fixed_parameters=(1.0, zero))
        update_info(lower, fixed_parameters=(1.0, MIDDLE))
        parts = []
        for byte, scale, own_bias in ((upper, step, bias), (lower, step / BYTE_VALUES, None)):
            label = "high" if byte is upper else "low"
            values = getattr(module, str(weight.target)).detach()
            name = add_constant(module, f"{weight.target}_{label}", (values.double() * scale).float())
            constant = constant_node(module, name, f"{constant_path(weight, str(weight.target))} of the {label} byte")
            more = layer.args[3:]
            call = call_before(layer, known_type(layer), layer.target, byte, constant, own_bias, *more, **layer.kwargs)
            parts.append(call)
        total = _call(layer, "add.Tensor", parts[1], known_type(layer), parts[0])
        update_info(total, adds_bytes=True)
        replace_node(layer, total)
    module.graph.eliminate_dead_code()
    module.recompile()


def _call(layer: fx.Node, name: str, x: fx.Node, kind: TensorType, *args: object) -> fx.Node:
    """Insert a call of an ATen operator in front of a layer, at its place in the model."""
    operator, overload = name.split(".")
    node = call_before(layer, kind, getattr(getattr(aten, operator), overload), x, *args)
    update_info(node, origin=replace(origin(layer), operator=f"aten.{name}"))
    return node


def notes_on_two_bytes(found: Mapping[fx.Node, TwoBytes]) -> tuple[str, ...]:
    """Return a note on the layers that read two bytes, with the ratios that one byte would leave."""
    if not found:
        return ()
    ratios = ((origin(node).path or node.name, operand.decibels) for node, operand in found.items())
    return (
        "first layers that read their operand in two bytes, because one byte would leave too little signal to noise in "
        f"the results of the model: {listed_ratios(ratios)}",
    )
