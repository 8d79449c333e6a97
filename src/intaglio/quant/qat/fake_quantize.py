"""Fake-quantization: float values rounded to the levels they will have, with gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from intaglio import numerics
from intaglio.errors import CalibrationError
from intaglio.ir import QParams
from intaglio.quant.annotate.per_token import row_operators
from intaglio.quant.annotate.sites import Fixed, Observed, Site
from intaglio.quant.qdq.qparams import OwnScales
from intaglio.quant.qdq.weight_grid import weight_grid

AVERAGING = 0.01
"""Share of the newest batch's extremes in their moving averages."""
SMALLEST = 2.0**-100
"""What a learned scale cannot fall below."""


@dataclass
class Mode:
    """What the modules of one model have in common. ``observe``: scales follow the values; ``learn``: they are trained.
    Never both. ``quantize``: values are rounded at all. ``frozen``: batch norms use their running statistics.
    """

    observe: bool = True
    learn: bool = False
    quantize: bool = True
    frozen: bool = False


class RoundToLevels(torch.autograd.Function):
    """``(clamp(rne(x * (1/s)) + zp, low, high) - zp) * s``, as numerics.py has it, and ``m`` times that in steps of
    ``s * m`` for groups of weights with multiples m.

    With v = x / (s * m): the gradient passes where low <= v + zp <= high, and is 0 outside (straight-through). That of
    s is ``round(v) - v`` inside and ``level - zp`` outside, times m (Esser et al. 2020, eq. 3); that of zp ``-s``
    outside and 0 inside (Bhalgat et al. 2020, eq. 5); both times ``share``, see `gradient_share`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor,
        multiples: torch.Tensor | None,
        low: int,
        high: int,
        share: float,
    ) -> torch.Tensor:
        steps = scale if multiples is None else scale * multiples
        v = x * (1.0 / steps)
        level = numerics.round_clamp(v, low, high, zero_point).sub_(zero_point)
        ctx.save_for_backward(v, scale, zero_point, multiples)
        ctx.bounds, ctx.share = (low, high), share
        return (level if multiples is None else level * multiples) * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        v, scale, zero_point, multiples = ctx.saved_tensors
        low, high = (bound - zero_point for bound in ctx.bounds)
        inside = (v >= low) & (v <= high)
        grad_x = grad * inside
        grad_scale = grad_zero = None
        if ctx.needs_input_grad[1]:
            slope = torch.where(inside, torch.round(v) - v, numerics.round_clamp(v, low, high))
            slope = slope if multiples is None else slope * multiples
            grad_scale = (grad * slope).sum_to_size(scale.shape) * ctx.share
        if ctx.needs_input_grad[2]:
            grad_zero = (grad * ~inside * -scale).sum_to_size(zero_point.shape) * ctx.share
        return grad_x, grad_scale, grad_zero, None, None, None, None


def gradient_share(values: int, levels: int) -> float:
    """1/sqrt(n * levels) for n values a scale: what its gradient is multiplied by, so that scales move as weights do
    (Esser et al. 2020, section 2.2).

    ``levels`` is the paper's Q_P, how many are above zero. Their start, 2 * mean|x| / sqrt(Q_P) there, is here what
    calibration or the moving averages found, and for weights what `convert` would give them.
    """
    return (max(values, 1) * levels) ** -0.5


def longer_side(low: int, high: int, zero: int) -> int:
    """Levels above the zero point, or below it where those are more: half of all where it lies in the middle."""
    return max(high - zero, zero - low)


class FakeQuantize(nn.Module):
    """An activation site's values, and those that share its parameters.

    ``scale``, ``zero_point``: parameters of the levels, trained while scales are learned; ``low``, ``high``: moving
    averages of the extremes, float64, which they follow otherwise. Before any value is seen nothing is rounded.
    """

    low: torch.Tensor
    high: torch.Tensor
    seen: torch.Tensor

    def __init__(self, site: Site, channels: int, rank: int, mode: Mode) -> None:
        super().__init__()
        self.site, self.mode = site, mode
        self.shape = [channels if axis == site.axis else 1 for axis in range(rank)] if site.axis is not None else []
        start, zero = torch.zeros(channels, dtype=torch.float64), float(min(max(0, site.qmin), site.qmax))
        self.register_buffer("low", start)
        self.register_buffer("high", start.clone())
        self.register_buffer("seen", torch.tensor(isinstance(site.spec, Fixed)))
        self.scale = nn.Parameter(torch.ones(channels), requires_grad=False)
        self.zero_point = nn.Parameter(torch.full((channels,), zero), requires_grad=False)
        if isinstance(site.spec, Fixed):
            self.scale.data.fill_(site.spec.scale)
            self.zero_point.data.copy_(torch.tensor(site.spec.zero_point))

    @property
    def observed(self) -> bool:
        """Whether its parameters follow from values; else they are known beforehand."""
        return isinstance(self.site.spec, Observed)

    def forward(self, x: torch.Tensor, counts: bool = True) -> torch.Tensor:
        """``counts``: whether the values enter the averages."""
        if self.mode.observe and self.observed:
            if self.training and counts:
                self._observe(x.detach())
            elif self.seen:
                self.follow()  # averages may have come from another process, as buffers do
        if not self.mode.quantize or not self.seen:
            return x
        scale, zero_point = self.parameters_of_levels()
        low, high = self.site.qmin, self.site.qmax
        levels = max(longer_side(low, high, int(zero)) for zero in zero_point.tolist())
        share = gradient_share(x.numel() // max(len(x), 1), levels)
        return RoundToLevels.apply(x, scale.reshape(self.shape), zero_point.reshape(self.shape), None, low, high, share)

    def parameters_of_levels(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero point as they are used: positive, and a whole number within the levels."""
        scale = self.scale.abs().clamp_min(SMALLEST)
        clamped = self.zero_point.clamp(self.site.qmin, self.site.qmax)
        return scale, clamped + (clamped.round() - clamped).detach()

    def _observe(self, x: torch.Tensor) -> None:
        if not x.numel():
            return
        axes = None if self.site.axis is None else [axis for axis in range(x.dim()) if axis != self.site.axis]
        low, high = (x.amin(axes), x.amax(axes)) if axes else torch.aminmax(x)
        if not (low.isfinite().all() and high.isfinite().all()):
            raise CalibrationError(
                self.site.name,
                self.site.origin.operator or None,
                "values that are not finite while training",
                source=self.site.origin.source or None,
                remedy="check the data; if training diverged, a lower rate, or batch norms that are not frozen yet",
            )
        share = AVERAGING if self.seen else 1.0
        self.low.lerp_(low.double().reshape(-1), share)
        self.high.lerp_(high.double().reshape(-1), share)
        self.seen.fill_(True)
        self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        """Scale and zero point from the averages."""
        ends = list(zip(self.low.tolist(), self.high.tolist(), strict=True))
        if isinstance(self.site.spec, Observed) and self.site.spec.symmetric:
            ends = [(min(low, -high), max(high, -low)) for low, high in ends]
        found = [numerics.affine(low, high, self.site.qmin, self.site.qmax) for low, high in ends]
        scales, zeros = zip(*found, strict=True)
        self.scale.copy_(torch.tensor(scales))
        self.zero_point.copy_(torch.tensor(zeros))

    @torch.no_grad()
    def start(self, q: QParams) -> None:
        """From known parameters: averages are the ends of their range, which gives them back exactly."""
        scales, zeros = (torch.tensor(values, dtype=torch.float64) for values in (q.scales, q.zeros))
        self.low.copy_((q.qmin - zeros) * scales)
        self.high.copy_((q.qmax - zeros) * scales)
        self.scale.copy_(scales)
        self.zero_point.copy_(zeros)
        self.seen.fill_(True)

    def learnable(self) -> list[nn.Parameter]:
        """The scale; the zero point too where the range has two sides."""
        zero, site = self.zero_point, self.site
        inner = bool(((zero > site.qmin) & (zero < site.qmax)).all())
        symmetric = isinstance(site.spec, Observed) and site.spec.symmetric
        if not self.observed:
            return []
        return [self.scale, zero] if inner and not symmetric else [self.scale]

    def qparams(self) -> QParams:
        scale, zero_point = self.parameters_of_levels()
        zeros = tuple(int(zero) for zero in zero_point.tolist())
        return QParams(tuple(scale.tolist()), zeros, self.site.qmin, self.site.qmax, self.site.axis)

    def extra_repr(self) -> str:
        return f"{self.site.name}, {self.site.qmin}..{self.site.qmax}"


