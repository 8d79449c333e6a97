"""Image inputs, whose bytes 0..255 represent normalized pixels."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from intaglio.argument_checks import check_arguments, check_fields, value_text
from intaglio.errors import InputError, UnsupportedError
from intaglio.signature.tensor_checks import check_memory_of

LARGEST_BYTE = 255
MOST_CHANNELS = 65536


@check_fields
@dataclass(frozen=True)
class Image:
    """Declares that byte p of channel c represents ``(p / 255 - mean[c]) / std[c]``.

    The quantized values of the input are the bytes themselves, so the input is neither observed nor rounded, and uint8
    tensors are accepted directly. Zero padding uses the byte nearest to ``255 * mean[c]``, which is off by at most half
    a step.

    Attributes:
        mean: one number, or one per channel, between 0 and 1.
        std: one positive number, or one per channel.
    """

    mean: Iterable[float] | float = 0.0
    std: Iterable[float] | float = 1.0

    def __post_init__(self) -> None:
        for name in ("mean", "std"):  # tuples, because an iterator can be read only once
            object.__setattr__(self, name, tuple(_each(getattr(self, name))))
        if not _each(self.std) or not all(math.isfinite(value) and value > 0 for value in _each(self.std)):
            problem = f"std is {self.std}; all of its values must be finite and above 0"
            raise UnsupportedError("Image", None, problem, remedy="give one number, or one number per channel")
        if not _each(self.mean) or not all(0 <= value <= 1 for value in _each(self.mean)):
            raise UnsupportedError(
                "Image",
                None,
                f"mean is {self.mean}; its values must be between 0 and 1, so that a byte can represent zero",
                remedy="give mean and std of pixels that were divided by 255",
            )

    @check_arguments
    def normalize(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the float32 values of uint8 pixels [n, c, h, w].

        Raises:
            InputError: `pixels` has another number of channels than `mean` or `std`, or is not in memory.
        """
        check_memory_of(pixels, "Image")
        mean, std = (torch.tensor(_each(values)).reshape(1, -1, 1, 1) for values in (self.mean, self.std))
        try:
            return (pixels / LARGEST_BYTE - mean) / std
        except RuntimeError as error:
            shape = "nested" if pixels.is_nested else list(pixels.shape)
            problem = f"pixels of shape {shape} do not fit mean {self.mean} and std {self.std}"
            raise InputError("Image", None, problem, remedy="pass a tensor [n, c, h, w] of as many channels") from error

    @check_arguments
    def pixels(self, channels: int) -> Pixels:
        """Return the conversion from values to bytes for a number of channels.

        Raises:
            UnsupportedError: `mean` or `std` has another number of channels, or there are none or too many.
        """
        spread = {}
        if not 1 <= channels <= MOST_CHANNELS:
            problem = f"{channels} channels; there must be between 1 and {MOST_CHANNELS}"
            raise UnsupportedError("Image", None, problem, remedy="pass the number of channels of the input")
        for name, values in (("mean", _each(self.mean)), ("std", _each(self.std))):
            if len(values) not in (1, channels):
                problem = f"{name} has {len(values)} values, but the input has {channels} channels"
                raise UnsupportedError("Image", None, problem, remedy="give one number, or one number per channel")
            spread[name] = torch.tensor(values, dtype=torch.float64).expand(channels)
        zero = LARGEST_BYTE * spread["mean"]
        nearest = zero.round()
        return Pixels(
            (LARGEST_BYTE * spread["std"]).float(), (zero - nearest).float(), tuple(map(int, nearest.tolist()))
        )


@dataclass(frozen=True, eq=False)
class Pixels:
    """Conversion from normalized values to bytes: ``x * gain + shift + zero_point`` is the byte of x.

    Attributes:
        gain: f32[c].
        shift: f32[c], at most half a byte.
        zero_points: one per channel.
    """

    gain: torch.Tensor
    shift: torch.Tensor
    zero_points: tuple[int, ...]


def _each(values: Iterable[float] | float) -> list[float]:
    try:
        return [float(value) for value in (values if isinstance(values, Iterable) else (values,))]
    except (TypeError, ValueError, RuntimeError) as error:
        problem = f"mean and std are numbers, not {value_text(values)}"
        raise UnsupportedError("Image", None, problem, remedy="give one number, or one number per channel") from error
