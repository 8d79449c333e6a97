"""Canonical forms of matrix products: linear layers, matmul, and split projections."""

from __future__ import annotations

import math

import torch
from torch import fx

from intaglio.fxgraph.graph_constants import in_file
from intaglio.fxgraph.node_info import constant_path, info, inherit_info, known_type
from intaglio.fxgraph.nodes import (
    arguments,
    call_before,
    constant_node,
    is_constant,
    operator,
    replace_node,
    reshape_before,
    resolve_dims,
)
from intaglio.ir import DType, Shape, TensorType, evaluate, numel, symbols_of

aten = torch.ops.aten
VIEW_NAMES = ("reshape", "view", "unsqueeze", "squeeze", "transpose", "permute", "slice", "select")
"""Operators that may be between a linear layer and its slices."""
SAMPLE_SIZES = tuple(7 << power for power in range(10))
"""Sizes of dynamic dimensions in sample tensors of data movement; the first that leaves elements is used.

Strides in front of a layer shorten its input.
"""


LINEAR_LAYER = "aten.linear.default"
MATMUL, ATTENTION = "aten.matmul.default", "aten.scaled_dot_product_attention.default"
BATCHED_OPERANDS = {MATMUL: 2, ATTENTION: 3}
"""Number of operands that have batch axes, by operator."""
KERNEL_AXES = 4
"""Largest number of axes of a product's operands."""
CONSTANT_PRODUCTS = ("aten.addmm.default", "aten.mm.default", "aten.mv.default", "aten.bmm.default", MATMUL)


def constant_matmul_to_linear(module: fx.GraphModule) -> int:
    """Replace products with a constant matrix by linear layers with the transposed matrix as weight.

    A constant vector is a matrix with one column, as in the expectation of a distribution over numbers.
    """
    count = 0
    for node in list(module.graph.nodes):
        found = _matrices(node)  # match here, because an earlier iteration may have replaced the operand
        if found is None:
            continue
        (x, matrix, bias), count = found, count + 1
        name = f"{matrix.target}_transposed"
        if not hasattr(module, name):
            values = getattr(module, str(matrix.target))
            values = values[:, None] if values.dim() == 1 else values.reshape(values.shape[-2:])
            module.register_buffer(name, in_file(values.t()))
        weight = constant_node(module, name, constant_path(matrix, name))
        kind, given = known_type(node), [bias] if bias else []
        if len(known_type(matrix).shape) == 1:
            column = TensorType((*kind.shape, 1), kind.dtype)
            linear = call_before(node, column, aten.linear.default, x, weight, *given)
            replace_node(node, call_before(node, kind, aten.squeeze.dim, linear, -1))
        else:
            replace_node(node, call_before(node, kind, aten.linear.default, x, weight, *given))
    return count


def constant_first_to_linear(module: fx.GraphModule) -> int:
    """Replace products whose first operand is a constant matrix by a linear layer between two transposes."""
    hits = [node for node in module.graph.nodes if _begins_with_matrix(node)]
    for node in hits:
        matrix, x = node.args[:2]
        (depth, columns), rows = known_type(x).shape[-2:], known_type(matrix).shape[-2]
        outer, kind = known_type(x).shape[:-2], known_type(node).dtype
        name = f"{matrix.target}_rows"
        if not hasattr(module, name):
            values = getattr(module, str(matrix.target))
            module.register_buffer(name, values.reshape(values.shape[-2:]).contiguous())
        weight = constant_node(module, name, constant_path(matrix, name))
        x = call_before(node, TensorType((*outer, columns, depth), kind), aten.transpose.int, x, -2, -1)
        x = call_before(node, TensorType((*outer, columns, rows), kind), aten.linear.default, x, weight)
        replace_node(node, call_before(node, known_type(node), aten.transpose.int, x, -2, -1))
    return len(hits)


