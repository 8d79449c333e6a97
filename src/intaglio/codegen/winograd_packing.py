"""Transform the weights of 3x3 convolutions for Winograd's method; native/layers/winograd.h has the method."""

from __future__ import annotations

import numpy as np

from intaglio.codegen.weight_packing import PanelPacking
from intaglio.kernels.winograd_sizes import POSITIONS

TRANSFORM = np.array([[2, 0, 0], [1, 1, 1], [1, -1, 1], [0, 0, 2]], np.float32)
"""Twice the matrix G, so that sums of weights are integers, which float32 products add without rounding."""


def transformed_bytes(plan: PanelPacking, inputs: int) -> int:
    """Return the size of the transformed weights of ``inputs`` input channels."""
    return 2 * POSITIONS * plan.columns.size * inputs


def transform_weights(weight: np.ndarray, plan: PanelPacking) -> np.ndarray:
    """Return the sums of weights, s16[panels, 16 positions, inputs / 2, 16 outputs, 2].

    Args:
        weight: s8[outputs, inputs, 3, 3].
        plan: Layout of the panels, which have 16 output channels.
    """
    outputs, inputs, *_ = weight.shape
    padded = np.zeros((plan.columns.size, inputs, 9), np.float32)
    inside = plan.columns < outputs
    padded[inside] = weight[plan.columns[inside]].reshape(-1, inputs, 9)
    sums = np.kron(TRANSFORM, TRANSFORM) @ padded.reshape(-1, 9).T
    by_panel = sums.astype(np.int16).reshape(POSITIONS, plan.panels, 16, inputs // 2, 2)
    return np.ascontiguousarray(by_panel.transpose(1, 0, 3, 2, 4))
