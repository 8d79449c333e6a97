"""Rounding methods for weights that minimize the error of an operator's results instead of the error of each weight.

The error is the squared difference of the results over the calibration data. With ``e`` = weights minus their rounded
values it is ``e M e^T``, where M are the second moments of the operand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from intaglio import numerics
from intaglio.quant.correct.second_moments import Moments
from intaglio.quant.recipes.choices import Rounding

CANCELLATION = 1e-12
"""Share of the error for damped moments that the error without damping, a difference, may be wrong by."""
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


class RoundedRows(NamedTuple):
    """Quantized weights, float64 [groups, rows, k], and the errors of their rows, [groups, rows].

    Attributes:
        quantized: the quantized weights.
        error: the error of each row.
        nearest_error: the error of each row rounded to nearest.
    """

    quantized: torch.Tensor
    error: torch.Tensor
    nearest_error: torch.Tensor


Round = Callable[[torch.Tensor, torch.Tensor, Moments, int, int], RoundedRows]
"""A rounding method: (weight, step, moments, smallest, largest quantized value) -> quantized values and errors."""


def nearest(weight: torch.Tensor, step: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Round weights, float64 [groups, rows, k], to the nearest step, ties to even."""
    return numerics.round_clamp(weight / step, low, high)


def gptq(weight: torch.Tensor, step: torch.Tensor, found: Moments, low: int, high: int) -> RoundedRows:
    """Round column by column, and spread each error over the columns that are not yet rounded.

    This is algorithm 1 of GPTQ (Frantar et al. 2022), with columns in the order of decreasing moments, in the form of
    Babai's nearest plane algorithm (Chen et al. 2025): it reads the Cholesky factor of the moments instead of that of
    their inverse, and the values are the same. Rows that do not gain keep nearest rounding.
    """
    plain = nearest(weight, step, low, high)
    plain_error = loss(plain, weight, step, found.matrix)
    if found.factor is None:
        return RoundedRows(plain, plain_error, plain_error)
    place = found.factor.order[:, None].expand_as(weight)
    columns, steps = weight.gather(2, place), step.expand_as(weight).gather(2, place)
    spread = _spread(columns, torch.zeros_like(columns), steps, found.factor.lower, low, high)
    chosen = torch.zeros_like(columns).scatter(2, place, spread.quantized)
    # The error for damped moments is a sum over the columns; what damping adds to it is subtracted.
    damped = (spread.missed.square() @ found.factor.pivots[..., None])[..., 0]
    error = damped - (spread.error.square() @ found.factor.added[..., None])[..., 0]
    return _better_rows(chosen, error.clamp_min(0) + CANCELLATION * damped, plain, plain_error)


class _Spread(NamedTuple):
    """Rounded columns, [groups, rows, k].

    Attributes:
        quantized: the quantized values.
        error: the weights minus their rounded values.
        missed: what the quantized values stand for, minus their rounded values.
    """

    quantized: torch.Tensor
    error: torch.Tensor
    missed: torch.Tensor


def _spread(
    weight: torch.Tensor, offset: torch.Tensor, steps: torch.Tensor, lower: torch.Tensor, low: int, high: int
) -> _Spread:
    """Round columns from the last to the first.

    The errors of the second half are spread over the first half by one matrix product. Columns are rounded one by one
    only when few are left.

    Args:
        weight: the weights, [groups, rows, k].
        offset: what the errors of columns behind these add to them, [groups, rows, k].
        steps: the distance of quantized values, [groups, rows, k].
        lower: the triangular factor of the moments.
        low: the smallest quantized value.
        high: the largest quantized value.
    """
    width = weight.shape[2]
    if width > FEW_COLUMNS:
        half = width // 2
        behind = _spread(weight[..., half:], offset[..., half:], steps[..., half:], lower[:, half:, half:], low, high)
        moved = offset[..., :half] + behind.error @ lower[:, half:, :half]
        front = _spread(weight[..., :half], moved, steps[..., :half], lower[:, :half, :half], low, high)
        return _Spread(*(torch.cat(parts, 2) for parts in zip(front, behind, strict=True)))
    columns, sizes = weight.mT, steps.mT
    wanted = (columns + offset.mT).contiguous()
    quantized, error = torch.empty_like(wanted), torch.empty_like(wanted)
    for i in reversed(range(width)):
        quantized[:, i] = numerics.round_clamp(wanted[:, i] / sizes[:, i], low, high)
        error[:, i] = columns[:, i] - quantized[:, i] * sizes[:, i]
        wanted[:, :i] += lower[:, i, :i, None] * error[:, i, None]
    return _Spread(quantized.mT, error.mT, (wanted - quantized * sizes).mT)


def adaround(weight: torch.Tensor, step: torch.Tensor, found: Moments, low: int, high: int) -> RoundedRows:
    """Choose between rounding up and down for each weight by gradient descent (Nagel et al. 2020, section 3.3).

    It minimizes the same error by `ITERATIONS` steps of Adam in float32. Rows that do not gain keep nearest rounding.
    """
    plain, moments = nearest(weight, step, low, high), found.matrix
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
            cost = 2 * ((error.detach() @ matrix) * error).sum()
            if i > WARM * ITERATIONS:
                sharpness = 20 - 18 * (i / ITERATIONS - WARM) / (1 - WARM)
                cost = cost + REGULARIZATION * (1 - (2 * soft - 1).abs() ** sharpness).sum()
            optimizer.zero_grad()
            cost.backward()
            optimizer.step()
    chosen = (floor + (logits.detach() >= 0)).clamp(low, high)
    chosen_error, plain_error = (loss(quantized, weight, step, moments) for quantized in (chosen, plain))
    return _better_rows(chosen, chosen_error, plain, plain_error)


ROUNDINGS: dict[str, Round] = {Rounding.GPTQ: gptq, Rounding.ADAROUND: adaround}
"""Rounding methods that read moments, by name."""


def loss(quantized: torch.Tensor, weight: torch.Tensor, step: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return the error ``e M e^T`` of each row, [groups, rows]."""
    error = weight - quantized * step
    return ((error @ matrix) * error).sum(2)


def signal_power(weight: torch.Tensor, matrix: torch.Tensor) -> float:
    """Return the power of the results, to which errors are compared in reports. It is computed in float32."""
    rows = weight.float()
    return float(((rows @ matrix.float()) * rows).sum(dtype=torch.float64))


def _better_rows(
    chosen: torch.Tensor, chosen_error: torch.Tensor, plain: torch.Tensor, plain_error: torch.Tensor
) -> RoundedRows:
    """Return the chosen rounding in rows where its error is less, and rounding to nearest in all other rows."""
    gains = chosen_error < plain_error
    error = torch.where(gains, chosen_error, plain_error)
    return RoundedRows(torch.where(gains[..., None], chosen, plain), error, plain_error)