def _begins_with_matrix(node: fx.Node) -> bool:
    """Return whether a node multiplies one constant matrix by a computed one of float32, or by each of a batch."""
    if operator(node) not in ("aten.mm.default", "aten.bmm.default", "aten.matmul.default"):
        return False
    matrix, x = node.args[:2]
    if not is_constant(matrix) or is_constant(x) or known_type(x).dtype is not DType.F32:
        return False
    shape, rank = known_type(matrix).shape, len(known_type(x).shape)
    return 2 <= len(shape) <= rank and all(size == 1 for size in shape[:-2])


def constant_bmm_to_convolution(module: fx.GraphModule) -> int:
    """Replace batched products with constant matrices by a convolution with one group for each matrix.

    The matrices then are weights: they are packed once, and each of their outputs has a scale.
    """
    hits = [node for node in module.graph.nodes if _multiplies_constants(node)]
    for node in hits:
        last = is_constant(node.args[1])
        x, matrices = node.args[:2] if last else reversed(node.args[:2])
        kind, result = known_type(x), known_type(node)
        (groups, depth), free = known_type(matrices).shape[:2], kind.shape[1 if last else 2]
        outputs = known_type(matrices).shape[2] if last else depth
        name = f"{matrices.target}_{'columns' if last else 'rows'}"
        if not hasattr(module, name):
            values = getattr(module, str(matrices.target))
            values = values.transpose(1, 2) if last else values
            module.register_buffer(name, values.reshape(-1, values.shape[2], 1).contiguous())
        weight = constant_node(module, name, constant_path(matrices, name))
        if last:
            x = call_before(node, TensorType((groups, kind.shape[2], free), kind.dtype), aten.transpose.int, x, 1, 2)
        x = reshape_before(node, x, (1, numel(known_type(x).shape[:2]), free))
        made = TensorType((1, groups * outputs, free), kind.dtype)
        x = call_before(node, made, aten.conv1d.default, x, weight, None, [1], [0], [1], groups)
        x = reshape_before(node, x, (groups, outputs, free))
        replace_node(node, call_before(node, result, aten.transpose.int, x, 1, 2) if last else x)
    return len(hits)


def conv_tbc_to_convolution(module: fx.GraphModule) -> int:
    """Replace ``torch.conv_tbc``, whose axes are time, batch and channels, by a one-dimensional convolution.

    Its weight has the axes taps, input channels and output channels.
    """
    hits = [node for node in module.graph.nodes if operator(node) == "aten.conv_tbc.default"]
    for node in hits:
        given, kind = arguments(node), known_type(node)
        (steps, batch, channels), (taps, _, outputs) = (known_type(given[name]).shape for name in ("self", "weight"))
        image, filters = (
            TensorType((batch, channels, steps), kind.dtype),
            TensorType((outputs, channels, taps), kind.dtype),
        )
        x = call_before(node, image, aten.permute.default, given["self"], [1, 2, 0])
        weight = call_before(node, filters, aten.permute.default, given["weight"], [2, 1, 0])
        result = TensorType((batch, outputs, kind.shape[0]), kind.dtype)
        x = call_before(node, result, aten.conv1d.default, x, weight, given["bias"], [1], [given["pad"]])
        replace_node(node, call_before(node, kind, aten.permute.default, x, [2, 0, 1]))
    return len(hits)


def vector_weight_to_matrix(module: fx.GraphModule) -> int:
    """Replace layers ``F.linear(x, vector)`` by layers with one output channel."""
    hits = [n for n in module.graph.nodes if operator(n) == LINEAR_LAYER and len(known_type(n.args[1]).shape) == 1]
    for node in hits:
        x, weight, bias = (arguments(node)[name] for name in ("input", "weight", "bias"))
        kind, (depth,) = known_type(node), known_type(weight).shape
        weight = reshape_before(node, weight, (1, depth))
        given = [] if bias is None else [reshape_before(node, bias, (1,))]
        linear = call_before(node, TensorType((*kind.shape, 1), kind.dtype), aten.linear.default, x, weight, *given)
        replace_node(node, call_before(node, kind, aten.squeeze.dim, linear, -1))
    return len(hits)


