"""What `prepare` does to a captured graph before it looks for sites."""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable, Iterable

import torch
from torch import fx

from intaglio.fxgraph.batch_first import batch_first
from intaglio.fxgraph.canonicalize_matmul import parts_as_layers, products_as_linear, products_as_matmul
from intaglio.fxgraph.decompositions import (
    group_norms_as_layer_norms,
    numbers_as_functions,
    repeats_as_concatenations,
    rolls_as_concatenations,
    selects_as_slices,
    shuffles,
    splits_as_slices,
    stacks_as_concatenations,
)
from intaglio.fxgraph.fuse_attention import join_attention
from intaglio.fxgraph.graph_passes import fold_constants
from intaglio.fxgraph.lift_slices import lift_slices
from intaglio.fxgraph.node_info import constant_path, info, inherit_info, origin, tensor_type
from intaglio.fxgraph.nodes import arguments, constant_node, is_constant, operator
from intaglio.fxgraph.unique_names import add_constant
from intaglio.ir import TensorType
from intaglio.ops import ANCHORS, BY_TARGET, OPS
from intaglio.ops.channels import channel_axis
from intaglio.quant.qdq.qdq_constants import count_biases, store_levels
from intaglio.quant.qdq.qdq_normalize import pair_levels, separate_levels, spell_levels, write_factors
from intaglio.quant.qdq.qdq_propagation import carry_levels

BATCH_NORM = "aten._native_batch_norm_legit_no_training.default"
FOLDABLE = tuple(target for name in ANCHORS for target in OPS[name].targets)


def fold_batch_norm_after(module: fx.GraphModule) -> int:
    """A convolution or linear, then batch norm -> one of them. Calls that share weight and norm share the result."""
    folds = 0
    for norm in _batch_norms(module):
        anchor = norm.args[0]
        if operator(anchor) in FOLDABLE and len(anchor.users) == 1 and _constants(norm, anchor):
            if operator(anchor) == "aten.linear.default" and len(tensor_type(anchor).shape) != 2:
                continue  # batch norm normalises axis 1, a linear of another rank puts its channels elsewhere
            _fold_after(module, norm, anchor)
            folds += 1
    return folds


def fold_batch_norm_before(module: fx.GraphModule) -> int:
    """Batch norm, then a plain convolution without padding, or linear -> one of them.

    With padding the border sees 0 where the folded form would need -shift/scale, so such a norm stays.
    """
    folds = 0
    for norm in _batch_norms(module):
        (value,) = norm.users
        users = list(value.users)
        if users and all(_absorbs(user, value) for user in users) and _constants(norm):
            for user in users:
                _fold_before(module, norm, user)
            folds += 1
    return folds


def mean_as_pool(module: fx.GraphModule) -> int:
    """mean over rows and columns -> adaptive average pool to 1 x 1, and a view where the axes are dropped."""
    hits = [node for node in module.graph.nodes if operator(node) == "aten.mean.dim" and _over_image(node)]
    for node in hits:
        given, source = arguments(node), tensor_type(node.args[0])
        kept = TensorType((*source.shape[:2], 1, 1), source.dtype)
        with module.graph.inserting_before(node):
            pool = module.graph.call_function(torch.ops.aten.adaptive_avg_pool2d.default, (node.args[0], [1, 1]))
            inherit_info(pool, node, type=kept)
            result = pool
            if not given["keepdim"]:
                result = module.graph.call_function(torch.ops.aten.flatten.using_ints, (pool, 1, 3))
                inherit_info(result, node, type=tensor_type(node))
        node.replace_all_uses_with(result)
        module.graph.erase_node(node)
    return len(hits)


