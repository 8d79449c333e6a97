"""Decomposition of norms, statistics, extrema and pooling of whole images into operators with a record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from intaglio.fxgraph.graph_constants import add_constant
from intaglio.fxgraph.node_info import constant_path, inherit_info, known_type, tensor_type
from intaglio.fxgraph.nodes import (
    arguments,
    call_before,
    constant_node,
    is_constant,
    operator,
    replace_node,
    reshape_before,
    size_along,
)
from intaglio.fxgraph.passes.decompositions.movement import call_like
from intaglio.ir import DType, Shape, TensorType, numel
from intaglio.ops.opdef import numbers

aten = torch.ops.aten
EXTREMA = {
    "aten.max.dim": (aten.amax.default, aten.argmax.default),
    "aten.min.dim": (aten.amin.default, aten.argmin.default),
}
"""Operators that compute the values and the places of extrema along an axis."""
LARGEST_FLOAT = float(np.finfo(np.float32).max)


def decompose_group_norm(module: fx.GraphModule) -> int:
    """Decompose group_norm into a layer norm with groups as rows, and a factor and offset per channel.

    Instance norm by the statistics of its input has one group per channel.
    """
    norms = (node for node in module.graph.nodes if operator(node) in GROUP_NORMS)
    hits = [node for node in norms if _groups_are_rows(node)]
    for node in hits:
        given, shape = _group_arguments(node), known_type(node).shape
        rows = (shape[0], given["num_groups"], shape[1] // given["num_groups"] * numel(shape[2:]))
        sizes = [size_along(node, node.args[0], axis) for axis in range(len(shape))]
        x = call_like(node, rows, aten.reshape.default, node.args[0], [sizes[0], rows[1], -1])
        x = call_like(node, rows, aten.layer_norm.default, x, [size_along(node, x, 2)], None, None, given["eps"])
        x = call_like(node, shape, aten.reshape.default, x, sizes)
        for target, value in ((aten.mul.Tensor, given["weight"]), (aten.add.Tensor, given["bias"])):
            if value is not None:
                name = f"{value.target}_channels"
                if not hasattr(module, name):
                    each = getattr(module, str(value.target)).reshape(-1, *[1] * (len(shape) - 2))
                    module.register_buffer(name, each)
                x = call_like(node, shape, target, x, constant_node(module, name, constant_path(value, name)))
        replace_node(node, x)
    return len(hits)


GROUP_NORMS = ("aten.group_norm.default", "aten.instance_norm.default")


def _group_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a group norm, or those of an instance norm as a group norm."""
    return {"num_groups": known_type(node).shape[1], **arguments(node)}


def _groups_are_rows(node: fx.Node) -> bool:
    """Return whether the number of channels is static, and weight and bias are constant."""
    given, kind = _group_arguments(node), tensor_type(node)
    constants = [given[name] for name in ("weight", "bias") if given[name] is not None]
    if kind is None or not isinstance(kind.shape[1], int):
        return False
    return bool(given.get("use_input_stats", True)) and all(map(is_constant, constants))


def join_axes_of_layer_norm(module: fx.GraphModule) -> int:
    """Replace a layer norm over several axes by one over the last axis of rows that hold all of their values."""
    norms = (node for node in module.graph.nodes if operator(node) == "aten.layer_norm.default")
    hits = [node for node in norms if _has_several_axes(node)]
    for node in hits:
        given, shape = arguments(node), known_type(node).shape
        lead = len(shape) - len(given["normalized_shape"])
        size = numel(shape[lead:])
        parameters = []
        for value in (given["weight"], given["bias"]):
            if value is not None:
                row = getattr(module, str(value.target)).flatten()
                name = add_constant(module, f"{value.target}_row", row)
                with module.graph.inserting_before(node):
                    value = constant_node(module, name, constant_path(value, name))
            parameters.append(value)
        rows = reshape_before(node, node.args[0], (*shape[:lead], size))
        normed = call_like(
            node, (*shape[:lead], size), aten.layer_norm.default, rows, [size], *parameters, given["eps"]
        )
        replace_node(node, reshape_before(node, normed, shape))
    return len(hits)


