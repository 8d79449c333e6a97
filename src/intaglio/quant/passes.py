"""What `prepare` does to a captured graph before it looks for sites."""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable

import torch
from torch import fx

from intaglio.calls import DTYPES
from intaglio.capture.nodes import arguments, is_constant, operator, origin, tensor_type
from intaglio.ir import TensorType
from intaglio.ops import BY_TARGET

BATCH_NORM = "aten._native_batch_norm_legit_no_training.default"
FOLDABLE = ("aten.conv2d.default", "aten.conv2d.padding", "aten.linear.default")


def fold_batch_norm_after(module: fx.GraphModule) -> int:
    """conv2d or linear, then batch norm -> one conv2d or linear. Calls that share weight and norm share the result."""
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
    """Batch norm, then conv2d without padding, or linear -> one conv2d or linear.

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
            pool.meta = {"type": kept, "origin": origin(node)}
            result = pool
            if not given["keepdim"]:
                result = module.graph.call_function(torch.ops.aten.flatten.using_ints, (pool, 1, 3))
                result.meta = {"type": tensor_type(node), "origin": origin(node)}
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
            scale, shift = (_constant(module, name, f"{origin(norm).path}.{name}") for name in names)
            node = module.graph.call_function(torch.ops.aten.addcmul.default, (shift, norm.args[0], scale))
        node.meta = {"type": tensor_type(value), "origin": origin(norm)}
        value.replace_all_uses_with(node)
        module.graph.erase_node(value)
        module.graph.erase_node(norm)
    return len(hits)


def splits_as_slices(module: fx.GraphModule) -> int:
    """Parts of split, taken one by one -> slices."""
    hits = [n for n in module.graph.nodes if n.target is python_operator.getitem and _split_sizes(n.args[0])]
    for node in hits:
        source, index = node.args
        axis, sizes = arguments(source)["dim"] % len(tensor_type(source.args[0]).shape), _split_sizes(source)
        start = sum(sizes[:index])
        with module.graph.inserting_before(node):
            call = (source.args[0], axis, start, start + sizes[index])
            part = module.graph.call_function(torch.ops.aten.slice.Tensor, call)
        part.meta = {"type": tensor_type(node), "origin": origin(source)}
        node.replace_all_uses_with(part)
        module.graph.erase_node(node)
    return len(hits)


def _split_sizes(node: fx.Node) -> list[int]:
    """Sizes of the parts; nothing for another operator, or along a free dimension."""
    if operator(node) not in ("aten.split.Tensor", "aten.split_with_sizes.default"):
        return []
    given = arguments(node)
    total, step = tensor_type(node.args[0]).shape[given["dim"]], given.get("split_size", given.get("split_sizes"))
    if not isinstance(total, int):
        return []
    return list(step) if isinstance(step, (list, tuple)) else [min(step, total - at) for at in range(0, total, step)]


def shuffles(module: fx.GraphModule) -> int:
    """View as [n, groups, c / groups, h, w], swap the two, view back -> channel_shuffle."""
    count = 0
    for last in list(module.graph.nodes):
        swap = last.args[0] if operator(last) == "aten.reshape.default" else None
        if not isinstance(swap, fx.Node) or operator(swap) != "aten.transpose.int" or len(swap.users) != 1:
            continue
        first = swap.args[0]
        if operator(first) != "aten.reshape.default" or len(first.users) != 1 or sorted(swap.args[1:]) != [1, 2]:
            continue
        source, split = first.args[0], tensor_type(first).shape
        if len(split) == 5 and tensor_type(source) == tensor_type(last) and split[3:] == tensor_type(source).shape[2:]:
            with module.graph.inserting_before(last):
                node = module.graph.call_function(torch.ops.aten.channel_shuffle.default, (source, split[1]))
            node.meta = dict(last.meta)
            last.replace_all_uses_with(node)
            count += 1
    return count


def numbers_as_functions(module: fx.GraphModule) -> int:
    """``x + 3``, ``2 * x``, ``1 - x``: the overload that says a number is meant, so that it is a function of one value.

    ``x + 0`` and ``x * 1`` vanish.
    """
    hits = [node for node in module.graph.nodes if operator(node) in WITH_NUMBER and _number(node) is not None]
    for node in hits:
        number = _number(node)
        idle = (number == 0 and "add" in operator(node)) or (number == 1 and "mul" in operator(node))
        if idle and tensor_type(node) == tensor_type(node.args[0]):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
            continue
        node.target = WITH_NUMBER[operator(node)]
    return len(hits)


def _number(node: fx.Node) -> int | float | None:
    """The second operand, if it is a number; division with a rounding mode is another operator."""
    other = node.args[1] if len(node.args) > 1 else None
    return other if isinstance(other, (int, float)) and not isinstance(other, bool) else None


WITH_NUMBER = {
    "aten.add.Tensor": torch.ops.aten.add.Scalar,
    "aten.sub.Tensor": torch.ops.aten.sub.Scalar,
    "aten.mul.Tensor": torch.ops.aten.mul.Scalar,
    "aten.div.Tensor": torch.ops.aten.div.Scalar,
}


PTQ_PASSES: tuple[Callable[[fx.GraphModule], int], ...] = (
    fold_batch_norm_after,
    fold_batch_norm_before,
    norm_as_affine,
    splits_as_slices,
    shuffles,
    mean_as_pool,
    numbers_as_functions,
)


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
    record, given = BY_TARGET[operator(user)], arguments(user)
    padding = given["padding"]
    return record.name == "conv2d" and (padding == "valid" or not any(padding if padding != "same" else _same(user)))


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
    folded = weight * scale.reshape(-1, *[1] * (weight.dim() - 1))
    moved = shift if bias is None else bias * scale + shift
    _replace(module, anchor, norm, folded, moved, "after")
    (value,) = norm.users
    value.replace_all_uses_with(anchor)
    module.graph.erase_node(value)
    module.graph.erase_node(norm)


def _fold_before(module: fx.GraphModule, norm: fx.Node, user: fx.Node) -> None:
    scale, shift = _affine(module, norm)
    weight, bias = _tensor(module, user.args[1]), _tensor(module, arguments(user)["bias"])
    groups = arguments(user).get("groups", 1)
    outputs, inputs = weight.shape[0] // groups, weight.shape[1]
    per_output = [t.reshape(groups, inputs).repeat_interleave(outputs, 0) for t in (scale, shift)]
    spread = [t.reshape(weight.shape[0], inputs, *[1] * (weight.dim() - 2)) for t in per_output]
    moved = (weight * spread[1]).flatten(1).sum(1)
    _replace(module, user, norm, weight * spread[0], moved if bias is None else bias + moved, "before")
    user.replace_input_with(user.args[0], norm.args[0])


def _replace(
    module: fx.GraphModule, anchor: fx.Node, norm: fx.Node, weight: torch.Tensor, bias: torch.Tensor, side: str
) -> None:
    """Point the anchor at folded constants; the same weight and norm on the same side give the same constants."""
    parts = [value.target if isinstance(value, fx.Node) else "" for value in (*anchor.args[1:3], *norm.args[1:5])]
    key = "|".join([*parts, str(norm.args[6]), side])
    known = module.meta.setdefault("folded", {})
    if key not in known:
        stem = f"{anchor.args[1].target}_folded{len(known)}"
        known[key] = (stem, f"{stem}_bias")
        module.register_buffer(stem, weight.float())
        module.register_buffer(f"{stem}_bias", bias.float())
    path = anchor.args[1].meta.get("path", "")
    with module.graph.inserting_before(anchor):
        nodes = [_constant(module, name, p) for name, p in zip(known[key], (path, _bias_path(path)), strict=True)]
    rest = list(anchor.args[3:])
    anchor.args = (anchor.args[0], *nodes, *rest)
    anchor.kwargs = {k: v for k, v in anchor.kwargs.items() if k != "bias"}


def _bias_path(path: str) -> str:
    return path.removesuffix("weight") + "bias"


def _constant(module: fx.GraphModule, name: str, path: str) -> fx.Node:
    """One node per constant, so that readers of one tensor read one node."""
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.target == name:
            return node
    first = next(iter(module.graph.nodes))
    with module.graph.inserting_before(first):
        node = module.graph.get_attr(name)
    tensor = getattr(module, name)
    node.meta = {"type": TensorType(tuple(tensor.shape), DTYPES[tensor.dtype]), "path": path}
    return node

