"""Complex numbers as pairs of float32 tensors, as rotary position embeddings use them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import fx

from intaglio.fxgraph.graph_constants import add_constant
from intaglio.fxgraph.node_info import constant_path, known_type, tensor_type
from intaglio.fxgraph.nodes import call_before, constant_node, is_constant, operator, replace_node, tensor_nodes
from intaglio.ir import DType, TensorType

aten = torch.ops.aten
Pairs = Mapping[fx.Node, tuple[fx.Node, fx.Node]]
CREATING = ("aten.polar.default", "aten.view_as_complex.default", "aten.complex.default")
READING = ("aten.view_as_real.default", "aten.real.default", "aten.imag.default")
OF_EACH_PART = tuple(
    f"aten.{name}"
    for name in (
        *("unsqueeze.default", "squeeze.dim", "reshape.default", "view.default", "expand.default", "slice.Tensor"),
        *("select.int", "transpose.int", "permute.default", "clone.default", "neg.default"),
    )
)
"""Operators of one complex tensor that do the same to its real and its imaginary part."""
PRODUCTS = ("aten.mul.Tensor", "aten.mul.Scalar")


def decompose_complex(module: fx.GraphModule) -> int:
    """Replace complex64 values by their real and imaginary parts, if all operators that read them are known.

    Complex inputs of the model, and results of Fourier transforms, stay as they are.
    """
    made = _complex_values(module)
    users = {user for node in made for user in node.users}
    if not all(_is_known(node, made) for node in made.keys() | users):
        return 0
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
    if name in (*CREATING, *PRODUCTS):
        numbers = [value for value in node.args if not isinstance(value, fx.Node)]
        floats = all(known_type(source).dtype is DType.F32 for source in others)
        return floats and all(isinstance(number, (int, float)) for number in numbers) and not node.kwargs
    return name in (*READING, *OF_EACH_PART) and not others


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
        real, imaginary = (call_before(node, kind, aten.select.int, node.args[0], -1, place) for place in (0, 1))
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
    source, *rest = node.args
    real, imaginary = (call_before(node, kind, node.target, part, *rest, **node.kwargs) for part in pairs[source])
    return real, imaginary


def _product(node: fx.Node, pairs: Pairs, kind: TensorType) -> tuple[fx.Node, fx.Node]:
    """Insert the parts of a product of two complex tensors, or of one by a real tensor or number."""

    def of(a: fx.Node, b: fx.Node | float) -> fx.Node:
        return call_before(node, kind, node.target, a, b)

    left, right = node.args[:2]
    if left in pairs and right in pairs:
        (a, b), (c, d) = pairs[left], pairs[right]
        real = call_before(node, kind, aten.sub.Tensor, of(a, c), of(b, d))
        return real, call_before(node, kind, aten.add.Tensor, of(a, d), of(b, c))
    (a, b), factor = (pairs[left], right) if left in pairs else (pairs[right], left)
    return of(a, factor), of(b, factor)
