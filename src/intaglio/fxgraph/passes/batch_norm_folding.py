"""Folding of batch norms and other per-channel affine operators into adjacent convolutions and linear layers."""

from __future__ import annotations

import hashlib
import operator as python_operator
from collections.abc import Iterable

import torch
from torch import fx

from intaglio.fxgraph.graph_constants import add_constant
from intaglio.fxgraph.node_info import (
    constant_path,
    graph_info,
    info,
    inherit_info,
    known_type,
    origin,
    tensor_type,
    update_graph_info,
    update_info,
)
from intaglio.fxgraph.nodes import arguments, constant_node, is_constant, operator
from intaglio.fxgraph.overloads import ARITHMETIC_TARGETS
from intaglio.fxgraph.passes.constant_arithmetic import as_affine, with_channels
from intaglio.ops import ANCHORS, BY_TARGET, OPS
from intaglio.ops.products.conv import output_axis

BATCH_NORM = "aten._native_batch_norm_legit_no_training.default"

FOLDABLE = tuple(target for name in ANCHORS for target in OPS[name].targets)


def fold_batch_norm_after(module: fx.GraphModule) -> int:
    """Fold batch norms into the convolution or linear layer in front of them.

    Calls that share weight and norm share the folded constants.
    """
    folds = 0
    for norm in _batch_norms(module):
        anchor = norm.args[0]
        if operator(anchor) in FOLDABLE and len(anchor.users) == 1 and _constants(norm, anchor):
            if operator(anchor) == "aten.linear.default" and len(known_type(anchor).shape) != 2:
                continue  # batch norm normalizes axis 1; a linear layer of another rank has its channels elsewhere
            _fold_after(module, norm, anchor)
            folds += 1
    return folds


def fold_batch_norm_before(module: fx.GraphModule) -> int:
    """Fold batch norms into the convolutions without padding and linear layers behind them.

    A convolution with padding is excluded, because its zeros would be ``-shift / scale`` in front of the norm.
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


def fold_constants_after(module: fx.GraphModule) -> int:
    """Fold arithmetic with a constant per output channel into the convolution or linear layer in front of it.

    Frozen batch norms are a product and a sum of this kind, and layer scales are a product. Imported weights keep the
    integers of their file, and weights that something else reads, such as tied embeddings, would be needed twice.
    """
    folds = 0
    for node in list(module.graph.nodes):
        if operator(node) not in ARITHMETIC_TARGETS or not with_channels(module, node):
            continue
        anchor, scale, shift = as_affine(module, node)
        if not _has_outputs(anchor, scale) or not _is_own_weight(anchor):
            continue
        folded = _with_affine(module, anchor, scale.flatten(), shift.flatten())
        if all(tensor.float().isfinite().all() for tensor in folded):
            values = torch.stack(torch.broadcast_tensors(scale.flatten(), shift.flatten()))
            _replace(module, anchor, *folded, hashlib.sha256(values.numpy().tobytes()).hexdigest())
            _remove_folded(module, node, node, anchor)
            folds += 1
    return folds


def batch_norm_to_affine(module: fx.GraphModule) -> int:
    """Replace batch norms that were not folded by ``shift + x * scale`` per channel (addcmul)."""
    hits = [norm for norm in _batch_norms(module) if _constants(norm)]
    for index, norm in enumerate(hits):
        (value,) = norm.users
        shape = (1, -1) + (1,) * (len(known_type(value).shape) - 2)
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


def insert_affine(module: fx.GraphModule, node: fx.Node, gain: torch.Tensor, shift: torch.Tensor) -> fx.Node:
    """Insert ``shift + x * gain`` per channel behind `node`, let its convolutions read it, and return the new node.

    The inverse is folded into weights and biases of the convolutions. Padding is not changed: zeros then represent
    ``-shift / gain``. Every reader of `node` is a conv2d with constant weights or reads its shape.
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


def _batch_norms(module: fx.GraphModule) -> list[fx.Node]:
    """Return batch norms in evaluation mode whose only reader takes their first result."""
    norms = [node for node in module.graph.nodes if operator(node) == BATCH_NORM]
    return [n for n in norms if len(n.users) == 1 and next(iter(n.users)).target is python_operator.getitem]


def _constants(*nodes: fx.Node) -> bool:
    parameters = [value for node in nodes for value in node.args[1:5] if isinstance(value, fx.Node)]
    return all(is_constant(value) for value in parameters)


def _absorbs(user: fx.Node, value: fx.Node) -> bool:
    if operator(user) not in FOLDABLE or user.args[0] is not value or not _constants(user):
        return False
    if operator(user) == "aten.linear.default":
        return len(known_type(value).shape) == 2
    padding = arguments(user)["padding"]
    if BY_TARGET[operator(user)].roles.outputs:
        return False
    return padding == "valid" or not any(padding if padding != "same" else _same(user))


def _same(user: fx.Node) -> list[bool]:
    return [size != 1 for size in known_type(user.args[1]).shape[2:]]