class FakeQuantizeWeight(nn.Module):
    """A weight's values. ``scale``: one, or one a channel; while it is not learned, what the weight asks for now.

    ``constant``: name of the weight in the prepared graph; ``own``: an array's scales by the rule that `convert` goes
    by.
    """

    def __init__(self, site: Site, constant: str, weight: torch.Tensor, own: OwnScales, mode: Mode) -> None:
        super().__init__()
        self.site, self.constant, self.own, self.mode = site, constant, own, mode
        self.scale = nn.Parameter(torch.from_numpy(own(weight.detach().numpy())).clone(), requires_grad=False)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        if not self.mode.quantize:
            return weight
        if self.mode.observe:
            self.follow(weight)
        site, kind, axis = self.site, self.site.record, self.own.axis or 0
        scale, multiples = self.positive_scale(), None
        if site.group:
            grid = weight_grid(weight.detach().numpy(), scale.detach().numpy(), kind, site.group, axis)
            multiples = torch.from_numpy(grid.multiples.astype(np.float32))
        shape = [1] * weight.dim()
        shape[axis] = len(scale)
        share = gradient_share(weight.numel() // len(scale), kind.qmax)
        zero = torch.zeros(())
        return RoundToLevels.apply(weight, scale.reshape(shape), zero, multiples, kind.qmin, kind.qmax, share)

    @torch.no_grad()
    def follow(self, weight: torch.Tensor) -> None:
        self.scale.copy_(torch.from_numpy(self.own(weight.detach().numpy())))

    def positive_scale(self) -> torch.Tensor:
        return self.scale.abs().clamp_min(SMALLEST)

    def learnable(self) -> list[nn.Parameter]:
        return [self.scale]

    def qparams(self) -> QParams:
        scales = tuple(self.positive_scale().tolist())
        return QParams(scales, (0,) * len(scales), self.site.qmin, self.site.qmax, self.site.axis)

    def extra_repr(self) -> str:
        return f"{self.site.name}, {self.site.record.qmin}..{self.site.record.qmax}"


def fake_bias(bias: torch.Tensor, x: FakeQuantize, weight: FakeQuantizeWeight) -> torch.Tensor:
    """A bias in int32 steps of ``s_x * s_w``; its gradient passes as it is."""
    if not x.mode.quantize or not x.seen:
        return bias
    with torch.no_grad():
        scales = weight.positive_scale().repeat(len(bias) // weight.scale.numel()).numpy()
        step = float(x.parameters_of_levels()[0][0])
        levels = numerics.bias_steps(bias.detach().numpy(), step, scales)
        units = numerics.accumulator_scale(step, scales).astype(np.float32)
        real = torch.from_numpy(levels.astype(np.float32) * units)
    return bias + (real - bias.detach())


def fake_shortcut(x: torch.Tensor, levels: FakeQuantize, low: int, high: int) -> torch.Tensor:
    """The 16 bits of a value whose levels have 8: `numerics.widen`, with gradients for the scale of these."""
    if not levels.mode.quantize or not levels.seen:
        return x
    scale, zero_point = levels.parameters_of_levels()
    q = levels.qparams()
    wide = numerics.widen(q.step, q.zero)
    share = gradient_share(x.numel() // max(len(x), 1), longer_side(low, high, wide.zero_point))
    fine = scale.reshape([]) / numerics.QUANT_STEPS
    fine = fine + (wide.scale - fine).detach()
    shifted = zero_point.reshape([]) * numerics.QUANT_STEPS + (wide.zero_point - q.zero * numerics.QUANT_STEPS)
    return RoundToLevels.apply(x, fine, shifted, None, low, high, share)


class Switch(nn.Module):
    """Tells functions without parameters of their own whether values are rounded."""

    def __init__(self, mode: Mode) -> None:
        super().__init__()
        self.mode = mode


def fake_fixed(switch: Switch, x: torch.Tensor, scale: float, zero_point: int, low: int, high: int) -> torch.Tensor:
    """Levels whose parameters are known beforehand."""
    if not switch.mode.quantize:
        return x
    values = torch.tensor(scale), torch.tensor(float(zero_point))
    return RoundToLevels.apply(x, *values, None, low, high, 0.0)


def fake_rows(switch: Switch, x: torch.Tensor, mode: str) -> torch.Tensor:
    """What is quantized while the model runs; nothing is clipped, so all of the gradient passes."""
    if not switch.mode.quantize:
        return x
    ops = row_operators()
    with torch.no_grad():
        real = ops.dequantize_rows(*ops.quantize_rows(x.detach().contiguous(), mode))
    return x + (real - x.detach())
