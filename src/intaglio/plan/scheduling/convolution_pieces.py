"""Decomposition of convolutions into plain ones: a transposed convolution has one for each phase of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from intaglio.ir import Graph, Op, evaluate
from intaglio.ir.phases import Phase, axis_phases
from intaglio.ops import op_def


@dataclass(frozen=True)
class Piece:
    """One plain convolution over images: a whole layer, or one phase of a transposed convolution.

    Attributes:
        value: Name of the layer's weight.
        shape: Outputs, inputs per group, taps y, taps x.
        read: Returns the weight, which has this shape. It may be stored in a file.
        stride: Stride (y, x).
        dilation: Dilation (y, x).
        start: Row and column of the input that the first output's first tap reads.
        phases: The outputs that it computes, along rows and columns; ``None`` for all of them.
        strides_out: Distance (y, x) of neighbouring outputs of a phase in the result.
    """

    value: str
    shape: tuple[int, int, int, int]
    read: Callable[[], np.ndarray] = field(repr=False)
    stride: tuple[int, int]
    dilation: tuple[int, int]
    start: tuple[int, int]
    phases: tuple[Phase, Phase] | None = None
    strides_out: tuple[int, int] = (1, 1)

    @property
    def identity(self) -> tuple[str, tuple[Phase, Phase] | None]:
        """Return what tells the piece's weight from all others."""
        return self.value, self.phases


def pieces(anchor: Op, graph: Graph) -> list[Piece]:
    """Return the pieces of a convolution or linear layer.

    1-d inputs are images of one row; with 3-d inputs, each depth is an image.
    """
    outputs, inputs, *taps = weight_shape(anchor, graph)
    rows, columns = (1, 1, *taps)[-2:]
    shape, constants, weight = (outputs, inputs, rows, columns), graph.constants, anchor.inputs[1]

    def read() -> np.ndarray:
        return constants[weight].reshape(shape)

    if not op_def(anchor).convolves:
        return [Piece(weight, shape, read, (1, 1), (1, 1), (0, 0))]
    if not op_def(anchor).transposed:
        begins = anchor.attrs["padding"][::2]
        return [
            Piece(
                weight,
                shape,
                read,
                _rows_columns(anchor.attrs["stride"], 1),
                _rows_columns(anchor.attrs["dilation"], 1),
                _rows_columns([-begin for begin in begins], 0),
            )
        ]
    along = _rows_columns(axis_phases(anchor, tuple(taps)), (Phase(0, (0,), 0, 1, 0),))
    steps = _rows_columns(anchor.attrs["stride"], 1)
    return [_phase(weight, shape, read, y, x, steps) for y in along[0] for x in along[1]]


def weight_shape(anchor: Op, graph: Graph) -> tuple[int, ...]:
    """Return the shape of the constant weight of a layer."""
    return graph.constants.layout(anchor.inputs[1])[0]


def weights_of(anchor: Op, graph: Graph) -> int:
    """Return the number of weights of a layer, one for each group of its rows; 1 for a layer without groups."""
    if not op_def(anchor).row_groups:
        return 1
    (groups,) = graph.types[anchor.inputs[-1]].shape
    return evaluate(groups, {})


def _rows_columns(values: Sequence[Any], default: Any) -> tuple[Any, Any]:
    """Return the last two of a sequence with one item per axis; ``default`` replaces the rows of 1-d inputs."""
    return (values[-2] if len(values) > 1 else default), values[-1]


def _phase(
    value: str,
    whole: tuple[int, int, int, int],
    read: Callable[[], np.ndarray],
    y: Phase,
    x: Phase,
    steps: tuple[int, int],
) -> Piece:
    """Return the piece of one phase; outputs that no tap reaches get a tap of zeros."""
    taps = (len(y.taps), len(x.taps)) if y.taps and x.taps else (1, 1)
    shape = (*whole[:2], *taps)

    def taken() -> np.ndarray:
        found = read()[:, :, list(y.taps)][:, :, :, list(x.taps)]
        return np.ascontiguousarray(found) if found.size else np.zeros(shape, np.int8)

    return Piece(value, shape, taken, (1, 1), (y.dilation, x.dilation), (y.start, x.start), (y, x), steps)
