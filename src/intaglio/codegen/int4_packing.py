"""Pack 4-bit weights in the order in which GEMM kernels read them; native/products/int4_weights.h has the layout."""

from __future__ import annotations

import numpy as np

from intaglio.codegen.weight_packing import PanelPacking
from intaglio.kernels.tile_spec import INT4_CHANNELS, INT4_GROUP, INT4_MULTIPLES
from intaglio.numerics.multiples_of_groups import smallest_multiples
from intaglio.ops.products.int4_linear import INT4_LOW

INT4_HIGH = INT4_LOW + 15
"""Largest 4-bit weight."""
MOST_IN_PANEL = 15
"""Largest multiple of a group that a panel can hold."""


def pack_int4(weight: np.ndarray, plan: PanelPacking) -> np.ndarray:
    """Pack the weight of a linear layer.

    Args:
        weight: s8[outputs, inputs], each group of ``INT4_GROUP`` inputs a multiple of values of 4 bits.
        plan: Panels to pack into; the number of inputs is a multiple of ``INT4_CHANNELS``.

    Returns:
        u8[panel, line, `panel_line_bytes`], flattened.

    Raises:
        ValueError: a group does not consist of multiples of 4-bit values.
    """
    groups = weight.reshape(len(weight), -1, INT4_GROUP).astype(np.int16)
    multiples = smallest_multiples(groups, INT4_LOW, INT4_HIGH)
    values = groups // multiples[..., None]
    if groups.size and (multiples.max() > MOST_IN_PANEL or values.min() < INT4_LOW or values.max() > INT4_HIGH):
        raise ValueError("the weights of a group are not multiples of 4-bit values")
    halves = (values - INT4_LOW).astype(np.uint8).reshape(len(weight), -1, INT4_CHANNELS // 8, 2, 4)
    steps = halves[..., 0, :] | halves[..., 1, :] << 4
    pairs = multiples.astype(np.uint8).reshape(len(weight), -1, 2)
    scales = pairs[..., 0] | pairs[..., 1] << 4
    return np.concatenate([_panel(steps, scales, plan.order(panel)).ravel() for panel in range(plan.panels)])


def _panel(steps: np.ndarray, scales: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return u8[line, bytes] for the output channels ``order``; those past the end have zero weights.

    Args:
        steps: u8[outputs, line, step, 4].
        scales: u8[outputs, line].
        order: Output channel of each column.
    """
    inside, lines = order < len(steps), steps.shape[1]
    columns = np.full((len(order), *steps.shape[1:]), -INT4_LOW | -INT4_LOW << 4, np.uint8)
    columns[inside] = steps[order[inside]]
    multiples = np.zeros((lines, len(order)), np.uint8)
    multiples[:, inside] = scales[order[inside]].T
    return np.concatenate([multiples, columns.transpose(1, 2, 0, 3).reshape(lines, -1)], axis=1)


def panel_line_bytes(blocks: int) -> int:
    """Return the bytes of a line of a panel."""
    return (INT4_MULTIPLES + INT4_CHANNELS // 8 * 64) * blocks
