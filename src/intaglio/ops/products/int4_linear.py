"""Linear layers whose weights are stored in 4 bits: the condition, and the scratch memory for expanded weights."""

from __future__ import annotations

from collections.abc import Mapping

from intaglio.ir import Dim, Op, TensorType
from intaglio.ops.products.scratch_memory import CACHE_LINE

INT4_BITS = 4
INT4_LOW = -8
"""Smallest 4-bit weight."""
GROUP_STEP = 32
"""Groups consist of a multiple of so many input channels; ``INT4_GROUP`` of kernels/tile_spec.py."""
INPUT_STEP = 64
"""Layers have a multiple of so many input channels; ``INT4_CHANNELS`` of kernels/tile_spec.py."""
WIDEST_PANEL = 64
"""Output channels of the widest panel of weights, which a thread expands at a time."""


def why_not_int4(op: Op, types: Mapping[str, TensorType]) -> str | None:
    """Return why the weight of a linear layer is not read in 4 bits, or ``None``."""
    kind = types[op.inputs[1]]
    packing = kind.packing
    if packing is None or (packing.bits, packing.low) != (INT4_BITS, INT4_LOW):
        return "its weight does not have 4 bits"
    if not packing.group or packing.group % GROUP_STEP:
        return f"the groups of its weight are not multiples of {GROUP_STEP} channels"
    inputs = kind.shape[-1]
    if not isinstance(inputs, int) or inputs % INPUT_STEP:
        return f"it has {inputs} input channels, which is not a multiple of {INPUT_STEP}"
    return None


def int4_scratch(op: Op, types: Mapping[str, TensorType]) -> Dim:
    """Return the lines of scratch memory of each thread: a panel of expanded weights."""
    return 0 if why_not_int4(op, types) else types[op.inputs[1]].shape[1] * WIDEST_PANEL // CACHE_LINE
