"""Batch norm and dropout, which behave differently in training and evaluation."""

from __future__ import annotations

import torch
from torch import nn

from intaglio.quant.qat.fake_quantize import FakeQuantizeMode

SMALLEST_NORM_WEIGHT = 2.0**-60
"""Batch norm weights below this magnitude are treated as zero."""


class StatisticsNorm(nn.Module):
    """A batch norm that is folded into the preceding operator.

    In evaluation the constants of that operator contain the norm with its running statistics. In training they contain
    only its factor per channel, so that weights are rounded at their final magnitude; the output is divided by the
    factor and normalized with batch statistics (Krishnamoorthi 2018, section 3.2.2).
    """

    def __init__(self, mode: FakeQuantizeMode, momentum: float, eps: float) -> None:
        super().__init__()
        self.mode, self.momentum, self.eps = mode, momentum, eps

    @property
    def uses_batch_statistics(self) -> bool:
        """Return whether batch statistics are used and the running ones are updated."""
        return self.training and not self.mode.frozen

    def extra_repr(self) -> str:
        """Return the parameters of the batch norm."""
        return f"momentum={self.momentum}, eps={self.eps}"


Affine = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]


def folded_norm(
    norm: StatisticsNorm, weight: torch.Tensor | None, bias: torch.Tensor | None, mean: torch.Tensor, var: torch.Tensor
) -> Affine:
    """Return weight, bias, mean and variance to fold, and the factor per channel that folding applies.

    Where the weight is 0, it is replaced by 1: the output could not be divided by 0, and the weight still trains.
    """
    factor = torch.rsqrt(var.double() + norm.eps).float()
    if not norm.uses_batch_statistics:
        return weight, bias, mean, var, factor
    if weight is not None:
        weight = torch.where(weight.abs() < SMALLEST_NORM_WEIGHT, torch.ones_like(weight), weight).detach()
        factor = factor * weight
    return weight, None if bias is None else torch.zeros_like(bias), torch.zeros_like(mean), var, factor


def normalized(
    norm: StatisticsNorm,
    y: torch.Tensor,
    factor: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    batches: torch.Tensor | None,
) -> torch.Tensor:
    """Apply the part of a batch norm that `folded_norm` left out to the output `y` of the preceding operator."""
    if not norm.uses_batch_statistics:
        return y
    if batches is not None:
        batches.add_(1)
    y = y / factor.reshape(1, -1, *[1] * (y.dim() - 2))
    return nn.functional.batch_norm(y, mean, var, weight, bias, True, norm.momentum, norm.eps)


class DropoutMask(nn.Module):
    """Applies one dropout mask to a value, or to several quantized forms of it."""

    def __init__(self, p: float, broadcast_axes: tuple[int, ...]) -> None:
        super().__init__()
        self.p, self.broadcast_axes = p, broadcast_axes

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the values unchanged in evaluation; otherwise multiply all by one mask and rescale."""
        if not self.training or not self.p:
            return values
        shape = [1 if axis in self.broadcast_axes else size for axis, size in enumerate(values[0].shape)]
        mask = nn.functional.dropout(torch.ones(shape), self.p)
        return tuple(value * mask for value in values)

    def extra_repr(self) -> str:
        """Return the probability of dropout."""
        return f"p={self.p}"


def attention_with_dropout(
    dropout: DropoutMask,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> torch.Tensor:
    """Compute attention in float with dropout."""
    p = dropout.p if dropout.training else 0.0
    attention = nn.functional.scaled_dot_product_attention
    return attention(q, k, v, mask, p, causal, scale=scale, enable_gqa=grouped)
