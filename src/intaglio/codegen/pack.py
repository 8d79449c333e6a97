"""Weights, biases and factors in the order kernels read them. NumPy in, bytes out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from intaglio.codegen.tile import permutation


@dataclass(frozen=True)
class Packing:
    """How a weight [outputs, inputs per group, taps y, taps x] becomes panels of ``16 * blocks`` outputs.

    ``joined``: a row of taps is one run of bytes (one group, neighbouring taps). ``first``: input channel at which each
    panel's run starts; ``cover``: channels (or bytes of joined taps) in a run.
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
    def run(self) -> int:
        """4-byte steps of one run."""
        return -(-self.cover // 4)

    @property
    def last_packed(self) -> bool:
        """Whether the last panel is full, and so packed like the rest."""
        return self.packed and self.outputs % (16 * self.blocks) == 0

    def order(self, panel: int) -> list[int]:
        """Output channel of every column of a panel; past the end where there is none."""
        last = panel == self.panels - 1
        blocks = self.last_blocks if last else self.blocks
        packed = self.last_packed if last else self.packed
        return [panel * 16 * self.blocks + column for column in permutation(packed, blocks)]


def packing(outputs: int, inputs: int, groups: int, taps_x: int, dilation_x: int, blocks: int, packed: bool) -> Packing:
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
    return Packing(outputs, blocks, packed, joined, first, cover * (taps_x if joined else 1))


def pack_weights(weight: np.ndarray, plan: Packing, groups: int) -> np.ndarray:
    """s8[outputs, inputs per group, taps y, taps x] -> s8[panel][tap row][tap][run][column][4], flat."""
    outputs, per_group, taps_y, taps_x = weight.shape
    groups_of = np.arange(outputs) // (outputs // groups)
    parts = []
    for panel in range(plan.panels):
        columns = plan.order(panel)
        channels = plan.cover // (taps_x if plan.joined else 1)
        dense = np.zeros((len(columns), taps_y, taps_x, channels), np.int8)
        for column, channel in enumerate(columns):
            if channel < outputs:
                start = int(groups_of[channel]) * per_group - plan.first[panel]
                dense[column, :, :, start : start + per_group] = weight[channel].transpose(1, 2, 0)
        runs = dense.reshape(len(columns), taps_y, 1, -1) if plan.joined else dense
        padded = np.zeros((*runs.shape[:3], 4 * plan.run), np.int8)
        padded[..., : runs.shape[3]] = runs
        quads = padded.reshape(len(columns), taps_y, runs.shape[2], plan.run, 4)
        parts.append(quads.transpose(1, 2, 3, 0, 4).ravel())
    return np.concatenate(parts)


def pack_columns(values: np.ndarray, plan: Packing, fill: float = 0) -> np.ndarray:
    """One value per output (or one for all) -> column order, padded to whole blocks."""
    spread = np.broadcast_to(values, (plan.outputs,)) if values.size == 1 else values
    parts = []
    for panel in range(plan.panels):
        order = np.array(plan.order(panel))
        inside = order < plan.outputs
        column = np.full(len(order), fill, spread.dtype)
        column[inside] = spread[order[inside]]
        parts.append(column)
    return np.concatenate(parts)
