"""Pack 4-bit weights in the order in which GEMM kernels read them; native/layers/int4_weights.h has the layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from intaglio.codegen.weight_packing import PanelPacking
from intaglio.ir import Graph, Packing
from intaglio.kernels.tile_spec import INT4_CHANNELS, INT4_GROUP, INT4_MULTIPLES
from intaglio.numerics.multiples_of_groups import LARGEST_MULTIPLE, smallest_multiples
from intaglio.ops.products.int4_linear import INT4_BITS, INT4_LOW

INT4_HIGH = INT4_LOW + 15
"""Largest 4-bit weight."""
MOST_IN_PANEL = 15
"""Largest multiple of a group that a panel can hold."""
PACKED_AT_ONCE = 1 << 18
"""Number of weights that are packed at a time, so that what is computed stays in the second-level cache."""


@dataclass(frozen=True)
class StoredInt4:
    """The weight of a linear layer as files have it, from which kernels get theirs without a product or a quotient.

    Attributes:
        values: u8[outputs, bytes of inputs], 4-bit values minus ``INT4_LOW``, the first of each pair in the high half.
        multiples: u8[outputs, bytes of groups], their multiples minus 1 in the same order.
    """

    values: np.ndarray
    multiples: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def split(self, channels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what `_split` does for some output channels."""
        multiples = self.multiples[channels]
        high, low = multiples >> 4, multiples & 15
        if max(high.max(initial=0), low.max(initial=0)) >= MOST_IN_PANEL:
            raise ValueError("the weights of a group are not multiples of 4-bit values")
        # Inputs 0 to 7 of 4 bytes, a pair in each, become pairs of inputs 0 and 4, 1 and 5, 2 and 6, and 3 and 7.
        pairs = self.values[channels].view("<u4")
        made = pairs >> 4 & 0xF | pairs >> 16 & 0xF0
        for mask, shift in ((0xF, 8), (0xF000, 4), (0xF00, 16), (0xF000000, 4)):
            made |= (pairs & mask) << shift
        for mask, shift in ((0xF0000, 4), (0xF0000000, 8)):
            made |= (pairs & mask) >> shift
        steps = made.view(np.uint8).reshape(len(channels), -1, INT4_CHANNELS // 8, 4)
        return steps, high + 1 | low + 1 << 4

    def sums(self) -> np.ndarray:
        """Return the sum of the weights of each output channel, i64[outputs]."""
        groups = self.values.reshape(len(self), -1, INT4_GROUP // 2)
        sums = ((groups >> 4) + (groups & 15)).sum(-1, np.int16) + INT4_LOW * INT4_GROUP
        multiples = np.stack([(self.multiples >> 4) + 1, (self.multiples & 15) + 1], -1).reshape(sums.shape)
        return (sums.astype(np.int32) * multiples).sum(-1, np.int64)


def stored_int4(graph: Graph, name: str) -> StoredInt4 | None:
    """Return the weight of a linear layer with 4-bit weights if it is in a file, in groups as kernels have them."""
    outputs, inputs = graph.constants.layout(name)[0]
    if graph.types[name].packing != Packing(INT4_BITS, INT4_LOW, INT4_GROUP) or inputs % INT4_CHANNELS:
        return None
    if (found := graph.constants.packed(name)) is None:
        return None
    values, multiples = found
    sizes = outputs * inputs // 2, outputs * inputs // INT4_GROUP // 2
    if any(part.dtype != np.uint8 for part in found) or (values.size, multiples.size) != sizes:
        return None  # reading the weight says what is wrong with it
    return StoredInt4(values.reshape(outputs, inputs // 2), multiples.reshape(outputs, inputs // INT4_GROUP // 2))


def pack_int4(weight: np.ndarray | StoredInt4, plan: PanelPacking) -> np.ndarray:
    """Pack the weight of a linear layer.

    Args:
        weight: the weight in a file, or s8[outputs, inputs], each group of ``INT4_GROUP`` inputs a multiple of values
            of 4 bits.
        plan: Panels to pack into; the number of inputs is a multiple of ``INT4_CHANNELS``.

    Returns:
        u8[panel, line, `panel_line_bytes`], flattened.

    Raises:
        ValueError: a group does not consist of multiples of 4-bit values.
    """
    split = weight.split if isinstance(weight, StoredInt4) else lambda channels: _split(weight[channels])
    last, width = plan.order(plan.panels - 1), len(plan.order(0))
    some = max(1, PACKED_AT_ONCE // (width * 4 * plan.run))
    packed = []
    for first in range(0, plan.panels - 1, some):  # all columns of these panels have an output channel
        orders = [plan.order(panel) for panel in range(first, min(first + some, plan.panels - 1))]
        packed.append(_panels(*split(np.concatenate(orders)), len(orders)))
    inside = last < len(weight)
    steps, multiples = split(last[inside])
    columns = np.full((len(last), *steps.shape[1:]), -INT4_LOW | -INT4_LOW << 4, np.uint8)
    scales = np.zeros((len(last), *multiples.shape[1:]), np.uint8)
    columns[inside], scales[inside] = steps, multiples
    return np.concatenate([*packed, _panels(columns, scales, 1)])


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


def _panels(steps: np.ndarray, multiples: np.ndarray, count: int) -> np.ndarray:
    """Return the bytes of panels, u8[panel, line, byte], flattened.

    Args:
        steps: u8[panel and column, line, step, 4].
        multiples: u8[panel and column, line].
        count: Number of panels.
    """
    lines = steps.shape[1]
    quads = steps.view(np.uint32).reshape(count, -1, *steps.shape[1:3])  # transposed much faster than bytes
    values = quads.transpose(0, 2, 3, 1).reshape(count, lines, -1).view(np.uint8)
    return np.concatenate([multiples.reshape(count, -1, lines).transpose(0, 2, 1), values], axis=2).ravel()


def panel_line_bytes(blocks: int) -> int:
    """Return the bytes of a line of a panel."""
    return (INT4_MULTIPLES + INT4_CHANNELS // 8 * 64) * blocks
