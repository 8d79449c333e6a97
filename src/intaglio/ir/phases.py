"""A transposed convolution as one plain convolution per phase.

Along an axis of stride s, outputs ``s * q + r`` of phase r read the taps t for which ``r + padding - t * dilation`` is
a multiple of s and no others, at input ``q + (r + padding - t * dilation) / s``: neighbours for neighbouring q. So each
phase is a convolution of stride 1 with its own few taps, and no multiplication is by a zero put in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from intaglio.ir.graph import Op


@dataclass(frozen=True)
class Phase:
    """Outputs ``first, first + stride ...`` along one axis, ``inputs + extra`` of them.

    They read ``taps`` at inputs ``q + start, q + start + apart ...``; without any tap (a stride beyond the kernel) the
    result is the bias alone.
    """

    first: int
    taps: tuple[int, ...]
    start: int
    apart: int
    extra: int

    @property
    def before(self) -> int:
        """Inputs read before the first."""
        return max(0, -self.start)

    @property
    def after(self) -> int:
        """Inputs read after the last."""
        return max(0, self.extra + self.start + self.apart * (max(len(self.taps), 1) - 1))


def phases(kernel: int, stride: int, padding: int, dilation: int, output_padding: int) -> tuple[Phase, ...]:
    """Every phase of one axis."""
    found = []
    span = dilation * (kernel - 1) + output_padding - 2 * padding
    for first in range(stride):
        taps = [t for t in reversed(range(kernel)) if (first + padding - t * dilation) % stride == 0]
        start = (first + padding - taps[0] * dilation) // stride if taps else 0
        apart = dilation // gcd(dilation, stride)
        found.append(Phase(first, tuple(taps), start, apart, (span - first) // stride))
    return tuple(found)


def axis_phases(op: Op, kernel: tuple[int, ...]) -> list[tuple[Phase, ...]]:
    """Phases along each spatial axis of a transposed convolution whose weight has these taps."""
    attrs = op.attrs
    names = ("stride", "padding", "dilation", "output_padding")
    return [phases(k, *given) for k, *given in zip(kernel, *(attrs[name] for name in names), strict=True)]