def _affine(module: fx.GraphModule, norm: fx.Node) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch norm as scale and shift per channel, f64[c]."""
    weight, bias = (_tensor_or_none(module, value) for value in norm.args[1:3])
    mean, variance = (_tensor(module, value) for value in norm.args[3:5])
    scale = torch.rsqrt(variance + norm.args[6])
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    return scale, shift if bias is None else shift + bias


def _tensor(module: fx.GraphModule, value: fx.Node) -> torch.Tensor:
    tensor: torch.Tensor = getattr(module, value.target)
    return tensor.double()


def _tensor_or_none(module: fx.GraphModule, value: fx.Node | None) -> torch.Tensor | None:
    return None if value is None else _tensor(module, value)


def _fold_after(module: fx.GraphModule, norm: fx.Node, anchor: fx.Node) -> None:
    _replace(module, anchor, *_with_affine(module, anchor, *_affine(module, norm)), _label(norm, "after"))
    (value,) = norm.users
    _remove_folded(module, norm, value, anchor)
    module.graph.erase_node(norm)


def _with_affine(
    module: fx.GraphModule, anchor: fx.Node, scale: torch.Tensor, shift: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight and bias of the layer whose result is ``shift + y * scale`` per channel, f64."""
    weight, bias = _tensor(module, anchor.args[1]), _tensor_or_none(module, arguments(anchor)["bias"])
    moved = shift if bias is None else bias * scale + shift
    return weight * _along_outputs(anchor, scale, weight), moved


def _remove_folded(module: fx.GraphModule, folded: fx.Node, value: fx.Node, anchor: fx.Node) -> None:
    """Let the readers of a folded operator's result read the layer, and note the operator's module."""
    path, known = origin(folded).path, info(anchor).folded
    update_info(anchor, folded=known if path in known[-1:] else (*known, path))
    value.replace_all_uses_with(anchor)
    module.graph.erase_node(value)


def _has_outputs(anchor: fx.Node, scale: torch.Tensor) -> bool:
    """Return whether a node is a layer with constant weights and one reader, and `scale` varies along its channels."""
    if operator(anchor) not in FOLDABLE or len(anchor.users) != 1 or not _constants(anchor):
        return False
    return scale.shape[output_axis(BY_TARGET[operator(anchor)].name, scale.dim())] == scale.numel()


def _is_own_weight(anchor: fx.Node) -> bool:
    """Return whether only layers read a weight, and it was not imported as integers."""
    weight = anchor.args[1]
    return info(weight).imported is None and all(operator(user) in FOLDABLE for user in weight.users)


def _along_outputs(anchor: fx.Node, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return one factor per output channel, broadcastable to the weight."""
    ones = [1] * (weight.dim() - 2)
    if not BY_TARGET[operator(anchor)].roles.outputs:
        return scale.reshape(-1, 1, *ones)
    groups = arguments(anchor)["groups"]
    return scale.reshape(groups, -1).repeat_interleave(weight.shape[0] // groups, 0).reshape(*weight.shape[:2], *ones)


def _fold_before(module: fx.GraphModule, norm: fx.Node, user: fx.Node) -> None:
    _absorb(module, user, *_affine(module, norm), _label(norm, "before"))
    update_info(user, folded=(*info(user).folded, origin(norm).path))
    user.replace_input_with(user.args[0], norm.args[0])


def _absorb(module: fx.GraphModule, user: fx.Node, scale: torch.Tensor, shift: torch.Tensor, label: str) -> None:
    """Fold ``x * scale + shift`` per input channel into a convolution or linear layer, as if it had no padding."""
    weight, bias = _tensor(module, user.args[1]), _tensor_or_none(module, arguments(user)["bias"])
    groups = arguments(user).get("groups", 1)
    outputs, inputs = weight.shape[0] // groups, weight.shape[1]
    weight_outputs_first = [t.reshape(groups, inputs).repeat_interleave(outputs, 0) for t in (scale, shift)]
    spread = [t.reshape(weight.shape[0], inputs, *[1] * (weight.dim() - 2)) for t in weight_outputs_first]
    moved = (weight * spread[1]).flatten(1).sum(1)
    _replace(module, user, weight * spread[0], moved if bias is None else bias + moved, label)


def _label(norm: fx.Node, side: str) -> str:
    return "|".join([*_targets(norm.args[1:5]), str(norm.args[6]), side])


def _targets(values: Iterable[fx.Node | None]) -> list[str]:
    return [value.target if isinstance(value, fx.Node) else "" for value in values]


def _replace(module: fx.GraphModule, anchor: fx.Node, weight: torch.Tensor, bias: torch.Tensor, label: str) -> None:
    """Replace the anchor's weight and bias by folded ones; equal weights with equal labels share constants."""
    key = "|".join([*_targets(anchor.args[1:3]), label])
    known = graph_info(module).folded
    if key not in known:
        stem = f"{anchor.args[1].target}_folded{len(known)}"
        known = {**known, key: (stem, f"{stem}_bias")}
        update_graph_info(module, folded=known)
        module.register_buffer(stem, weight.float())
        module.register_buffer(f"{stem}_bias", bias.float())
    path = constant_path(anchor.args[1])
    with module.graph.inserting_before(anchor):
        nodes = [constant_node(module, name, p) for name, p in zip(known[key], (path, _bias_path(path)), strict=True)]
    update_info(nodes[0], imported=info(anchor.args[1]).imported)
    rest = list(anchor.args[3:])
    anchor.args = (anchor.args[0], *nodes, *rest)
    anchor.kwargs = {k: v for k, v in anchor.kwargs.items() if k != "bias"}


def _bias_path(path: str) -> str:
    return path.removesuffix("weight") + "bias"
