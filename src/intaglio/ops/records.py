"""Index of all operator records, by name and by ATen overload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from intaglio.argument_checks import value_text
from intaglio.errors import InputError
from intaglio.ir import Op
from intaglio.ops import (
    channels,
    dynamic_quant,
    embedding,
    fused_activations,
    norm,
    pointwise,
    unary,
)
from intaglio.ops.direct import along_axis, hadamard_blocks, indexing
from intaglio.ops.images import float_images, pool, resize
from intaglio.ops.loop_ops import float_only, loop
from intaglio.ops.movement import pixel_shuffle, shape
from intaglio.ops.opdef import OpDef
from intaglio.ops.products import attention, conv, float_products, grouped_linear, linear_f32, recurrent


def index(*groups: Iterable[OpDef]) -> tuple[Mapping[str, OpDef], Mapping[str, OpDef]]:
    """Return records by name and by ATen overload.

    Raises:
        ValueError: Two records claim one name, and the first does not list the second in `instead`.
    """
    by_name: dict[str, OpDef] = {}
    by_target: dict[str, OpDef] = {}
    for record in (record for group in groups for record in group):
        for key, table in [(record.name, by_name), *((target, by_target) for target in record.targets)]:
            if key in table and record in table[key].if_not_constant.values():
                continue
            if key in table:
                raise ValueError(f"two operator records have the target {key}: {table[key].name} and {record.name}")
            table[key] = record
    return MappingProxyType(by_name), MappingProxyType(by_target)


BY_NAME, BY_TARGET = index(
    conv.CONVOLUTION_OPS,
    grouped_linear.GROUPED_LINEAR_OPS,
    pointwise.POINTWISE_OPS,
    channels.CHANNEL_OPS,
    pool.POOL_OPS,
    norm.NORM_OPS,
    resize.RESIZE_OPS,
    float_images.FLOAT_IMAGE_OPS,
    shape.SHAPE_OPS,
    pixel_shuffle.PIXEL_SHUFFLE_OPS,
    unary.UNARY_OPS,
    fused_activations.FUSED_ACTIVATION_OPS,
    loop.LOOP_OPS,
    attention.ATTENTION_OPS,
    dynamic_quant.DYNAMIC_QUANT_OPS,
    recurrent.RECURRENT_OPS,
    embedding.EMBEDDING_OPS,
    indexing.INDEXING_OPS,
    along_axis.ALONG_AXIS_OPS,
    hadamard_blocks.HADAMARD_OPS,
    linear_f32.WEIGHT_ONLY_OPS,
    float_only.FLOAT_ONLY_OPS,
    float_products.FLOAT_PRODUCT_OPS,
)
"""All records, by name and by ATen overload."""
OPS: Mapping[str, OpDef] = MappingProxyType({name: found for name, found in BY_NAME.items() if found.has_integer_form})
"""Operators that have an integer form or exist only in the integer graph, by name."""


def checked_records(operators: Iterable[OpDef]) -> tuple[OpDef, ...]:
    """Return the records of user-defined operators; raise `InputError` for anything else among them."""
    found = tuple(operators)
    for record in found:
        if not isinstance(record, OpDef):
            problem = f"operators takes records (OpDef), got {value_text(record)}"
            raise InputError("operators", None, problem, remedy="pass operators=[record, ...]")
    return found


def op_def(op: Op) -> OpDef:
    """Return the record of an operator of the integer graph; an empty record for islands and host operators."""
    return OPS.get(op.kind) or CALLED_BACK


CALLED_BACK = OpDef(name="")
"""Record of islands and host operators, which Python runs."""
