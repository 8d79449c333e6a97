"""Decomposition of a transposed convolution into one plain convolution per phase (sub-pixel convolution).

Along an axis of stride s, outputs ``s * q + r`` of phase r read exactly the taps t for which ``r + padding - t *
dilation`` is a multiple of s, at input ``q + (r + padding - t * dilation) / s``. Neighbouring q read neighbouring
inputs, so each phase is a convolution of stride 1 with a subset of the taps, and no multiplication is by an inserted
zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from intaglio.ir.graph import Op


@dataclass(frozen=True)
class Phase:
    """Outputs ``first, first + stride ...`` along one axis, ``inputs + extra`` of them.

    Attributes:
        first: Index of the phase's first output.
        taps: Taps of the kernel that the phase reads, in order of input. Without a tap (a stride larger than the
            kernel) the result is the bias.
        start: Offset of the first tap's input: output q reads inputs ``q + start, q + start + dilation ...``.
        dilation: Distance between the inputs of two taps.
        extra: Number of outputs of the phase less the number of inputs.
    """

    first: int
    taps: tuple[int, ...]
    start: int
    dilation: int
    extra: int

    @property
    def before(self) -> int:
        """Return the number of padding inputs read before the first input."""
        return max(0, -self.start)

    @property
    def after(self) -> int:
        """Return the number of padding inputs read after the last input."""
        return max(0, self.extra + self.start + self.dilation * (max(len(self.taps), 1) - 1))


def phases(kernel: int, stride: int, padding: int, dilation: int, output_padding: int) -> tuple[Phase, ...]:
    """Return all phases of one axis, one for each of ``stride`` outputs."""
    found = []
    span = dilation * (kernel - 1) + output_padding - 2 * padding
    for first in range(stride):
        taps = [t for t in reversed(range(kernel)) if (first + padding - t * dilation) % stride == 0]
        start = (first + padding - taps[0] * dilation) // stride if taps else 0
        step = dilation // gcd(dilation, stride)
        found.append(Phase(first, tuple(taps), start, step, (span - first) // stride))
    return tuple(found)


def axis_phases(op: Op, kernel: tuple[int, ...]) -> list[tuple[Phase, ...]]:
    """Return the phases along each spatial axis of a transposed convolution with this kernel shape."""
    attrs = op.attrs
    names = ("stride", "padding", "dilation", "output_padding")
    return [phases(k, *given) for k, *given in zip(kernel, *(attrs[name] for name in names), strict=True)]
