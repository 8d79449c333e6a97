"""Weights, biases and factors in the order kernels read them. NumPy in, bytes out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from intaglio.kernels import permutation


@dataclass(frozen=True)
class PanelPacking:
    """How a weight [outputs, inputs per group, taps y, taps x] becomes panels of ``16 * blocks`` outputs.

    ``packed``: columns are permuted for kernels that pack (`permutation`). ``joined``: a row of taps is one run of
    bytes (one group, neighbouring taps). ``first``: input channel at which each panel's run starts; ``cover``:
    channels (or bytes of joined taps) in a run.
    """

    outputs: int
    blocks: int
    packed: bool
    joined: bool
    first: tuple[int, ...]
    cover: int

    @property
    def panels(self) -> int:
        return len(self.first)

    @property
    def last_blocks(self) -> int:
        """Blocks of 16 in the last panel."""
        return -(-(self.outputs - (self.panels - 1) * 16 * self.blocks) // 16)

    @property
    def mask(self) -> int:
        """A bit for every channel of a full panel."""
        return (1 << 16 * self.blocks) - 1

    @property
    def last_mask(self) -> int:
        """A bit for every channel of the last panel."""
        return (1 << self.outputs - (self.panels - 1) * 16 * self.blocks) - 1

    @property
    def run(self) -> int:
        """4-byte steps of one run."""
        return -(-self.cover // 4)

    def order(self, panel: int) -> np.ndarray:
        """Output channel of every column of a panel; past the end where there is none."""
        last = panel == self.panels - 1
        return panel * 16 * self.blocks + _columns(self.packed, self.last_blocks if last else self.blocks)

    @cached_property
    def columns(self) -> np.ndarray:
        """`order` of all panels, one after the other."""
        return np.concatenate([self.order(panel) for panel in range(self.panels)])


@cache
def _columns(packed: bool, blocks: int) -> np.ndarray:
    return np.array(permutation(packed, blocks))


def packing(
    outputs: int, inputs: int, groups: int, taps_x: int, dilation_x: int, blocks: int, packed: bool
) -> PanelPacking:
    """Panels for a layer; ``inputs`` and ``outputs`` count all groups.

    Groups smaller than a panel share it: the run covers all their channels, with zeros where a group does not look.
    """
    joined = groups == 1 and (taps_x == 1 or dilation_x == 1)
    per_group, per_group_out = inputs // groups, outputs // groups
    width = 16 * blocks
    starts, stops = [], []
    for begin in range(0, outputs, width):
        end = min(begin + width, outputs) - 1
        starts.append(begin // per_group_out * per_group)
        stops.append((end // per_group_out + 1) * per_group)
    cover = max(stop - start for start, stop in zip(starts, stops, strict=True))
    first = tuple(min(start, inputs - cover) for start in starts)
    return PanelPacking(outputs, blocks, packed, joined, first, cover * (taps_x if joined else 1))


def pack_weights(weight: np.ndarray, plan: PanelPacking, groups: int) -> np.ndarray:
    """s8[outputs, inputs per group, taps y, taps x] -> s8[panel][tap row][tap][run][column][4], flat."""
    outputs, _, taps_y, taps_x = weight.shape
    runs = 1 if plan.joined else taps_x
    parts = []
    for panel in range(plan.panels):
        order = plan.order(panel)
        inside = order < outputs
        dense = _panel(weight, order[inside], plan, panel, groups)
        padded = np.zeros((len(order), taps_y, runs, 4 * plan.run), np.int8)
        padded[inside, :, :, : plan.cover] = dense.reshape(len(dense), taps_y, runs, -1)
        quads = padded.view(np.int32)  # moving four bytes at a time is what makes this fast
        parts.append(quads.transpose(1, 2, 3, 0).ravel())
    return np.concatenate(parts).view(np.int8)


def _panel(weight: np.ndarray, outputs: np.ndarray, plan: PanelPacking, panel: int, groups: int) -> np.ndarray:
    """s8[outputs, taps y, taps x, channels of a run]: zeros where a group does not look."""
    rows = weight[outputs].transpose(0, 2, 3, 1)
    if groups == 1:
        return rows
    per_group, taps_x = rows.shape[3], rows.shape[2]
    starts = outputs // (plan.outputs // groups) * per_group - plan.first[panel]
    dense = np.zeros((*rows.shape[:3], plan.cover // (taps_x if plan.joined else 1)), np.int8)
    np.put_along_axis(dense, (starts[:, None] + np.arange(per_group))[:, None, None, :], rows, 3)
    return dense


def pack_columns(values: np.ndarray, plan: PanelPacking) -> np.ndarray:
    """One value per output (or one for all) -> column order, padded with zeros to whole blocks."""
    spread = np.zeros(plan.panels * 16 * plan.blocks, values.dtype)
    spread[: plan.outputs] = values
    return spread[plan.columns]
