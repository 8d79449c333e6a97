"""Rounding methods for weights that minimize the error of an operator's results instead of the error of each weight.

The error is the squared difference of the results over the calibration data. With ``e`` = weights minus their rounded
values it is ``e M e^T``, where M are the second moments of the operand.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from intaglio import numerics
from intaglio.quant.correct.linalg import permute
from intaglio.quant.correct.second_moments import Moments
from intaglio.quant.recipes.choices import Rounding

FEW_COLUMNS = 32
"""Up to this many columns are rounded one by one; more are split into halves."""
ITERATIONS = 10_000
"""Optimizer steps of AdaRound, as many as in the paper."""
RATE = 0.001
"""Learning rate of AdaRound."""
WARM = 0.2
"""Share of the iterations without regularization towards 0 or 1."""
REGULARIZATION = 0.01
"""Weight of the regularization."""
STRETCH = (-0.1, 1.1)
"""Ends that sigmoids are stretched to, so that they reach 0 and 1 at finite arguments (Nagel et al. 2020, eq. 23)."""

Round = Callable[[torch.Tensor, torch.Tensor, Moments, int, int], torch.Tensor]
"""A rounding method: (weight, step, moments, smallest, largest quantized value) -> quantized values."""


def nearest(weight: torch.Tensor, step: torch.Tensor, found: Moments, low: int, high: int) -> torch.Tensor:
    """Round weights, float64 [groups, rows, k], to the nearest step, ties to even."""
    return numerics.round_clamp(weight / step, low, high)


def gptq(weight: torch.Tensor, step: torch.Tensor, found: Moments, low: int, high: int) -> torch.Tensor:
    """Round column by column, and spread each error over the columns that are not yet rounded.

    This is algorithm 1 of GPTQ (Frantar et al. 2022), with columns in the order of decreasing moments. Rows that do not
    gain keep nearest rounding.
    """
    plain = nearest(weight, step, found, low, high)
    if found.factor is None:
        return plain
    order, factor = found.factor
    free, steps = permute(weight, order, 2), permute(step.expand_as(weight), order, 2)
    quantized, _ = _spread(free, steps, factor, low, high)
    chosen = torch.zeros_like(quantized).scatter(2, order[:, None].expand_as(quantized), quantized)
    return _better_rounding(chosen, plain, weight, step, found.matrix)


def _spread(
    free: torch.Tensor, steps: torch.Tensor, factor: torch.Tensor, low: int, high: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rounded columns and their errors, both [groups, rows, k].

    The error of the first half is spread over the second half by one matrix product. Columns are rounded one by one
    only when few are left.
    """
    width = free.shape[2]
    if width > FEW_COLUMNS:
        half = width // 2
        first, errors = _spread(free[..., :half], steps[..., :half], factor[:, :half, :half], low, high)
        rest = free[..., half:] - errors @ factor[:, :half, half:]
        last, more = _spread(rest, steps[..., half:], factor[:, half:, half:], low, high)
        return torch.cat((first, last), 2), torch.cat((errors, more), 2)
    columns, sizes = free.mT.clone(memory_format=torch.contiguous_format), steps.mT
    quantized, errors = torch.empty_like(columns), torch.empty_like(columns)
    for i in range(width):
        quantized[:, i] = numerics.round_clamp(columns[:, i] / sizes[:, i], low, high)
        errors[:, i] = (columns[:, i] - quantized[:, i] * sizes[:, i]) / factor[:, i, i, None]
        columns[:, i + 1 :] -= factor[:, i, i + 1 :, None] * errors[:, i, None]
    return quantized.mT, errors.mT


def adaround(weight: torch.Tensor, step: torch.Tensor, found: Moments, low: int, high: int) -> torch.Tensor:
    """Choose between rounding up and down for each weight by gradient descent (Nagel et al. 2020, section 3.3).

    It minimizes the same error by `ITERATIONS` steps of Adam in float32. Rows that do not gain keep nearest rounding.
    """
    plain, moments = nearest(weight, step, found, low, high), found.matrix
    signal = (weight**2 @ moments.diagonal(dim1=1, dim2=2)[..., None]).mean().clamp_min(1e-300)
    floor = (weight / step).floor()
    rest = (weight / step - floor - STRETCH[0]) / (STRETCH[1] - STRETCH[0])
    logits = torch.logit(rest.clamp(1e-6, 1 - 1e-6)).float().requires_grad_()
    exact, steps, below, matrix = weight.float(), step.float(), floor.float(), (moments / signal).float()
    optimizer = torch.optim.Adam([logits], lr=RATE)
    with torch.enable_grad():
        for i in range(ITERATIONS):
            soft = (logits.sigmoid() * (STRETCH[1] - STRETCH[0]) + STRETCH[0]).clamp(0, 1)
            error = exact - (below + soft).clamp(low, high) * steps
            # The gradient of e M e^T is 2 M e because M is symmetric, which saves one of two products.
            loss = 2 * ((error.detach() @ matrix) * error).sum()
            if i > WARM * ITERATIONS:
                sharpness = 20 - 18 * (i / ITERATIONS - WARM) / (1 - WARM)
                loss = loss + REGULARIZATION * (1 - (2 * soft - 1).abs() ** sharpness).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    chosen = (floor + (logits.detach() >= 0)).clamp(low, high)
    return _better_rounding(chosen, plain, weight, step, moments)


ROUNDINGS: dict[str, Round] = {Rounding.NEAREST: nearest, Rounding.GPTQ: gptq, Rounding.ADAROUND: adaround}
"""Rounding methods by name."""


def loss(quantized: torch.Tensor, weight: torch.Tensor, step: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return the error ``e M e^T`` of each row, [groups, rows]."""
    error = weight - quantized * step
    return ((error @ matrix) * error).sum(2)


def _better_rounding(
    chosen: torch.Tensor, plain: torch.Tensor, weight: torch.Tensor, step: torch.Tensor, matrix: torch.Tensor
) -> torch.Tensor:
    """Return the chosen rounding in rows where its error is less, and the plain one in all other rows."""
    gains = loss(chosen, weight, step, matrix) < loss(plain, weight, step, matrix)
    return torch.where(gains[..., None], chosen, plain)