def _has_several_axes(node: fx.Node) -> bool:
    """Return whether a layer norm is over several axes of static sizes, with constant parameters."""
    given, kind = arguments(node), tensor_type(node)
    constants = [given[name] for name in ("weight", "bias") if given[name] is not None]
    sizes = given["normalized_shape"]
    if kind is None or len(sizes) < 2 or not all(isinstance(size, int) for size in sizes):
        return False
    return kind.shape[len(kind.shape) - len(sizes) :] == tuple(sizes) and all(map(is_constant, constants))


def decompose_variance(module: fx.GraphModule) -> int:
    """Replace variances of several last axes by those of one axis, and `var_mean` by a variance and a mean."""
    hits = 0
    for node in [node for node in module.graph.nodes if _computes_variance(node)]:
        given, axes = arguments(node), _axes_of(node)
        if operator(node) in VARIANCES_WITH_MEANS:
            target = VARIANCES_WITH_MEANS[operator(node)]
            for user in list(node.users):
                kind = known_type(user)
                if user.args[1]:
                    found = call_before(user, kind, aten.mean.dim, node.args[0], axes, given["keepdim"])
                else:
                    correction = {"correction": _correction_of(given), "keepdim": given["keepdim"]}
                    found = call_before(user, kind, target, node.args[0], axes, **correction)
                replace_node(user, found)
                if not user.args[1]:
                    _join_axes(found)
            module.graph.erase_node(node)
            hits += 1
        else:
            hits += _join_axes(node)
    return hits


VARIANCES_WITH_MEANS = {
    f"aten.{name}_mean.{overload}": target
    for name, target in (("var", aten.var.correction), ("std", aten.std.correction))
    for overload in ("dim", "correction")
}
VARIANCES = tuple(f"aten.{name}.{overload}" for name in ("var", "std") for overload in ("dim", "correction"))


def _computes_variance(node: fx.Node) -> bool:
    name = operator(node)
    found = name in VARIANCES_WITH_MEANS or (name in VARIANCES and len(_axes_of(node)) > 1)
    return found and known_type(node.args[0]).dtype is DType.F32


def _axes_of(node: fx.Node) -> list[int]:
    """Return the axes of a reduction in order; all of them if it names none."""
    rank, axes = len(known_type(node.args[0]).shape), arguments(node)["dim"]
    return sorted(axis % rank for axis in (axes or range(rank)))


def _correction_of(given: dict[str, Any]) -> Any:
    """Return the correction of a variance, which older overloads call ``unbiased``."""
    if "unbiased" in given:
        return int(given["unbiased"])
    return 1 if given["correction"] is None else given["correction"]


def _join_axes(node: fx.Node) -> bool:
    """Let a variance of several last axes of static sizes be one of rows that hold all of their values."""
    given, axes, shape = arguments(node), _axes_of(node), known_type(node.args[0]).shape
    joined = shape[axes[0] :]
    if len(axes) < 2 or axes != list(range(axes[0], len(shape))) or not all(isinstance(size, int) for size in joined):
        return False
    rows = reshape_before(node, node.args[0], (*shape[: axes[0]], numel(joined)))
    call = {"correction": _correction_of(given), "keepdim": False}
    target = aten.var.correction if operator(node).startswith("aten.var") else aten.std.correction
    found = call_before(node, TensorType(shape[: axes[0]], DType.F32), target, rows, [axes[0]], **call)
    replace_node(node, reshape_before(node, found, known_type(node).shape) if given["keepdim"] else found)
    return True


def split_extrema(module: fx.GraphModule) -> int:
    """Replace ``max`` and ``min`` along an axis by their values and their places, as far as these are read."""
    hits = [node for node in module.graph.nodes if operator(node) in EXTREMA]
    for node in hits:
        given = arguments(node)
        for user in list(node.users):
            target = EXTREMA[operator(node)][user.args[1]]
            axes = given["dim"] if user.args[1] else [given["dim"]]
            replace_node(user, call_before(user, known_type(user), target, node.args[0], axes, given["keepdim"]))
        module.graph.erase_node(node)
    return len(hits)


