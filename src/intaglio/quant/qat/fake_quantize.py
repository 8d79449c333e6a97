"""Fake quantization with gradients for values, scales and zero points."""

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
from intaglio.quant.annotate.per_token import per_token_operators
from intaglio.quant.annotate.sites import Fixed, Observed, Site
from intaglio.quant.qdq.qparams import WeightScaleRule
from intaglio.quant.qdq.weight_grid import weight_grid

AVERAGING = 0.01
"""Weight of a new batch in the moving averages of the extremes."""
SMALLEST_SCALE = 2.0**-100
"""Lower bound of a learned scale."""


@dataclass
class FakeQuantizeMode:
    """Switches that all modules of a model share. `observe` and `learn` are never both set.

    Attributes:
        observe: scales follow the values.
        learn: scales are trained.
        quantize: values are rounded.
        frozen: batch norms use their running statistics in training.
    """

    observe: bool = True
    learn: bool = False
    quantize: bool = True
    frozen: bool = False


class FakeQuantizeFunction(torch.autograd.Function):
    """Computes ``(clamp(rne(x * (1/s)) + zp, low, high) - zp) * s``, as in `intaglio.numerics`.

    Weight groups with multiples m use steps of ``s * m``. With v = x / (s * m), the gradient of x passes where low <= v
    + zp <= high and is 0 outside (straight-through estimator). The gradient of s is ``round(v) - v`` inside and
    ``clamp(v)`` outside, times m (Esser et al. 2020, eq. 3). The gradient of zp is ``-s`` outside and 0 inside (Bhalgat
    et al. 2020, eq. 5). Both are multiplied by ``gradient_factor`` (see `lsq_gradient_factor`).
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
        gradient_factor: float,
    ) -> torch.Tensor:
        """Return the quantized and dequantized values, and save what the gradients need."""
        steps = scale if multiples is None else scale * multiples
        v = x * (1.0 / steps)
        quantized = numerics.round_clamp(v, low, high, zero_point).sub_(zero_point)
        ctx.save_for_backward(v, scale, zero_point, multiples)
        ctx.bounds, ctx.gradient_factor = (low, high), gradient_factor
        return (quantized if multiples is None else quantized * multiples) * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of ``x``, ``scale`` and ``zero_point``, and ``None`` for the other arguments."""
        v, scale, zero_point, multiples = ctx.saved_tensors
        low, high = (bound - zero_point for bound in ctx.bounds)
        inside = (v >= low) & (v <= high)
        grad_x = grad * inside
        grad_scale = grad_zero = None
        if ctx.needs_input_grad[1]:
            slope = torch.where(inside, torch.round(v) - v, numerics.round_clamp(v, low, high))
            slope = slope if multiples is None else slope * multiples
            grad_scale = (grad * slope).sum_to_size(scale.shape) * ctx.gradient_factor
        if ctx.needs_input_grad[2]:
            grad_zero = (grad * ~inside * -scale).sum_to_size(zero_point.shape) * ctx.gradient_factor
        return grad_x, grad_scale, grad_zero, None, None, None, None


def lsq_gradient_factor(values: int, max_quantized: int) -> float:
    """Return ``1/sqrt(n * levels)``, the gradient scale of LSQ (Esser et al. 2020, section 2.2).

    It makes scales move at the rate of weights. Unlike LSQ, which starts from ``2 * mean|x| / sqrt(Q_P)``, scales start
    from calibration, from moving averages or, for weights, from the rule of `convert`.

    Args:
        values: n, number of values per scale.
        max_quantized: Q_P, number of positive quantized values.
    """
    return (max(values, 1) * max_quantized) ** -0.5


def max_quantized_magnitude(low: int, high: int, zero: int) -> int:
    """Return the number of quantized values on the larger side of the zero point."""
    return max(high - zero, zero - low)