def norm_as_affine(module: fx.GraphModule) -> int:
    """A batch norm that nothing absorbed -> ``shift + x * scale`` per channel, one operator."""
    hits = [norm for norm in _batch_norms(module) if _constants(norm)]
    for index, norm in enumerate(hits):
        (value,) = norm.users
        shape = (1, -1) + (1,) * (len(tensor_type(value).shape) - 2)
        names = []
        for label, tensor in zip(("scale", "shift"), _affine(module, norm), strict=True):
            names.append(f"norm{index}_{label}")
            module.register_buffer(names[-1], tensor.float().reshape(shape))
        with module.graph.inserting_before(norm):
            scale, shift = (constant_node(module, name, f"{origin(norm).path}.{name}") for name in names)
            node = module.graph.call_function(torch.ops.aten.addcmul.default, (shift, norm.args[0], scale))
        inherit_info(node, norm, type=tensor_type(value))
        value.replace_all_uses_with(node)
        module.graph.erase_node(value)
        module.graph.erase_node(norm)
    return len(hits)


def constants_as_affine(module: fx.GraphModule) -> int:
    """Sums, differences, products and quotients with a constant for every channel -> ``shift + x * scale``."""
    hits = [node for node in module.graph.nodes if operator(node) in ARITHMETIC and _with_channels(module, node)]
    for index, node in enumerate(hits):
        x, scale, shift = _as_affine(module, node)
        names = []
        for label, tensor in (("scale", scale), ("shift", shift)):
            names.append(add_constant(module, f"channels{index}_{label}", tensor.float()))
        with module.graph.inserting_before(node):
            factor, offset = (constant_node(module, name, f"{origin(node).path}.{name}") for name in names)
            result = module.graph.call_function(torch.ops.aten.addcmul.default, (offset, x, factor))
        inherit_info(result, node, type=tensor_type(node))
        node.replace_all_uses_with(result)
        module.graph.erase_node(node)
    return len(hits)


ARITHMETIC = ("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor")


def _with_channels(module: fx.GraphModule, node: fx.Node) -> bool:
    """One operand is a constant that differs along the channels of the other; none divides by zero."""
    x, c = _value_and_constant(node)
    if x is None or tensor_type(x) != tensor_type(node) or tensor_type(x).dtype is not tensor_type(c).dtype:
        return False
    shape, tensor = tensor_type(x).shape, getattr(module, c.target)
    if len(shape) < 2 or tensor.numel() == 1 or channel_axis(tuple(tensor.shape), shape) is None:
        return False
    divides = operator(node) == "aten.div.Tensor"
    return bool(tensor.isfinite().all()) and not (divides and (node.args[0] is c or (tensor == 0).any()))


def _value_and_constant(node: fx.Node) -> tuple[fx.Node, fx.Node] | tuple[None, None]:
    a, b = node.args[:2]
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or is_constant(a) == is_constant(b):
        return None, None
    return (b, a) if is_constant(a) else (a, b)


def _as_affine(module: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, torch.Tensor, torch.Tensor]:
    """What is scaled, scale and shift, both of the rank of the result."""
    x, c = _value_and_constant(node)
    constant = getattr(module, c.target).double()
    constant = constant.reshape(*[1] * (len(tensor_type(x).shape) - constant.dim()), *constant.shape)
    one, zero, name = torch.ones_like(constant), torch.zeros_like(constant), operator(node)
    if name in ("aten.mul.Tensor", "aten.div.Tensor"):
        return x, constant if "mul" in name else 1 / constant, zero
    alpha = arguments(node)["alpha"] * (-1 if "sub" in name else 1)
    return (x, alpha * one, constant) if node.args[0] is c else (x, one, alpha * constant)


def constants_as_numbers(module: fx.GraphModule) -> int:
    """Sums, differences, products and quotients with a constant of one element -> with a number."""
    hits = [node for node in module.graph.nodes if operator(node) in ARITHMETIC and _with_number(module, node)]
    for node in hits:
        x, c = _value_and_constant(node)
        number = getattr(module, c.target).item()
        if operator(node) == "aten.sub.Tensor" and node.args[0] is c:
            node.target = torch.ops.aten.rsub.Scalar
        node.args = (x, number)
    return len(hits)


def _with_number(module: fx.GraphModule, node: fx.Node) -> bool:
    x, c = _value_and_constant(node)
    if x is None or tensor_type(x) != tensor_type(node) or getattr(module, c.target).numel() != 1:
        return False
    return node.args[0] is x or (operator(node) != "aten.div.Tensor" and arguments(node).get("alpha", 1) == 1)