def decompose_logsumexp(module: fx.GraphModule) -> int:
    """Replace the logarithm of a sum of exponentials by its operators, with the maximum subtracted first."""
    hits = [node for node in module.graph.nodes if operator(node) == "aten.logsumexp.default"]
    hits = [node for node in hits if known_type(node.args[0]).dtype is DType.F32]
    for node in hits:
        value, axes, shape = node.args[0], _axes_of(node), known_type(node.args[0]).shape
        kept: Shape = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
        most = call_like(node, kept, aten.amax.default, value, axes, True)
        most = call_like(node, kept, aten.clamp.default, most, -LARGEST_FLOAT, LARGEST_FLOAT)
        powers = call_like(node, shape, aten.exp.default, call_like(node, shape, aten.sub.Tensor, value, most))
        total = call_like(node, kept, aten.sum.dim_IntList, powers, axes, True)
        found = call_like(node, kept, aten.add.Tensor, call_like(node, kept, aten.log.default, total), most)
        for axis in reversed([] if arguments(node)["keepdim"] else axes):
            kept = (*kept[:axis], *kept[axis + 1 :])
            found = call_like(node, kept, aten.squeeze.dim, found, axis)
        replace_node(node, found)
    return len(hits)


def mean_to_adaptive_avg_pool(module: fx.GraphModule) -> int:
    """Replace the mean over height and width by adaptive average pooling, with a flatten if the axes are dropped."""
    hits = [node for node in module.graph.nodes if operator(node) == "aten.mean.dim" and _reduces_image(node)]
    for node in hits:
        given, source = arguments(node), known_type(node.args[0])
        kept = TensorType((*source.shape[:2], 1, 1), source.dtype)
        with module.graph.inserting_before(node):
            pool = module.graph.call_function(torch.ops.aten.adaptive_avg_pool2d.default, (node.args[0], [1, 1]))
            inherit_info(pool, node, type=kept)
            result = pool
            if not given["keepdim"]:
                result = module.graph.call_function(torch.ops.aten.flatten.using_ints, (pool, 1, 3))
                inherit_info(result, node, type=tensor_type(node))
        replace_node(node, result)
    return len(hits)


def _reduces_image(node: fx.Node) -> bool:
    source, given = tensor_type(node.args[0]), arguments(node)
    if source is None or len(source.shape) != 4 or given["dim"] is None or given.get("dtype") is not None:
        return False
    return sorted(axis % 4 for axis in given["dim"]) == [2, 3]


ADAPTIVE_MAX_POOLS = {f"aten.adaptive_max_pool{axes}d.default": axes for axes in (1, 2, 3)}
MAX_POOL_TARGETS = {1: aten.max_pool1d.default, 2: aten.max_pool2d.default, 3: aten.max_pool3d.default}


def decompose_adaptive_max_pool(module: fx.GraphModule) -> int:
    """Replace adaptive max pooling whose windows have one size by max pooling, and that of whole images of a free size
    by their maximum."""
    hits = 0
    for node in [node for node in module.graph.nodes if operator(node) in ADAPTIVE_MAX_POOLS]:
        axes, kind = ADAPTIVE_MAX_POOLS[operator(node)], tensor_type(node.args[0])
        values = [user for user in node.users if user.args[1] == 0]
        if kind is None or len(values) < len(node.users) or len(kind.shape) != axes + 2:
            continue
        results = numbers(arguments(node)["output_size"], axes)
        windows = _equal_windows(kind.shape[2:], results)
        if windows is None and set(results) != {1}:
            continue
        for user in values:
            shape = known_type(user).shape
            if windows is not None:
                found = call_like(user, shape, MAX_POOL_TARGETS[axes], node.args[0], windows, windows)
            else:
                found = call_like(user, shape, aten.amax.default, node.args[0], list(range(2, axes + 2)), True)
            replace_node(user, found)
        module.graph.erase_node(node)
        hits += 1
    return hits


def _equal_windows(sizes: Shape, results: Sequence[int]) -> list[int] | None:
    """Return the size of the windows of adaptive pooling along each axis; ``None`` if it is free or differs."""
    windows = []
    for size, count in zip(sizes, results, strict=True):
        if not isinstance(size, int) or not count or size % count:
            return None
        windows.append(size // count)
    return windows
