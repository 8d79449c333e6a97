"""Products with a Hadamard matrix at run time, which `rotate = "online"` puts in front of linear layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from intaglio import numerics
from intaglio.ir import Attrs, Graph, Op, TensorType
from intaglio.ir.types import F32
from intaglio.ir.verify import TypeRule
from intaglio.ops.direct.direct_operands import MAX_INDEXED_AXES
from intaglio.ops.opdef import Call, OpDef

HADAMARD_TARGET = "intaglio.hadamard.default"
LARGEST_HADAMARD = 1024
"""Largest size of a block; ``LARGEST_HADAMARD`` of native/sequences/hadamard.h is the same."""


def hadamard_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Compute `numerics.hadamard`."""
    return numerics.hadamard(args[0], op.attrs["size"])


def bind_hadamard(call: Call) -> Attrs:
    """Return the size of the blocks, and the last axis."""
    return {"size": int(call.arguments["size"]), "axis": len(call.shape()) - 1}


def check_hadamard(op: Op, graph: Graph) -> None:
    """Raise `ValueError` unless the size of the blocks is a power of two that divides the last axis."""
    shape, size = graph.types[op.inputs[0]].shape, op.attrs["size"]
    channels = shape[-1] if 0 < len(shape) <= MAX_INDEXED_AXES else None
    fits = isinstance(size, int) and 2 <= size <= LARGEST_HADAMARD and size & (size - 1) == 0
    if not fits or not isinstance(channels, int) or channels % size or op.attrs["axis"] != len(shape) - 1:
        raise ValueError(f"%{op.output}: hadamard of {graph.types[op.inputs[0]]} with {dict(op.attrs)}")


HADAMARD = OpDef(
    name="hadamard",
    targets=(HADAMARD_TARGET,),
    operands=("x",),
    direct=True,
    bind=bind_hadamard,
    reference=hadamard_reference,
    types=TypeRule(((F32,),), (F32,)),
    validate=check_hadamard,
    emit="hadamard",
    kernel="indexing",
)
HADAMARD_OPS = (HADAMARD,)
