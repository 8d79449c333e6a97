"""Pack 4-bit weights in the order in which GEMM kernels read them; native/layers/int4_weights.h has the layout."""

from __future__ import annotations

from functools import cache

import numpy as np

from intaglio.codegen.weight_packing import PanelPacking
from intaglio.kernels.tile_spec import INT4_CHANNELS, INT4_GROUP, INT4_MULTIPLES
from intaglio.numerics.multiples_of_groups import LARGEST_MULTIPLE, smallest_multiples
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
    panels = []
    for panel in range(plan.panels):
        order = plan.order(panel)
        inside = order < len(weight)
        panels.append(_panel(*_split(weight[order[inside]]), inside).ravel())
    return np.concatenate(panels)


def _split(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 4-bit values of some output channels, u8[outputs, line, step, 4], and the multiples of their groups,
    u8[outputs, line], two in a byte. Raise `ValueError` if a group does not consist of multiples of 4-bit values."""
    groups = weight.reshape(len(weight), -1, INT4_GROUP)
    multiples = smallest_multiples(groups, INT4_LOW, INT4_HIGH)
    values = _quotients().take(groups.view(np.uint8) + (multiples.astype(np.uint16) << 8)[..., None])
    if groups.size and (multiples.max() > MOST_IN_PANEL or values.max() > INT4_HIGH - INT4_LOW):
        raise ValueError("the weights of a group are not multiples of 4-bit values")
    halves = values.reshape(len(weight), -1, INT4_CHANNELS // 8, 2, 4)
    pairs = multiples.reshape(len(weight), -1, 2)
    return halves[..., 0, :] | halves[..., 1, :] << 4, pairs[..., 0] | pairs[..., 1] << 4


@cache
def _quotients() -> np.ndarray:
    """Return u8[multiples * 256]: for each multiple and each int8 weight, read as uint8, the quotient of the two minus
    ``INT4_LOW``, or 255 if it is not a 4-bit value."""
    weights = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.int16)
    found = np.full((LARGEST_MULTIPLE + 1, 256), 255, np.uint8)
    for multiple in range(1, LARGEST_MULTIPLE + 1):
        values, rest = np.divmod(weights, multiple)
        fits = (rest == 0) & (values >= INT4_LOW) & (values <= INT4_HIGH)
        found[multiple, fits] = values[fits] - INT4_LOW
    return found.ravel()


def _panel(steps: np.ndarray, scales: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """Return u8[line, bytes] of a panel; columns without an output channel have zero weights.

    Args:
        steps: u8[outputs, line, step, 4].
        scales: u8[outputs, line].
        inside: Whether each column has an output channel, in their order.
    """
    lines = steps.shape[1]
    columns = np.full((len(inside), *steps.shape[1:]), -INT4_LOW | -INT4_LOW << 4, np.uint8)
    columns[inside] = steps
    multiples = np.zeros((lines, len(inside)), np.uint8)
    multiples[:, inside] = scales.T
    quads = columns.view(np.uint32)[..., 0]  # transposing 4-byte elements is much faster than bytes
    return np.concatenate([multiples, quads.transpose(1, 2, 0).reshape(lines, -1).view(np.uint8)], axis=1)


def panel_line_bytes(blocks: int) -> int:
    """Return the bytes of a line of a panel."""
    return (INT4_MULTIPLES + INT4_CHANNELS // 8 * 64) * blocks
