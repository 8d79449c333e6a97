"""Canonical forms of arithmetic with a constant: per-channel factor and offset, or a number."""

from __future__ import annotations

import torch
from torch import fx

from intaglio.fxgraph.graph_constants import add_constant
from intaglio.fxgraph.node_info import inherit_info, known_type, origin, tensor_type
from intaglio.fxgraph.nodes import arguments, constant_node, is_constant, operator
from intaglio.fxgraph.overloads import ARITHMETIC_TARGETS
from intaglio.ir import DType
from intaglio.ops.channels import channel_axis

POWER_TARGET = "aten.pow.Tensor_Tensor"


def channel_constants_to_affine(module: fx.GraphModule) -> int:
    """Replace arithmetic with a constant per channel by ``shift + x * scale`` (addcmul).

    A product and a sum of one operator, such as the factors and offsets of a group norm, become one addcmul.
    """
    hits = [node for node in module.graph.nodes if operator(node) in ARITHMETIC_TARGETS and with_channels(module, node)]
    affine: dict[fx.Node, tuple[fx.Node, torch.Tensor, torch.Tensor]] = {}
    for node in hits:
        x, scale, shift = as_affine(module, node)
        if x in affine and _are_one_operator(x, node):
            x, scale, shift = _composed(affine.pop(x), scale, shift)
        affine[node] = x, scale, shift
    results: dict[fx.Node, fx.Node] = {}
    for index, (node, (x, scale, shift)) in enumerate(affine.items()):
        names = []
        for label, tensor in (("scale", scale), ("shift", shift)):
            names.append(add_constant(module, f"channels{index}_{label}", tensor.float()))
        with module.graph.inserting_before(node):
            factor, offset = (constant_node(module, name, f"{origin(node).path}.{name}") for name in names)
            operands = offset, results.get(x, x), factor
            results[node] = module.graph.call_function(torch.ops.aten.addcmul.default, operands)
        inherit_info(results[node], node, type=tensor_type(node))
        node.replace_all_uses_with(results[node])
    for node in reversed(hits):
        module.graph.erase_node(node)
    return len(hits)


def _are_one_operator(first: fx.Node, second: fx.Node) -> bool:
    """Return whether two nodes were decomposed from one call of an operator, and only the second reads the first."""
    same = all(getattr(origin(first), key) == getattr(origin(second), key) for key in ("path", "operator", "source"))
    composite = origin(second).operator not in ("", operator(second))
    return same and composite and len(first.users) == 1


def _composed(
    inner: tuple[fx.Node, torch.Tensor, torch.Tensor], scale: torch.Tensor, shift: torch.Tensor
) -> tuple[fx.Node, torch.Tensor, torch.Tensor]:
    """Return operand, scale and shift of two functions ``shift + x * scale``, applied one after the other."""
    x, inner_scale, inner_shift = inner
    return x, inner_scale * scale, inner_shift * scale + shift


def with_channels(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether one operand is a finite float32 constant per channel of the other, a float32 tensor, and no
    division by zero can occur."""
    if not _takes_constant(node):
        return False
    x, c = value_and_constant(node)
    if tensor_type(x) != tensor_type(node) or {known_type(x).dtype, known_type(c).dtype} != {DType.F32}:
        return False
    shape, tensor = known_type(x).shape, getattr(module, c.target)
    if len(shape) < 2 or tensor.numel() == 1 or channel_axis(tuple(tensor.shape), shape) is None:
        return False
    divides = operator(node) == "aten.div.Tensor"
    return bool(tensor.isfinite().all()) and not (divides and (node.args[0] is c or (tensor == 0).any()))


def _takes_constant(node: fx.Node) -> bool:
    """Return whether the operands are two tensors, exactly one of them constant."""
    a, b = node.args[:2]
    return isinstance(a, fx.Node) and isinstance(b, fx.Node) and is_constant(a) != is_constant(b)


def value_and_constant(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the computed operand and the constant operand of an operator with one of each."""
    a, b = node.args[:2]
    return (b, a) if is_constant(a) else (a, b)


def as_affine(module: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, torch.Tensor, torch.Tensor]:
    """Return the operand that is scaled, and scale and shift with the rank of the result."""
    x, c = value_and_constant(node)
    constant = getattr(module, c.target).double()
    constant = constant.reshape(*[1] * (len(known_type(x).shape) - constant.dim()), *constant.shape)
    one, zero, name = torch.ones_like(constant), torch.zeros_like(constant), operator(node)
    if name in ("aten.mul.Tensor", "aten.div.Tensor"):
        return x, constant if "mul" in name else 1 / constant, zero
    alpha = arguments(node)["alpha"] * (-1 if "sub" in name else 1)
    return (x, alpha * one, constant) if node.args[0] is c else (x, one, alpha * constant)


def scalar_constants_to_numbers(module: fx.GraphModule) -> int:
    """Replace constants with one element in arithmetic, and as exponents, by numbers."""
    named = (node for node in module.graph.nodes if operator(node) in (*ARITHMETIC_TARGETS, POWER_TARGET))
    hits = [node for node in named if _with_number(module, node)]
    for node in hits:
        x, c = value_and_constant(node)
        number = getattr(module, c.target).item()
        if operator(node) == "aten.sub.Tensor" and node.args[0] is c:
            node.target = torch.ops.aten.rsub.Scalar
        elif operator(node) == POWER_TARGET:
            node.target = torch.ops.aten.pow.Tensor_Scalar
        node.args = (x, number)
    return len(hits)


def _with_number(module: fx.GraphModule, node: fx.Node) -> bool:
    if not _takes_constant(node):
        return False
    x, c = value_and_constant(node)
    if tensor_type(x) != tensor_type(node) or getattr(module, c.target).numel() != 1:
        return False
    commutes = operator(node) not in ("aten.div.Tensor", POWER_TARGET)
    return node.args[0] is x or (commutes and arguments(node).get("alpha", 1) == 1)