def _multiplies_constants(node: fx.Node) -> bool:
    """Return whether a batched product has one constant operand, and static sizes but for the rows of the other one."""
    if operator(node) not in ("aten.bmm.default", MATMUL) or known_type(node).dtype is not DType.F32:
        return False
    constant = [is_constant(factor) for factor in node.args[:2]]
    shapes = [known_type(factor).shape for factor in node.args[:2]]
    if any(len(shape) != 3 for shape in shapes) or shapes[0][0] != shapes[1][0]:
        return False
    groups, depth = shapes[0][0], shapes[0][2]
    return sum(constant) == 1 and isinstance(groups, int) and groups > 1 and isinstance(depth, int)


def bmm_to_matmul(module: fx.GraphModule) -> int:
    """Replace bmm, mm and baddbmm of computed operands by matmul, a factor ``alpha`` and an addition."""
    hits = [node for node in module.graph.nodes if _is_computed(node)]
    for node in hits:
        given, kind = arguments(node), known_type(node)
        *added, a, b = node.args[:3]
        made = call_before(node, kind, aten.matmul.default, a, b)
        if added:
            if given["alpha"] != 1:
                made = call_before(node, kind, aten.mul.Scalar, made, given["alpha"])
            made = call_before(node, kind, aten.add.Tensor, made, added[0])
        replace_node(node, made)
    return len(hits)


def _is_computed(node: fx.Node) -> bool:
    name = operator(node)
    if name not in ("aten.bmm.default", "aten.mm.default", "aten.baddbmm.default"):
        return False
    added = name == "aten.baddbmm.default"
    plain = known_type(node).dtype is DType.F32 and (not added or arguments(node)["beta"] == 1)
    return plain and not any(is_constant(factor) for factor in node.args[added : added + 2])


def merge_batch_axes(module: fx.GraphModule) -> int:
    """Merge the leading axes of products and attention with more than four axes, as kernels take four."""
    hits = [node for node in module.graph.nodes if _has_many_axes(node)]
    for node in hits:
        count, kind = BATCHED_OPERANDS[operator(node)], known_type(node)
        factors = [reshape_before(node, value, _merged(known_type(value).shape)) for value in node.args[:count]]
        made = call_before(
            node, TensorType(_merged(kind.shape), kind.dtype), node.target, *factors, *node.args[count:], **node.kwargs
        )
        replace_node(node, reshape_before(node, made, kind.shape))
    return len(hits)


def _merged(shape: Shape) -> Shape:
    """Return the shape with four axes, the first of which has all leading elements."""
    return (numel(shape[: 1 - KERNEL_AXES]), *shape[1 - KERNEL_AXES :])


def _has_many_axes(node: fx.Node) -> bool:
    """Return whether a product of computed values has more than four axes, all leading ones equal and available."""
    if operator(node) not in BATCHED_OPERANDS:
        return False
    values = node.args[: BATCHED_OPERANDS[operator(node)]]
    if any(not isinstance(value, fx.Node) or is_constant(value) for value in values):
        return False
    shapes = [known_type(value).shape for value in values]
    if (
        len({len(shape) for shape in shapes}) > 1
        or len(shapes[0]) <= KERNEL_AXES
        or known_type(node).dtype is not DType.F32
    ):
        return False
    free = {dim for shape in shapes for dim in shape if not isinstance(dim, int)}
    same = len({shape[:-2] for shape in shapes}) == 1
    masked = operator(node) == ATTENTION and arguments(node)["attn_mask"] is not None
    return same and not masked and len(free) <= 1 and all(shape[0] in free or not free for shape in shapes)


