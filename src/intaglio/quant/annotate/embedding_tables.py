"""Embedding tables quantized to 8 bits, with a scale and a zero point for each row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import getitem

import numpy as np
import torch
from torch import fx

from intaglio import numerics
from intaglio.fxgraph.node_info import info, inherit_info, known_type, origin
from intaglio.fxgraph.nodes import arguments, is_constant, operator
from intaglio.fxgraph.overloads import EMBEDDING_TARGET
from intaglio.ir import DType, TensorType
from intaglio.quant.qdq.qdq_normalize import DEQUANTIZE_CHANNEL
from intaglio.quant.recipes.choices import EmbeddingType
from intaglio.quant.recipes.settings import Setting
from intaglio.torch_private import quantized_decomposed

EMBEDDING_BAG_TARGETS = (
    "aten.embedding_bag.padding_idx",
    "aten.embedding_bag.default",
    "aten._embedding_bag.default",
    "aten._embedding_bag_forward_only.default",
)


@dataclass(frozen=True)
class EmbeddingTable:
    """The table of one embedding that the recipe wants quantized, or leaves to the data.

    Attributes:
        node: the embedding.
        reason: why the table stays in float, or ``None``.
        undecided: whether the data decides and has not chosen it, so that it stays in float.
    """

    node: fx.Node
    reason: str | None
    undecided: bool = False

    @property
    def is_quantized(self) -> bool:
        """Return whether the table is quantized."""
        return self.reason is None and not self.undecided

    def __str__(self) -> str:
        kind = "u8, a scale and a zero point for every row" if self.reason is None else f"float, because {self.reason}"
        return f"table of {origin(self.node).path or self.node.name}: {kind}"


def find_embedding_tables(settings: Mapping[fx.Node, Setting]) -> tuple[EmbeddingTable, ...]:
    """Return the tables that the recipe wants quantized or leaves to the data, in execution order."""
    found = []
    for node, setting in settings.items():
        by_data = setting.embeddings == EmbeddingType.AUTO
        asked = setting.quantize and (by_data or setting.embeddings == EmbeddingType.INT8)
        if not asked or operator(node) not in (EMBEDDING_TARGET, *EMBEDDING_BAG_TARGETS):
            continue
        reason = _table_refusal(node.args[0])
        if reason is None or not by_data:
            found.append(EmbeddingTable(node, reason, undecided=by_data))
    return tuple(found)


def _float_table_refusal(table: fx.Node) -> str | None:
    """Return why kernels cannot read a float table; ``None`` if they can."""
    if not is_constant(table) or known_type(table).dtype is not DType.F32:
        return "it is not a constant float32 tensor"
    shape = known_type(table).shape
    if len(shape) == 2 and 0 not in shape:
        return None
    return f"its shape is {list(shape)}; a table has two axes, and neither has size 0"


def _table_refusal(table: fx.Node) -> str | None:
    """Return why a table cannot be quantized; ``None`` if it can."""
    if (reason := _float_table_refusal(table)) is not None:
        return reason
    values = getattr(table.graph.owning_module, str(table.target)).detach()
    spans = values.amax(1) - values.amin(1)
    return (
        None
        if spans.isfinite().all()
        else "a row contains values that are not finite, or spans a range that float32 cannot hold"
    )


def bag_refusal(node: fx.Node) -> str | None:
    """Return why an embedding bag runs in PyTorch; ``None`` if a kernel computes it."""
    given = arguments(node)
    table, weights = given["weight"], given["per_sample_weights"]
    if table_operands(table) is None and (reason := _float_table_refusal(table)) is not None:
        return f"the kernel cannot read its table: {reason}"
    ids, offsets = (known_type(value) for value in (given["indices"], given["offsets"]))
    if (ids.dtype, offsets.dtype) != (DType.I64, DType.I64) or (len(ids.shape), len(offsets.shape)) != (1, 1):
        return f"its ids are {ids} and its offsets {offsets}; the kernel takes i64 tensors with one axis"
    if weights is not None and known_type(weights).dtype is not DType.F32:
        return f"per_sample_weights are {known_type(weights)}; the kernel takes f32"
    if any(user.target is not getitem or user.args[1] != 0 for user in node.users):
        return "the model reads more than its first result"
    return None


def table_notes(tables: Iterable[EmbeddingTable]) -> tuple[str, ...]:
    """Return one line for each table that is quantized or should be, without duplicates."""
    return tuple(dict.fromkeys(str(table) for table in tables if not table.undecided))


StoreConstant = Callable[[str, np.ndarray, TensorType], fx.Node]
"""Stores a constant under a key and returns its node."""


def quantize_table(node: fx.Node, store: StoreConstant) -> None:
    """Replace the embedding's table by a dequantize of quantized constants.

    Each embedding gets a dequantize of its own; the constants are shared by all embeddings that use this table.
    """
    table, graph = node.args[0], node.graph
    values = getattr(graph.owning_module, str(table.target)).detach().numpy()
    quantized, *by_row = numerics.quantize_table(values)
    constants = [store(f"{table.target}:levels", quantized, TensorType(quantized.shape, DType.U8))]
    for label, array in zip(("scale", "zero_point"), by_row, strict=True):
        constants.append(store(f"{table.target}:{label}", array, TensorType(array.shape, DType.F32)))
    quantized_decomposed()

    with graph.inserting_before(node):
        real = graph.call_function(
            torch.ops.quantized_decomposed.dequantize_per_channel.default, (*constants, 0, 0, 255, torch.uint8)
        )
    inherit_info(real, node, type=info(table).type)
    node.replace_input_with(table, real)


def table_operands(node: object) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Return the quantized values, scales and zero points of a table's dequantize; ``None`` for any other node."""
    if not isinstance(node, fx.Node) or operator(node) != DEQUANTIZE_CHANNEL or node.args[-1] is not torch.uint8:
        return None
    quantized, scales, zeros, *_ = node.args
    return (quantized, scales, zeros) if is_constant(quantized) else None
