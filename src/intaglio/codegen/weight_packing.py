"""Pack weights, biases and scale factors in the order in which GEMM kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from intaglio.kernels import permutation


@dataclass(frozen=True)
class PanelPacking:
    """Layout of a weight `[outputs, inputs per group, kernel y, kernel x]` as panels of `16 * blocks` output channels.

    Attributes:
        outputs: Output channels.
        blocks: Blocks of 16 columns in a full panel.
        packed: Columns are permuted for kernels that pack results (see `permutation`).
        joined: All taps of a kernel row form one run of bytes; requires one group and adjacent taps.
        first: First input channel of each panel's run.
        cover: Input channels of a run, or bytes if taps are joined.
    """

    outputs: int
    blocks: int
    packed: bool
    joined: bool
    first: tuple[int, ...]
    cover: int

    @property
    def panels(self) -> int:
        """Return the number of panels."""
        return len(self.first)

    @property
    def last_blocks(self) -> int:
        """Return the number of blocks of 16 columns in the last panel."""
        return -(-(self.outputs - (self.panels - 1) * 16 * self.blocks) // 16)

    @property
    def mask(self) -> int:
        """Return a bit mask of the channels of a full panel."""
        return (1 << 16 * self.blocks) - 1

    @property
    def last_mask(self) -> int:
        """Return a bit mask of the channels of the last panel."""
        return (1 << self.outputs - (self.panels - 1) * 16 * self.blocks) - 1

    @property
    def run(self) -> int:
        """Return the number of 4-byte groups in a run, each of which is one step of the kernel."""
        return -(-self.cover // 4)

    def order(self, panel: int) -> np.ndarray:
        """Return the output channel of each column of a panel. Columns without a channel have indices past the end."""
        last = panel == self.panels - 1
        return panel * 16 * self.blocks + _columns(self.packed, self.last_blocks if last else self.blocks)

    @cached_property
    def columns(self) -> np.ndarray:
        """Return the output channels of the columns of all panels, concatenated."""
        return np.concatenate([self.order(panel) for panel in range(self.panels)])


@cache
def _columns(packed: bool, blocks: int) -> np.ndarray:
    return np.array(permutation(packed, blocks))


def packing(
    outputs: int, inputs: int, groups: int, taps_x: int, dilation_x: int, blocks: int, packed: bool
) -> PanelPacking:
    """Return the panels of a convolution or linear layer.

    Groups smaller than a panel share one: its run covers the channels of all of them, with zero weights for other
    groups.

    Args:
        outputs: Output channels of all groups.
        inputs: Input channels of all groups.
        groups: Number of groups.
        taps_x: Kernel width.
        dilation_x: Dilation along the width.
        blocks: Blocks of 16 columns in a panel.
        packed: Whether columns are permuted for kernels that pack results.
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
    """Pack the weights of a layer.

    Args:
        weight: s8[outputs, inputs per group, kernel y, kernel x].
        plan: Panels to pack into.
        groups: Number of groups.

    Returns:
        s8[panel, kernel y, kernel x (1 if taps are joined), run, column, 4], flattened.
    """
    outputs, _, taps_y, taps_x = weight.shape
    runs = 1 if plan.joined else taps_x
    parts = []
    for panel in range(plan.panels):
        order = plan.order(panel)
        inside = order < outputs
        dense = _panel(weight, order[inside], plan, panel, groups)
        padded = np.zeros((len(order), taps_y, runs, 4 * plan.run), np.int8)
        padded[inside, :, :, : plan.cover] = dense.reshape(len(dense), taps_y, runs, -1)
        quads = padded.view(np.int32)  # transposing 4-byte elements is much faster than bytes
        parts.append(quads.transpose(1, 2, 3, 0).ravel())
    return np.concatenate(parts).view(np.int8)


def _panel(weight: np.ndarray, outputs: np.ndarray, plan: PanelPacking, panel: int, groups: int) -> np.ndarray:
    """Return the weights of a panel, s8[outputs, kernel y, kernel x, channels of a run], zero for other groups."""
    rows = weight[outputs].transpose(0, 2, 3, 1)
    if groups == 1:
        return rows
    per_group, taps_x = rows.shape[3], rows.shape[2]
    starts = outputs // (plan.outputs // groups) * per_group - plan.first[panel]
    dense = np.zeros((*rows.shape[:3], plan.cover // (taps_x if plan.joined else 1)), np.int8)
    np.put_along_axis(dense, (starts[:, None] + np.arange(per_group))[:, None, None, :], rows, 3)
    return dense


def pack_columns(values: np.ndarray, plan: PanelPacking) -> np.ndarray:
    """Return one value per output channel, or one for all, in column order and padded with zeros to full panels."""
    spread = np.zeros(plan.panels * 16 * plan.blocks, values.dtype)
    spread[: plan.outputs] = values
    return spread[plan.columns]
