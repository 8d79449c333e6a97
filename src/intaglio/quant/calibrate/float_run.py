"""Runs of a float graph with the operators and in the memory formats that take the least time.

Images are in the memory format channels_last, and oneDNN computes linear layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

LEAST_MACS = 1 << 22
"""Multiplications of a linear layer from which it takes less time in oneDNN."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute a linear layer as ``torch.nn.functional.linear`` does; large ones of float32 by oneDNN.

    PyTorch calls MKL, which uses 256-bit vectors on processors of AMD. OneDNN takes half of the time there (100 and 215
    GMAC/s on two threads of a Zen 5) and the same time on those of Intel.
    """
    large = x.numel() * len(weight) >= LEAST_MACS
    if large and x.dtype is torch.float32 and weight.dtype is torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


REPLACED: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,  # which copies operands with gaps
    torch.ops.aten.linear.default: linear,
}
"""Operators -> functions of the same result."""
_CONVOLUTIONS = frozenset(
    {
        torch.ops.aten.conv2d.default,
        torch.ops.aten.conv2d.padding,
        torch.ops.aten.convolution.default,
        torch.ops.aten.conv_transpose2d.input,
    }
)
"""Operators that get copies of images that have a width of one or are in other formats.

PyTorch 2.13 ends with a segmentation fault at convolutions of images with a width of one: of one channel of an image in
this format, and of an image in it with a bias, strides and a dilation along the width.
"""


def channels_last(value: Any) -> Any:
    """Return an image in the memory format channels_last, and any other value as it is."""
    if isinstance(value, torch.Tensor) and value.dim() == 4 and value.is_floating_point():
        return value.contiguous(memory_format=torch.channels_last)
    return value


def run_operator(target: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator with operands in any memory format."""
    if target in _CONVOLUTIONS and not _is_taken(args[0]):
        args = (args[0].contiguous(), *args[1:])
    return REPLACED.get(target, target)(*args, **kwargs)


def _is_taken(image: torch.Tensor) -> bool:
    """Return whether convolutions of PyTorch take an image in the format that it has."""
    return image.shape[-1] != 1 and image.is_contiguous(memory_format=torch.channels_last)


class ChannelsLastRun(fx.Interpreter):
    """Runs a graph with images in the memory format channels_last and the operators of `REPLACED`."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph with these arguments."""
        return super().run(*map(channels_last, args), **kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator."""
        return run_operator(target, args, kwargs)