def _matrices(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Return the left operand, the constant matrix, and a constant bias per column or ``None``."""
    if operator(node) not in CONSTANT_PRODUCTS:
        return None
    *bias, x, matrix = node.args[:3]
    if operator(matrix) == "aten.expand.default":  # of one matrix to a batch, which a product with it does not need
        matrix = matrix.args[0]
    if not is_constant(matrix) or is_constant(x) or known_type(x).dtype is not DType.F32:
        return None
    shape, left = known_type(matrix).shape, known_type(x).shape
    if len(left) < max(len(shape), 2) or any(size != 1 for size in shape[:-2]):
        return None
    rows, *columns = shape[-2:]
    if rows != left[-1] or known_type(node).shape != (*left[:-1], *columns):
        return None  # the expansion repeats rows, or gives the result more axes than the left operand
    if bias:
        given = arguments(node)
        if given["alpha"] != 1 or given["beta"] != 1 or not is_constant(bias[0]):
            return None
        if known_type(bias[0]).shape != tuple(columns):
            return None
    return x, matrix, bias[0] if bias else None


def split_linear_by_slices(module: fx.GraphModule) -> int:
    """Split linear layers whose output is only read in slices of channels, one layer per slice.

    Queries, keys and values from a combined projection then get separate quantization parameters, and no copy.
    """
    hits = [node for node in module.graph.nodes if operator(node) == LINEAR_LAYER]
    hits = [node for node in hits if all(is_constant(value) for value in _constants(node))]
    count = 0
    for node in hits:
        parts = _output_slices(node)
        if not parts:
            continue
        for leaf, (first, last) in parts.items():
            constants = []
            for value in _constants(node):
                name = f"{value.target}_{first}_{last}"
                if not hasattr(module, name):
                    module.register_buffer(name, getattr(module, str(value.target))[first:last].contiguous())
                path = f"{constant_path(value, value.target)}[{first}:{last}]"
                constants.append(constant_node(module, name, path))
            with module.graph.inserting_before(node):
                layer = module.graph.call_function(aten.linear.default, (node.args[0], *constants))
            inherit_info(layer, node, type=TensorType(known_type(leaf).shape, DType.F32))
            leaf.replace_all_uses_with(layer)
        count += 1
    module.graph.eliminate_dead_code()
    return count


def _constants(node: fx.Node) -> list[fx.Node]:
    """Return the weight, and the bias if there is one."""
    return [value for value in node.all_input_nodes if value is not node.args[0]]


def _output_slices(layer: fx.Node) -> dict[fx.Node, tuple[int, int]]:
    """Return the values that are slices of a layer's channels, each with its first and one past its last channel.

    Returns:
        An empty dictionary if anything but data movement reads the layer.
    """
    sizes = _MovementEvaluator(layer)
    shape = sizes.shape
    if min(shape) < 1:
        return {}
    positions = torch.arange(math.prod(shape)).reshape(shape)
    found: dict[fx.Node, tuple[int, int]] = {}
    pending = [(layer, positions)]
    while pending:
        node, value = pending.pop()
        for user in node.users:
            if info(user).dim is not None:
                continue
            if not operator(user).startswith("aten.") or operator(user).split(".")[1] not in VIEW_NAMES:
                return {}
            moved = sizes.run(user, node, value)
            if (span := _channel_range(moved, positions)) is not None:
                found[user] = span
            else:
                pending.append((user, moved))
    return found if all(last - first < shape[-1] for first, last in found.values()) else {}


def _channel_range(part: torch.Tensor, positions: torch.Tensor) -> tuple[int, int] | None:
    """Return the range of channels of `positions` that `part` equals, or ``None``."""
    moved = part.dim() != positions.dim() or part.shape[:-1] != positions.shape[:-1]
    if moved or part.shape == positions.shape or not part.numel():
        return None
    first = int(part.flatten()[0])
    last = first + part.shape[-1]
    return (first, last) if last <= positions.shape[-1] and torch.equal(part, positions[..., first:last]) else None


class _MovementEvaluator:
    """Evaluates data movement on sample tensors, with a distinct size for each dynamic dimension."""

    def __init__(self, layer: fx.Node) -> None:
        shape = known_type(layer).shape
        names = sorted(set().union(*[symbols_of(dim) for dim in shape]))
        for size in SAMPLE_SIZES:
            self.known = {name: size + index for index, name in enumerate(names)}
            self.shape = tuple(evaluate(dim, self.known) for dim in shape)
            if min(self.shape) > 0:
                break

    def run(self, move: fx.Node, source: fx.Node, value: torch.Tensor) -> torch.Tensor:
        def given(leaf: fx.Node) -> object:
            return value if leaf is source else evaluate(resolve_dims(leaf), self.known)

        return move.target(*fx.map_arg(move.args, given), **fx.map_arg(move.kwargs, given))