LEVEL_PASSES: tuple[Callable[[fx.GraphModule], int], ...] = (
    spell_levels,
    separate_levels,
    store_levels,
    pair_levels,
    carry_levels,
    separate_levels,
    write_factors,
    count_biases,
)
"""Levels that a model has already. Spelling first, as all others read it; constants before activations, so that what is
left has no constant behind it; factors and biases last, when operators read levels directly."""

PTQ_PASSES: tuple[Callable[[fx.GraphModule], int], ...] = (
    fold_constants,
    products_as_linear,
    lift_slices,
    join_attention,
    products_as_matmul,
    fold_batch_norm_after,
    fold_batch_norm_before,
    norm_as_affine,
    group_norms_as_layer_norms,
    constants_as_affine,
    splits_as_slices,
    selects_as_slices,
    batch_first,
    parts_as_layers,
    stacks_as_concatenations,
    repeats_as_concatenations,
    rolls_as_concatenations,
    shuffles,
    mean_as_pool,
    constants_as_numbers,
    numbers_as_functions,
    *LEVEL_PASSES,
)

QAT_PASSES = tuple(step for step in PTQ_PASSES if step is not fold_batch_norm_before)
"""For training: the weights behind such a norm would have to follow its statistics, so it stays an operator."""


def _batch_norms(module: fx.GraphModule) -> list[fx.Node]:
    """Norms in evaluation mode whose only reader takes their first result."""
    norms = [node for node in module.graph.nodes if operator(node) == BATCH_NORM]
    return [n for n in norms if len(n.users) == 1 and next(iter(n.users)).target is python_operator.getitem]


def _constants(*nodes: fx.Node) -> bool:
    parameters = [value for node in nodes for value in node.args[1:5] if isinstance(value, fx.Node)]
    return all(is_constant(value) for value in parameters)


def _over_image(node: fx.Node) -> bool:
    source, given = tensor_type(node.args[0]), arguments(node)
    if source is None or len(source.shape) != 4 or given["dim"] is None or given.get("dtype") is not None:
        return False
    return sorted(axis % 4 for axis in given["dim"]) == [2, 3]


def _absorbs(user: fx.Node, value: fx.Node) -> bool:
    if operator(user) not in FOLDABLE or user.args[0] is not value or not _constants(user):
        return False
    if operator(user) == "aten.linear.default":
        return len(tensor_type(value).shape) == 2
    padding = arguments(user)["padding"]
    if BY_TARGET[operator(user)].roles.outputs:
        return False
    return padding == "valid" or not any(padding if padding != "same" else _same(user))


def _same(user: fx.Node) -> list[bool]:
    return [size != 1 for size in tensor_type(user.args[1]).shape[2:]]