class FakeQuantize(nn.Module):
    """Fake quantization of an activation site and of the sites that share its parameters.

    Nothing is rounded before the first value is seen.

    Attributes:
        scale: f32[channels], trained while scales are learned.
        zero_point: f32[channels], trained like the scale.
        low: f64[channels], moving average of the minimum, which determines scale and zero point while they are
            observed.
        high: f64[channels], moving average of the maximum.
        seen: whether the parameters are set.
    """

    low: torch.Tensor
    high: torch.Tensor
    seen: torch.Tensor

    def __init__(self, site: Site, channels: int, rank: int, mode: FakeQuantizeMode) -> None:
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
        """Return whether the parameters follow the values; otherwise they are fixed."""
        return isinstance(self.site.spec, Observed)

    def forward(self, x: torch.Tensor, counts: bool = True) -> torch.Tensor:
        """Fake-quantize `x`; with `counts` its range enters the moving averages."""
        if self.mode.observe and self.observed:
            if self.training and counts:
                self._observe(x.detach())
            elif self.seen:
                self.update_qparams()  # DDP may have replaced the averages, which are buffers
        if not self.mode.quantize or not self.seen:
            return x
        scale, zero_point = self.effective_qparams()
        low, high = self.site.qmin, self.site.qmax
        max_quantized = max(max_quantized_magnitude(low, high, int(zero)) for zero in zero_point.tolist())
        gradient_factor = lsq_gradient_factor(x.numel() // max(len(x), 1), max_quantized)
        return FakeQuantizeFunction.apply(
            x, scale.reshape(self.shape), zero_point.reshape(self.shape), None, low, high, gradient_factor
        )

    def effective_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positive scale and the integer zero point within the quantized range that are in effect."""
        scale = self.scale.abs().clamp_min(SMALLEST_SCALE)
        clamped = self.zero_point.clamp(self.site.qmin, self.site.qmax)
        return scale, clamped + (clamped.round() - clamped).detach()

    def _observe(self, x: torch.Tensor) -> None:
        """Update the moving averages with the range of `x`, then the scale and zero point.

        Raises:
            CalibrationError: `x` is not finite.
        """
        if not x.numel():
            return
        axes = None if self.site.axis is None else [axis for axis in range(x.dim()) if axis != self.site.axis]
        low, high = (x.amin(axes), x.amax(axes)) if axes else torch.aminmax(x)
        if not (low.isfinite().all() and high.isfinite().all()):
            raise CalibrationError(
                self.site.name,
                self.site.origin.operator or None,
                "values are not finite while training",
                source=self.site.origin.source or None,
                remedy="check the data; if training diverged, lower the learning rate or freeze batch norms later",
            )
        weight = AVERAGING if self.seen else 1.0
        self.low.lerp_(low.double().reshape(-1), weight)
        self.high.lerp_(high.double().reshape(-1), weight)
        self.seen.fill_(True)
        self.update_qparams()

    @torch.no_grad()
    def update_qparams(self) -> None:
        """Compute scale and zero point from the moving averages."""
        ends = list(zip(self.low.tolist(), self.high.tolist(), strict=True))
        if isinstance(self.site.spec, Observed) and self.site.spec.symmetric:
            ends = [(min(low, -high), max(high, -low)) for low, high in ends]
        found = [numerics.affine_qparams(low, high, self.site.qmin, self.site.qmax) for low, high in ends]
        scales, zeros = zip(*found, strict=True)
        self.scale.copy_(torch.tensor(scales))
        self.zero_point.copy_(torch.tensor(zeros))

    @torch.no_grad()
    def set_qparams(self, q: QParams) -> None:
        """Set known parameters, and the averages to the ends of their range, which give the same parameters again."""
        scales, zeros = (torch.tensor(values, dtype=torch.float64) for values in (q.scales, q.zeros))
        self.low.copy_((q.qmin - zeros) * scales)
        self.high.copy_((q.qmax - zeros) * scales)
        self.scale.copy_(scales)
        self.zero_point.copy_(zeros)
        self.seen.fill_(True)

    def learnable(self) -> list[nn.Parameter]:
        """Return the trainable parameters: the scale, and the zero point if it is inside an asymmetric range."""
        zero, site = self.zero_point, self.site
        inner = bool(((zero > site.qmin) & (zero < site.qmax)).all())
        symmetric = isinstance(site.spec, Observed) and site.spec.symmetric
        if not self.observed:
            return []
        return [self.scale, zero] if inner and not symmetric else [self.scale]

    def qparams(self) -> QParams:
        """Return the parameters that are in effect."""
        scale, zero_point = self.effective_qparams()
        zeros = tuple(int(zero) for zero in zero_point.tolist())
        return QParams(tuple(scale.tolist()), zeros, self.site.qmin, self.site.qmax, self.site.axis)

    def extra_repr(self) -> str:
        """Return the site and its range of quantized values."""
        return f"{self.site.name}, {self.site.qmin}..{self.site.qmax}"


class FakeQuantizeWeight(nn.Module):
    """Fake quantization of a weight.

    Attributes:
        scale: f32[1] or f32[channels], computed from the current weight while it is not learned.
        constant: name of the weight in the prepared graph.
        own: computes the scales of a weight as `convert` does.
    """

    def __init__(
        self, site: Site, constant: str, weight: torch.Tensor, own: WeightScaleRule, mode: FakeQuantizeMode
    ) -> None:
        super().__init__()
        self.site, self.constant, self.own, self.mode = site, constant, own, mode
        self.scale = nn.Parameter(torch.from_numpy(own(weight.detach().numpy())).clone(), requires_grad=False)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the fake-quantized weight. While scales follow the values, compute them from this weight first."""
        if not self.mode.quantize:
            return weight
        if self.mode.observe:
            self.update_qparams(weight)
        site, kind, axis = self.site, self.site.record, self.own.axis or 0
        scale, multiples = self.positive_scale(), None
        if site.group:
            grid = weight_grid(weight.detach().numpy(), scale.detach().numpy(), kind, site.group, axis)
            multiples = torch.from_numpy(grid.element_multiples(tuple(weight.shape)).astype(np.float32))
        shape = [1] * weight.dim()
        shape[axis] = len(scale)
        gradient_factor = lsq_gradient_factor(weight.numel() // len(scale), kind.qmax)
        zero = torch.zeros(())
        return FakeQuantizeFunction.apply(
            weight, scale.reshape(shape), zero, multiples, kind.qmin, kind.qmax, gradient_factor
        )

    @torch.no_grad()
    def update_qparams(self, weight: torch.Tensor) -> None:
        """Compute the scale from the weight."""
        self.scale.copy_(torch.from_numpy(self.own(weight.detach().numpy())))

    def positive_scale(self) -> torch.Tensor:
        """Return the scale that is in effect, which is positive."""
        return self.scale.abs().clamp_min(SMALLEST_SCALE)

    def learnable(self) -> list[nn.Parameter]:
        """Return the trainable parameters."""
        return [self.scale]

    def qparams(self) -> QParams:
        """Return the parameters that are in effect."""
        scales = tuple(self.positive_scale().tolist())
        return QParams(scales, (0,) * len(scales), self.site.qmin, self.site.qmax, self.site.axis)

    def extra_repr(self) -> str:
        """Return the site and the range of its datatype."""
        return f"{self.site.name}, {self.site.record.qmin}..{self.site.record.qmax}"


def fake_quantize_bias(bias: torch.Tensor, x: FakeQuantize, weight: FakeQuantizeWeight) -> torch.Tensor:
    """Round a bias to int32 steps of ``s_x * s_w``; the gradient passes unchanged."""
    if not x.mode.quantize or not x.seen:
        return bias
    with torch.no_grad():
        scales = weight.positive_scale().repeat(len(bias) // weight.scale.numel()).numpy()
        step = float(x.effective_qparams()[0][0])
        quantized = numerics.quantize_bias(bias.detach().numpy(), step, scales)
        units = numerics.accumulator_scale(step, scales).astype(np.float32)
        real = torch.from_numpy(quantized.astype(np.float32) * units)
    return bias + (real - bias.detach())


def fake_quantize_shortcut(x: torch.Tensor, fake_quantize: FakeQuantize, low: int, high: int) -> torch.Tensor:
    """Fake-quantize a value to 16 bits with trainable parameters derived from its 8-bit ones (`widen_to_16bit`)."""
    if not fake_quantize.mode.quantize or not fake_quantize.seen:
        return x
    scale, zero_point = fake_quantize.effective_qparams()
    q = fake_quantize.qparams()
    wide = numerics.widen_to_16bit(q.step, q.zero)
    gradient_factor = lsq_gradient_factor(
        x.numel() // max(len(x), 1), max_quantized_magnitude(low, high, wide.zero_point)
    )
    scale_16bit = scale.reshape([]) / numerics.QUANT_STEPS
    scale_16bit = scale_16bit + (wide.scale - scale_16bit).detach()
    zero_16bit = zero_point.reshape([]) * numerics.QUANT_STEPS + (wide.zero_point - q.zero * numerics.QUANT_STEPS)
    return FakeQuantizeFunction.apply(x, scale_16bit, zero_16bit, None, low, high, gradient_factor)


class ModeHolder(nn.Module):
    """Holds the mode for fake-quantize functions without parameters of their own."""

    def __init__(self, mode: FakeQuantizeMode) -> None:
        super().__init__()
        self.mode = mode


def fake_quantize_fixed(
    switch: ModeHolder, x: torch.Tensor, scale: float, zero_point: int, low: int, high: int
) -> torch.Tensor:
    """Fake-quantize with fixed parameters."""
    if not switch.mode.quantize:
        return x
    values = torch.tensor(scale), torch.tensor(float(zero_point))
    return FakeQuantizeFunction.apply(x, *values, None, low, high, 0.0)


def fake_quantize_per_token(switch: ModeHolder, x: torch.Tensor, mode: str) -> torch.Tensor:
    """Fake-quantize dynamically per token or per batch entry. Nothing is clipped, so the whole gradient passes."""
    if not switch.mode.quantize:
        return x
    ops = per_token_operators()
    with torch.no_grad():
        real = ops.dequantize_rows(*ops.quantize_rows(x.detach().contiguous(), mode))
    return x + (real - x.detach())
