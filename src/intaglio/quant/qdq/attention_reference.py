"""Decomposition of attention into float and Q/DQ operators for the reference model."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from intaglio.fxgraph.node_info import fixed_size, inherit_info, known_type, update_info
from intaglio.fxgraph.nodes import call_of, known_record, operands
from intaglio.ir import DType, QParams, Shape, TensorType
from intaglio.quant.recipes.user_patterns import CompositeMatch

PROBABILITY_QPARAMS = QParams((1 / 255,), (0,), 0, 255)
"""Fixed parameters of `exp(x - row maximum)` before the division by the row sum. The range is [0, 1] by definition, so
it needs no calibration."""


def decompose_attention(node: fx.Node, quantize: Any, dequantize: Any) -> fx.Node:
    """Decompose an attention node into matmul, exp and sum, and return the node of the result.

    The exponentials are quantized to u8 with `PROBABILITY_QPARAMS` before the second product, as the kernel does it.
    All new nodes are marked as one `CompositeMatch`. Queries that attend to no key give 0, as in PyTorch.

    Args:
        node: call of `scaled_dot_product_attention`.
        quantize: per-tensor quantize operator for the exponentials.
        dequantize: per-tensor dequantize operator that belongs to it.
    """
    record, values = known_record(node), operands(node)
    attrs = record.bind(call_of(node, record))
    insert = _OperatorInserter(node)
    q, k, v, mask = values
    (n, heads, queries, _), (_, groups, keys, depth), width = (
        known_type(q).shape,
        known_type(k).shape,
        known_type(v).shape[-1],
    )
    aten = torch.ops.aten
    scores, results = (n, heads, queries, keys), (n, heads, queries, width)
    if groups != heads:
        repeats = fixed_size(q, 1) // fixed_size(k, 1)
        k = insert(aten.repeat_interleave.self_int, (k, repeats, 1), (n, heads, keys, depth))
        v = insert(aten.repeat_interleave.self_int, (v, repeats, 1), (n, heads, keys, width))
    k_transposed = insert(aten.transpose.int, (k, -2, -1), (n, heads, depth, keys))
    x = insert(aten.matmul.default, (q, k_transposed), scores)
    x = insert(aten.mul.Scalar, (x, attrs["scale"]), scores)
    if attrs["causal"]:
        mask = insert.causal(x)
    if mask is not None and known_type(mask).dtype is DType.BOOL:
        x = insert(aten.where.ScalarOther, (mask, x, float("-inf")), scores)
    elif mask is not None:
        x = insert(aten.add.Tensor, (x, mask), scores)
    row = (n, heads, queries, 1)
    row_max = insert(aten.amax.default, (x, [-1], True), row)
    # Keep the maximum finite, because -inf - (-inf) is NaN.
    row_max = insert(aten.clamp.default, (row_max, torch.finfo(torch.float32).min), row)
    exponentials = insert(aten.exp.default, (insert(aten.sub.Tensor, (x, row_max), scores),), scores)
    parameters = (
        PROBABILITY_QPARAMS.step,
        PROBABILITY_QPARAMS.zero,
        PROBABILITY_QPARAMS.qmin,
        PROBABILITY_QPARAMS.qmax,
        torch.uint8,
    )
    quantized = insert(quantize, (exponentials, *parameters), scores, TensorType(scores, DType.U8, PROBABILITY_QPARAMS))
    exponentials = insert(dequantize, (quantized, *parameters), scores)
    total = insert(aten.sum.dim_IntList, (exponentials, [-1], True), row)
    total = insert(aten.clamp.default, (total, 1.0), row)  # the maximum of a row is 1; a row without keys gives 0 / 1
    result = insert(aten.div.Tensor, (insert(aten.matmul.default, (exponentials, v), results), total), results)
    insert.mark(CompositeMatch(record, insert.first_readers([value for value in values if value is not None]), attrs))
    return result


class _OperatorInserter:
    """Inserts float operators in front of `node` and collects them in `made`."""

    def __init__(self, node: fx.Node) -> None:
        self.node, self.inserted = node, list[fx.Node]()

    def __call__(self, target: Any, args: tuple[Any, ...], shape: Shape, kind: TensorType | None = None) -> fx.Node:
        with self.node.graph.inserting_before(self.node):
            made = self.node.graph.call_function(target, args)
        inherit_info(made, self.node, type=kind or TensorType(shape, DType.F32))
        self.inserted.append(made)
        return made

    def causal(self, scores: fx.Node) -> fx.Node:
        """Return the causal mask bool[queries, keys]: query i attends to keys 0..i."""
        *_, queries, keys = known_type(scores).shape
        aten = torch.ops.aten
        with self.node.graph.inserting_before(self.node):
            sizes = [self.node.graph.call_function(aten.sym_size.int, (scores, axis)) for axis in (2, 3)]
        for size, dim in zip(sizes, (queries, keys), strict=True):
            inherit_info(size, self.node, dim=dim)
            self.inserted.append(size)
        rows, columns = (
            self(aten.arange.default, (size,), (dim,), TensorType((dim,), DType.I64))
            for size, dim in zip(sizes, (queries, keys), strict=True)
        )
        rows = self(aten.unsqueeze.default, (rows, 1), (queries, 1), TensorType((queries, 1), DType.I64))
        shape = queries, keys
        return self(aten.ge.Tensor, (rows, columns), shape, TensorType(shape, DType.BOOL))

    def first_readers(self, values: list[fx.Node]) -> tuple[tuple[str, int], ...]:
        """Return for each value the first new node that reads it, by name, and the value's index among its inputs."""
        places: dict[fx.Node, tuple[str, int]] = {}
        for made in self.inserted:
            for place, value in enumerate(made.all_input_nodes):
                places.setdefault(value, (made.name, place))
        return tuple(places[value] for value in values)

    def mark(self, composite: CompositeMatch) -> None:
        """Mark all new nodes as operators of one composite."""
        for made in self.inserted:
            update_info(made, composite=composite)