def _affine(module: fx.GraphModule, norm: fx.Node) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch norm as ``x * scale + shift`` per channel, float64."""
    weight, bias, mean, variance = (_tensor(module, value) for value in norm.args[1:5])
    scale = torch.rsqrt(variance + norm.args[6])
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    return scale, shift if bias is None else shift + bias


def _tensor(module: fx.GraphModule, value: fx.Node | None) -> torch.Tensor | None:
    return None if value is None else getattr(module, value.target).double()


def _fold_after(module: fx.GraphModule, norm: fx.Node, anchor: fx.Node) -> None:
    scale, shift = _affine(module, norm)
    weight, bias = _tensor(module, anchor.args[1]), _tensor(module, arguments(anchor)["bias"])
    folded = weight * _along_outputs(anchor, scale, weight)
    moved = shift if bias is None else bias * scale + shift
    _replace(module, anchor, folded, moved, _label(norm, "after"))
    (value,) = norm.users
    value.replace_all_uses_with(anchor)
    module.graph.erase_node(value)
    module.graph.erase_node(norm)


def _along_outputs(anchor: fx.Node, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One factor per output channel, shaped to multiply the weight."""
    ones = [1] * (weight.dim() - 2)
    if not BY_TARGET[operator(anchor)].roles.outputs:
        return scale.reshape(-1, 1, *ones)
    groups = arguments(anchor)["groups"]
    return scale.reshape(groups, -1).repeat_interleave(weight.shape[0] // groups, 0).reshape(*weight.shape[:2], *ones)


def read_affine(module: fx.GraphModule, node: fx.Node, gain: torch.Tensor, shift: torch.Tensor) -> fx.Node:
    """Convolutions that read ``node`` read ``shift + node * gain`` per channel instead, which is returned.

    Their weights and biases undo it; a convolution that pads still pads with zeros, which then stand for
    ``-shift / gain``. Every reader of ``node`` is a conv2d of constant weights, or asks for its shape.
    """
    first = next(user for user in module.graph.nodes if user in node.users and info(user).dim is None)
    constants = []
    for label, tensor in (("gain", gain), ("shift", shift)):
        name = add_constant(module, f"{node.name}_{label}", tensor.float().reshape(1, -1, 1, 1))
        constants.append(constant_node(module, name, name))
    factor, offset = constants
    with module.graph.inserting_before(first):
        value = module.graph.call_function(torch.ops.aten.addcmul.default, (offset, node, factor))
    inherit_info(value, node, type=tensor_type(node))
    for user in [user for user in node.users if user is not value and info(user).dim is None]:
        _absorb(module, user, 1 / gain.double(), -shift.double() / gain.double(), f"{node.name}|image")
        user.replace_input_with(node, value)
    return value


def _fold_before(module: fx.GraphModule, norm: fx.Node, user: fx.Node) -> None:
    _absorb(module, user, *_affine(module, norm), _label(norm, "before"))
    user.replace_input_with(user.args[0], norm.args[0])


def _absorb(module: fx.GraphModule, user: fx.Node, scale: torch.Tensor, shift: torch.Tensor, label: str) -> None:
    """A convolution or linear layer of ``x * scale + shift`` per channel -> one of x, padding aside."""
    weight, bias = _tensor(module, user.args[1]), _tensor(module, arguments(user)["bias"])
    groups = arguments(user).get("groups", 1)
    outputs, inputs = weight.shape[0] // groups, weight.shape[1]
    per_output = [t.reshape(groups, inputs).repeat_interleave(outputs, 0) for t in (scale, shift)]
    spread = [t.reshape(weight.shape[0], inputs, *[1] * (weight.dim() - 2)) for t in per_output]
    moved = (weight * spread[1]).flatten(1).sum(1)
    _replace(module, user, weight * spread[0], moved if bias is None else bias + moved, label)


def _label(norm: fx.Node, side: str) -> str:
    return "|".join([*_targets(norm.args[1:5]), str(norm.args[6]), side])


def _targets(values: Iterable[fx.Node | None]) -> list[str]:
    return [value.target if isinstance(value, fx.Node) else "" for value in values]


def _replace(module: fx.GraphModule, anchor: fx.Node, weight: torch.Tensor, bias: torch.Tensor, label: str) -> None:
    """Point the anchor at folded constants; the same weight under the same label gives the same constants."""
    key = "|".join([*_targets(anchor.args[1:3]), label])
    known = module.meta.setdefault("folded", {})
    if key not in known:
        stem = f"{anchor.args[1].target}_folded{len(known)}"
        known[key] = (stem, f"{stem}_bias")
        module.register_buffer(stem, weight.float())
        module.register_buffer(f"{stem}_bias", bias.float())
    path = constant_path(anchor.args[1])
    with module.graph.inserting_before(anchor):
        nodes = [constant_node(module, name, p) for name, p in zip(known[key], (path, _bias_path(path)), strict=True)]
    rest = list(anchor.args[3:])
    anchor.args = (anchor.args[0], *nodes, *rest)
    anchor.kwargs = {k: v for k, v in anchor.kwargs.items() if k != "bias"}


def _bias_path(path: str) -> str:
    return path.removesuffix("weight") + "bias"
