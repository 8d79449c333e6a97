"""Rounding methods for weights that minimize the error of an operator's results instead of the error of each weight.

The error is the squared difference of the results over the calibration data. With ``e`` = weights minus their rounded
values it is ``e M e^T``, where M are the second moments of the operand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from intaglio import numerics
from intaglio.quant.correct.linalg import COLUMN_BLOCK, Factor
from intaglio.quant.correct.second_moments import Moments
from intaglio.quant.correct.weight_columns import Columns, round_columns
from intaglio.quant.recipes.choices import Rounding

CANCELLATION = 1e-12
"""Share of the error for damped moments that the error without damping, a difference, may be wrong by."""
ROUNDED_AT_ONCE = 1 << 22
"""Elements of a weight that are rounded at once; the rows of a larger weight are divided."""
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


Round = Callable[[torch.Tensor, torch.Tensor, Moments, int, int, torch.Tensor | None], RoundedRows]
"""A rounding method: (weight, step, moments, smallest, largest quantized value, errors of rounding to nearest if they
are known) -> quantized values and errors."""


def nearest(weight: torch.Tensor, step: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Round weights, float64 [groups, rows, k], to the nearest step, ties to even."""
    return numerics.round_clamp(weight / step, low, high)


def gptq(
    weight: torch.Tensor,
    step: torch.Tensor,
    found: Moments,
    low: int,
    high: int,
    plain_error: torch.Tensor | None = None,
) -> RoundedRows:
    """Round column by column, and spread each error over the columns that are not yet rounded.

    This is algorithm 1 of GPTQ (Frantar et al. 2022), with columns in the order of decreasing moments, in the form of
    Babai's nearest plane algorithm (Chen et al. 2025): it reads the Cholesky factor of the moments instead of that of
    their inverse, and the values are the same. Rows that do not gain keep nearest rounding.
    """
    plain = nearest(weight, step, low, high)
    if plain_error is None:
        plain_error = found.errors(weight - plain * step)
    factor = found.factor
    if factor is None:
        return RoundedRows(plain, plain_error, plain_error)
    count = max(1, ROUNDED_AT_ONCE // (weight.shape[0] * weight.shape[2]))
    parts = zip(weight.split(count, 1), step.expand(-1, weight.shape[1], -1).split(count, 1), strict=True)
    chosen, error = (torch.cat(part, 1) for part in zip(*(_spread(*p, factor, low, high) for p in parts), strict=True))
    return _better_rows(chosen, error, plain, plain_error)


def _spread(
    weight: torch.Tensor, steps: torch.Tensor, factor: Factor, low: int, high: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return quantized rows, [groups, rows, k], and their errors, [groups, rows], with errors spread.

    Columns are rounded one by one within blocks. The errors of all columns behind a block are spread over it at once.
    """
    columns = Columns.of(weight, steps, factor)
    spread = factor.spreading(columns.error)
    for start in reversed(range(0, weight.shape[2], COLUMN_BLOCK)):
        stop = min(start + COLUMN_BLOCK, weight.shape[2])
        round_columns(columns, start, spread(start, stop), low, high)
    damped, added = columns.totals  # the error for damped moments, and what damping adds to it
    return columns.chosen(), (damped - added).clamp_min(0) + CANCELLATION * damped


def qronos(
    weight: torch.Tensor,
    step: torch.Tensor,
    found: Moments,
    low: int,
    high: int,
    plain_error: torch.Tensor | None = None,
) -> RoundedRows:
    """Round as GPTQ does, for the results that the weight has with the operands of the float model.

    The error is that of Qronos (Zhang et al. 2025) and GPTAQ (Li et al. 2025). It is smallest for the solution of a
    least-squares problem, to which GPTQ is applied. Rows that do not gain keep nearest rounding.
    """
    plain = nearest(weight, step, low, high)
    if plain_error is None:
        plain_error = found.result_errors(weight, plain * step)
    chosen = gptq(found.target(weight), step, found, low, high).quantized
    return _better_rows(chosen, found.result_errors(weight, chosen * step), plain, plain_error)


def adaround(
    weight: torch.Tensor,
    step: torch.Tensor,
    found: Moments,
    low: int,
    high: int,
    plain_error: torch.Tensor | None = None,
) -> RoundedRows:
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
    if plain_error is None:
        plain_error = found.errors(weight - plain * step)
    return _better_rows(chosen, found.errors(weight - chosen * step), plain, plain_error)


ROUNDINGS: dict[str, Round] = {Rounding.GPTQ: gptq, Rounding.QRONOS: qronos, Rounding.ADAROUND: adaround}
"""Rounding methods that read moments, by name."""


def _better_rows(
    chosen: torch.Tensor, chosen_error: torch.Tensor, plain: torch.Tensor, plain_error: torch.Tensor
) -> RoundedRows:
    """Return the chosen rounding in rows where its error is less, and rounding to nearest in all other rows."""
    gains = chosen_error < plain_error
    error = torch.where(gains, chosen_error, plain_error)
    return RoundedRows(torch.where(gains[..., None], chosen, plain), error, plain_error)
