"""Runs of a float graph with images in the memory format channels_last, in which convolutions take less time."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_RESHAPES = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}
"""Operators that need an operand without gaps -> operators that copy other operands."""
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
    return _RESHAPES.get(target, target)(*args, **kwargs)


def _is_taken(image: torch.Tensor) -> bool:
    """Return whether convolutions of PyTorch take an image in the format that it has."""
    return image.shape[-1] != 1 and image.is_contiguous(memory_format=torch.channels_last)


class ChannelsLastRun(fx.Interpreter):
    """Runs a graph with images in the memory format channels_last."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph with these arguments."""
        return super().run(*map(channels_last, args), **kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator."""
        return run_operator(target, args, kwargs)
