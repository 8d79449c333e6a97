"""Attention in the reference model, written out: what its kernel rounds inside is quantized there too."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from intaglio.fxgraph.node_info import fixed_size, inherit_info, known_type, update_info
from intaglio.fxgraph.nodes import call_of, known_record, operands
from intaglio.ir import DType, QParams, Shape, TensorType
from intaglio.quant.recipes.user_patterns import CompositeMatch

PROBABILITIES = QParams((1 / 255,), (0,), 0, 255)
"""Of exponentials less their row's largest, before they are divided by their sum: no calibration can tell more."""


def written_out(node: fx.Node, quantize: Any, dequantize: Any) -> fx.Node:
    """Attention -> its result, spelled as products, exponentials in levels, and a sum of these; one `Whole`.

    Rows without any key give 0, as torch's operator does. ``quantize`` and ``dequantize`` are operators per tensor.
    """
    record, values = known_record(node), operands(node)
    attrs = record.bind(call_of(node, record))
    spell = _Speller(node)
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
        k = spell(aten.repeat_interleave.self_int, (k, repeats, 1), (n, heads, keys, depth))
        v = spell(aten.repeat_interleave.self_int, (v, repeats, 1), (n, heads, keys, width))
    turned = spell(aten.transpose.int, (k, -2, -1), (n, heads, depth, keys))
    x = spell(aten.matmul.default, (q, turned), scores)
    x = spell(aten.mul.Scalar, (x, attrs["scale"]), scores)
    if attrs["causal"]:
        mask = spell.causal(x)
    if mask is not None and known_type(mask).dtype is DType.BOOL:
        x = spell(aten.where.ScalarOther, (mask, x, float("-inf")), scores)
    elif mask is not None:
        x = spell(aten.add.Tensor, (x, mask), scores)
    row = (n, heads, queries, 1)
    top = spell(aten.amax.default, (x, [-1], True), row)
    top = spell(aten.clamp.default, (top, torch.finfo(torch.float32).min), row)  # -inf - -inf would be NaN
    powers = spell(aten.exp.default, (spell(aten.sub.Tensor, (x, top), scores),), scores)
    parameters = (PROBABILITIES.step, PROBABILITIES.zero, PROBABILITIES.qmin, PROBABILITIES.qmax, torch.uint8)
    levels = spell(quantize, (powers, *parameters), scores, TensorType(scores, DType.U8, PROBABILITIES))
    powers = spell(dequantize, (levels, *parameters), scores)
    total = spell(aten.sum.dim_IntList, (powers, [-1], True), row)
    total = spell(aten.clamp.default, (total, 1.0), row)  # the largest of a row is 1; without keys it is 0 / 1
    result = spell(aten.div.Tensor, (spell(aten.matmul.default, (powers, v), results), total), results)
    spell.mark(CompositeMatch(record, spell.reads([value for value in values if value is not None]), attrs))
    return result


class _Speller:
    """Adds operators in front of the one they stand for."""

    def __init__(self, node: fx.Node) -> None:
        self.node, self.made = node, list[fx.Node]()

    def __call__(self, target: Any, args: tuple[Any, ...], shape: Shape, kind: TensorType | None = None) -> fx.Node:
        with self.node.graph.inserting_before(self.node):
            made = self.node.graph.call_function(target, args)
        inherit_info(made, self.node, type=kind or TensorType(shape, DType.F32))
        self.made.append(made)
        return made

    def causal(self, scores: fx.Node) -> fx.Node:
        """bool [queries, keys]: which keys each query sees, those up to its own place."""
        *_, queries, keys = known_type(scores).shape
        aten = torch.ops.aten
        with self.node.graph.inserting_before(self.node):
            sizes = [self.node.graph.call_function(aten.sym_size.int, (scores, axis)) for axis in (2, 3)]
        for size, dim in zip(sizes, (queries, keys), strict=True):
            inherit_info(size, self.node, dim=dim)
            self.made.append(size)
        rows, columns = (
            self(aten.arange.default, (size,), (dim,), TensorType((dim,), DType.I64))
            for size, dim in zip(sizes, (queries, keys), strict=True)
        )
        rows = self(aten.unsqueeze.default, (rows, 1), (queries, 1), TensorType((queries, 1), DType.I64))
        shape = queries, keys
        return self(aten.ge.Tensor, (rows, columns), shape, TensorType(shape, DType.BOOL))

    def reads(self, values: list[fx.Node]) -> tuple[tuple[str, int], ...]:
        """Where each value is read: by which of the operators made, as which of what that reads."""
        places: dict[fx.Node, tuple[str, int]] = {}
        for made in self.made:
            for place, value in enumerate(made.all_input_nodes):
                places.setdefault(value, (made.name, place))
        return tuple(places[value] for value in values)

    def mark(self, whole: CompositeMatch) -> None:
        for made in self.made:
            update_info(made, composite=whole)
