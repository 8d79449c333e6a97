"""Complex numbers as pairs of float32 tensors, as rotary position embeddings use them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeAlias

import torch
from torch import fx

from intaglio.fxgraph.graph_constants import add_constant
from intaglio.fxgraph.node_info import constant_path, known_type, tensor_type
from intaglio.fxgraph.nodes import call_before, constant_node, is_constant, operator, replace_node, tensor_nodes
from intaglio.ir import DType, TensorType

aten = torch.ops.aten
Pairs = Mapping[fx.Node, tuple[fx.Node, fx.Node]]
Operand: TypeAlias = fx.Node | float
CREATING = ("aten.polar.default", "aten.view_as_complex.default", "aten.complex.default")
READING = ("aten.view_as_real.default", "aten.real.default", "aten.imag.default")
OF_EACH_PART = tuple(
    f"aten.{name}"
    for name in (
        *("unsqueeze.default", "squeeze.dim", "reshape.default", "view.default", "expand.default", "slice.Tensor"),
        *("select.int", "transpose.int", "permute.default", "clone.default", "neg.default", "sum.dim_IntList"),
        *("mean.dim", "resolve_conj.default"),
    )
)
"""Operators of one complex tensor that do the same to its real and its imaginary part."""
PRODUCTS = ("aten.mul.Tensor", "aten.mul.Scalar")
COMPLEX_SUMS = ("aten.add.Tensor", "aten.add.Scalar", "aten.sub.Tensor", "aten.sub.Scalar", "aten.rsub.Scalar")
QUOTIENTS = ("aten.div.Tensor", "aten.div.Scalar")
JOINED = ("aten.cat.default", "aten.stack.default")
CONJUGATES = ("aten._conj.default", "aten.conj.default", "aten.conj_physical.default")


def decompose_complex(module: fx.GraphModule) -> int:
    """Replace complex64 values by their real and imaginary parts, if all operators that read them are known.

    Complex inputs of the model, and results of Fourier transforms, stay as they are.
    """
    made = _complex_values(module)
    users = {user for node in made for user in node.users}
    if not all(_is_known(node, made) for node in made.keys() | users):
        return _views_to_complex(module)
    pairs: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for node in made:
        pairs[node] = _parts_of_constant(module, node) if is_constant(node) else _parts(node, pairs)
    for node in users - made.keys():
        joined = list(pairs[node.args[0]])
        if operator(node) == "aten.view_as_real.default":
            replace_node(node, call_before(node, known_type(node), aten.stack.default, joined, -1))
        else:
            replace_node(node, joined[operator(node) == "aten.imag.default"])
    return len(made)


def _views_to_complex(module: fx.GraphModule) -> int:
    """Replace `view_as_complex`, whose operand must be contiguous, by an operator that takes any strides.

    Programs return images in channels-last format to the operators that PyTorch computes.
    """
    hits = [node for node in module.graph.nodes if operator(node) == "aten.view_as_complex.default"]
    for node in hits:
        kind = TensorType(known_type(node).shape, known_type(node.args[0]).dtype)
        replace_node(node, call_before(node, known_type(node), aten.complex.default, *_halves(node, kind)))
    return len(hits)


def _halves(node: fx.Node, kind: TensorType) -> list[fx.Node]:
    """Insert the two values of each pair of a last axis in front of a node that reads them as a complex number."""
    return [call_before(node, kind, aten.select.int, node.args[0], -1, place) for place in (0, 1)]


def _complex_values(module: fx.GraphModule) -> dict[fx.Node, None]:
    """Return complex constants, what is computed from pairs of floats, and what is computed from these, in order."""
    made: dict[fx.Node, None] = {}
    for node in module.graph.nodes:
        if is_constant(node):
            tensor = getattr(module, str(node.target), None)
            is_complex = isinstance(tensor, torch.Tensor) and tensor.is_complex()
        else:
            kind = tensor_type(node)
            reads = any(source in made for source in node.all_input_nodes)
            is_complex = kind is not None and kind.dtype is DType.OTHER and (operator(node) in CREATING or reads)
        if is_complex:
            made[node] = None
    return made


def _is_known(node: fx.Node, made: Collection[fx.Node]) -> bool:
    """Return whether an operator that computes or reads a complex tensor has a form on float32 parts."""
    name = operator(node)
    if is_constant(node):
        return bool(getattr(node.graph.owning_module, str(node.target)).dtype is torch.complex64)
    others = [source for source in tensor_nodes((node.args, node.kwargs)) if source not in made]
    if name in (*CREATING, *PRODUCTS, *COMPLEX_SUMS, *QUOTIENTS):
        return _is_known_arithmetic(node, made, others)
    return name in (*READING, *OF_EACH_PART, *CONJUGATES, *JOINED) and not others and "dtype" not in node.kwargs


def _is_known_arithmetic(node: fx.Node, made: Collection[fx.Node], others: Collection[fx.Node]) -> bool:
    """Return whether an operator of complex tensors, of real tensors and of numbers has a form on float32 parts."""
    name = operator(node)
    numbers = [value for value in node.args if not isinstance(value, fx.Node)]
    if node.kwargs or len(node.args) > 2 or any(known_type(source).dtype is not DType.F32 for source in others):
        return False
    if name in QUOTIENTS:
        divisor = node.args[1]
        return node.args[0] in made and divisor not in made and not isinstance(divisor, complex)
    if (
        name in COMPLEX_SUMS
        and others
        and any(known_type(x).shape != known_type(node).shape for x in node.args if x in made)
    ):
        return False  # the imaginary part would have to be broadcast to the real tensor
    return all(isinstance(number, (int, float, complex)) for number in numbers)


def _parts_of_constant(module: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    value, found = getattr(module, str(node.target)), []
    for label, part in (("real", value.real), ("imag", value.imag)):
        name = add_constant(module, f"{node.target}_{label}", part.contiguous())
        found.append(constant_node(module, name, constant_path(node, name)))
    return found[0], found[1]


def _parts(node: fx.Node, pairs: Pairs) -> tuple[fx.Node, fx.Node]:
    """Insert the real and the imaginary part of a node in front of it."""
    kind = TensorType(known_type(node).shape, DType.F32)
    name = operator(node)
    if name == "aten.complex.default":
        return node.args[0], node.args[1]
    if name == "aten.view_as_complex.default":
        real, imaginary = _halves(node, kind)
        return real, imaginary
    if name == "aten.polar.default":
        size, angle = node.args
        real, imaginary = (
            call_before(node, kind, aten.mul.Tensor, size, call_before(node, known_type(angle), function, angle))
            for function in (aten.cos.default, aten.sin.default)
        )
        return real, imaginary
    if name in PRODUCTS:
        return _product(node, pairs, kind)
    if name in COMPLEX_SUMS:
        return _sum(node, pairs, kind)
    source, *rest = node.args
    if name in CONJUGATES:
        return pairs[source][0], call_before(node, kind, aten.neg.default, pairs[source][1])
    operands = zip(*(pairs[part] for part in source), strict=True) if name in JOINED else pairs[source]
    real, imaginary = (call_before(node, kind, node.target, part, *rest, **node.kwargs) for part in operands)
    return real, imaginary


def _product(node: fx.Node, pairs: Pairs, kind: TensorType) -> tuple[fx.Node, fx.Node]:
    """Insert the parts of a product of two complex tensors, or of one by a real tensor or number."""

    def of(a: fx.Node, b: Operand) -> fx.Node:
        return call_before(node, kind, node.target, a, b)

    left, right = node.args[:2]
    if left not in pairs:
        left, right = right, left
    (a, b), (c, d) = pairs[left], _pair(right, pairs)
    if d is None:
        return of(a, c), of(b, c)
    real = call_before(node, kind, aten.sub.Tensor, of(a, c), of(b, d))
    return real, call_before(node, kind, aten.add.Tensor, of(a, d), of(b, c))


def _sum(node: fx.Node, pairs: Pairs, kind: TensorType) -> tuple[fx.Node, fx.Node]:
    """Insert the parts of a sum or difference of two complex tensors, or of one and a real tensor or number."""
    left, right = (_pair(value, pairs) for value in node.args[:2])
    real = call_before(node, kind, node.target, left[0], right[0])
    if left[1] is not None and right[1] is not None:
        return real, call_before(node, kind, node.target, left[1], right[1])
    # One operand is real: the imaginary part is that of the other one, or its negative where that is subtracted.
    imaginary, name = right[1] if left[1] is None else left[1], operator(node)
    subtracted = name == "aten.rsub.Scalar" if right[1] is None else name.startswith("aten.sub.")
    return real, call_before(node, kind, aten.neg.default, imaginary) if subtracted else imaginary


def _pair(value: Operand | complex, pairs: Pairs) -> tuple[Operand, Operand | None]:
    """Return the real and the imaginary part of an operand; ``None`` for that of a real tensor or number."""
    if isinstance(value, fx.Node):
        return pairs.get(value, (value, None))
    return (value.real, value.imag) if isinstance(value, complex) else (value, None)
