"""Split convolutions into plain ones: a transposed convolution is one for each phase of its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from intaglio.ir import Op
from intaglio.ir.phases import Phase, axis_phases
from intaglio.ops import op_def


@dataclass(frozen=True)
class Piece:
    """One plain convolution over images: a whole layer, or one phase of a transposed one.

    ``weight`` is [outputs, inputs per group, taps y, taps x]; ``start`` the row and column of the input at which the
    first output's taps begin. ``phases``: the outputs it makes, along rows and columns; ``None`` for all of them.
    """

    weight: np.ndarray
    stride: tuple[int, int]
    dilation: tuple[int, int]
    start: tuple[int, int]
    phases: tuple[Phase, Phase] | None = None
    strides_out: tuple[int, int] = (1, 1)


def pieces(anchor: Op, weight: np.ndarray) -> list[Piece]:
    """Return what a convolution or linear layer is made of; lines are images of one row, depth is one image each."""
    missing = 4 - min(weight.ndim, 4)
    flat = weight.reshape(*weight.shape[:2], *[1] * missing, *weight.shape[2:][-2:])
    if not op_def(anchor).convolves:
        return [Piece(flat, (1, 1), (1, 1), (0, 0))]
    if not op_def(anchor).transposed:
        begins = anchor.attrs["padding"][::2]
        return [
            Piece(
                flat,
                _rows_columns(anchor.attrs["stride"], 1),
                _rows_columns(anchor.attrs["dilation"], 1),
                _rows_columns([-begin for begin in begins], 0),
            )
        ]
    along = _rows_columns(axis_phases(anchor, weight.shape[2:]), (Phase(0, (0,), 0, 1, 0),))
    steps = _rows_columns(anchor.attrs["stride"], 1)
    return [_phase(flat, y, x, steps) for y in along[0] for x in along[1]]


def _rows_columns(values: Sequence[Any], lacking: Any) -> tuple[Any, Any]:
    """Return the last two of a number per axis; a line has no rows."""
    return (values[-2] if len(values) > 1 else lacking), values[-1]


def _phase(weight: np.ndarray, y: Phase, x: Phase, steps: tuple[int, int]) -> Piece:
    """Return the taps of one phase; outputs that no tap reaches get one of zeros."""
    taken = weight[:, :, list(y.taps)][:, :, :, list(x.taps)]
    if not taken.size:
        taken = np.zeros((*weight.shape[:2], 1, 1), np.int8)
    return Piece(np.ascontiguousarray(taken), (1, 1), (y.apart, x.apart), (y.start, x.start), (y, x), steps)
