"""Types of values: element type, shape, quantization parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from intaglio.ir.dims import Shape
from intaglio.ir.number_array import NumberArray


class DType(Enum):
    """Element types. Kernels compute in u8, s8, i32 and f32; the others only cross islands, and f8 only occurs inside
    them.
    """

    U8 = "u8"
    S8 = "s8"
    U16 = "u16"
    I16 = "i16"
    I32 = "i32"
    I64 = "i64"
    F16 = "f16"
    BF16 = "bf16"
    F8E4M3 = "f8e4m3"
    F8E5M2 = "f8e5m2"
    F32 = "f32"
    F64 = "f64"
    BOOL = "bool"
    OTHER = "other"

    @property
    def bytes(self) -> int:
        """Return the size of an element in bytes."""
        if self.value.startswith("f8"):
            return 1
        one, two, eight = ("u8", "s8", "bool"), ("u16", "i16", "f16", "bf16"), ("i64", "f64")
        return 1 if self.value in one else 2 if self.value in two else 8 if self.value in eight else 4

    def __str__(self) -> str:
        return self.value


SIGN_OFFSET = 128
"""Difference between an int8 value and the uint8 value that means the same. Kernels compute with uint8 activations."""
U8, S8, I32, I64 = DType.U8, DType.S8, DType.I32, DType.I64
F16, BF16, F32, BOOL = DType.F16, DType.BF16, DType.F32, DType.BOOL


@dataclass(frozen=True)
class PerRow:
    """Dynamic quantization parameters per row of the last axis (per token)."""

    def __str__(self) -> str:
        return "rows"


@dataclass(frozen=True)
class PerRowGroup:
    """Quantization parameters per channel of each group of rows; another value holds the ends of the groups."""

    def __str__(self) -> str:
        return "row groups"


@dataclass(frozen=True)
class Groups:
    """Quantization parameters per group of ``size`` neighbours along the input axis of a weight."""

    size: int

    def __str__(self) -> str:
        return f"groups({self.size})"


@dataclass(frozen=True)
class Ref:
    """Reference to parameters that another value of the graph holds at run time."""

    value: str

    def __str__(self) -> str:
        return f"%{self.value}"


Axis = int | PerRow | PerRowGroup | Groups | None


@dataclass(frozen=True)
class QParams:
    """Quantization parameters: ``real = (q - zero_point) * scale`` with q in [qmin, qmax].

    There is one entry per tensor, channel, row or group, according to ``axis``. Scales of stored integers are float32
    values held exactly as Python floats; the scale of an accumulator is the float64 product of two of them.
    """

    scale: tuple[float, ...] | NumberArray[float] | Ref
    zero_point: tuple[int, ...] | NumberArray[int] | Ref
    qmin: int
    qmax: int
    axis: Axis = None

    def __post_init__(self) -> None:
        if self.qmin >= self.qmax:
            raise ValueError(f"qmin must be below qmax, but they are {self.qmin} and {self.qmax}")
        if isinstance(self.scale, Ref) or isinstance(self.zero_point, Ref):
            return
        if len(self.scale) != len(self.zero_point) or (self.axis is None and len(self.scale) != 1):
            raise ValueError(
                f"there must be as many zero points as scales, and one of each without an axis, but there are "
                f"{len(self.scale)} scales and {len(self.zero_point)} zero points with axis {self.axis}"
            )
        scales = np.asarray(self.scale)
        if not ((scales > 0) & (scales < np.inf)).all():
            raise ValueError("scales must be positive and finite")

    def with_offset(self, offset: int) -> QParams:
        """Return the parameters of values that are `offset` more and stand for the same real numbers."""
        if isinstance(self.zero_point, Ref):
            raise TypeError(f"the zero point is computed while the model runs, in {self.zero_point}")
        zeros = tuple(zero + offset for zero in self.zero_point)
        return replace(self, zero_point=zeros, qmin=self.qmin + offset, qmax=self.qmax + offset)

    @property
    def scales(self) -> tuple[float, ...] | NumberArray[float]:
        """Return the constant scales; raise `TypeError` for dynamic parameters."""
        if isinstance(self.scale, Ref):
            raise TypeError(f"the scale is computed while the model runs, in {self.scale}")
        return self.scale

    @property
    def step(self) -> float:
        """Return the scale, which all channels share."""
        (scale,) = set(self.scales)
        return scale

    @property
    def zero(self) -> int:
        """Return the only zero point."""
        (zero_point,) = self.zeros
        return zero_point

    @property
    def zeros(self) -> tuple[int, ...] | NumberArray[int]:
        """Return the constant zero points; raise `TypeError` for dynamic parameters."""
        if isinstance(self.zero_point, Ref):
            raise TypeError(f"the zero point is computed while the model runs, in {self.zero_point}")
        return self.zero_point

    def __str__(self) -> str:
        if isinstance(self.scale, Ref) or isinstance(self.zero_point, Ref):
            return f"q(scale={self.scale}, zp={self.zero_point}, axis={self.axis})"
        if self.axis is None:
            return f"q(scale={self.step:.6g}, zp={self.zero})"
        span = f"{min(self.scale):.6g}..{max(self.scale):.6g}"
        return f"q(scale={span}, axis={self.axis})"


@dataclass(frozen=True)
class Packing:
    """Storage of constant integers in a file with fewer than 8 bits each.

    Attributes:
        bits: Bits of a stored value.
        low: Smallest stored value.
        group: Number of neighbouring weights of an output channel, in memory order, that share an integer multiple; 0
            without multiples.
        lows: Number of such neighbours that share a smallest value of their own, which is stored with them; 0 if all
            share ``low``.
    """

    bits: int
    low: int
    group: int = 0
    lows: int = 0

    def __post_init__(self) -> None:
        if self.group and self.lows:
            raise ValueError("values in groups have either multiples or smallest values of their own")

    def __str__(self) -> str:
        return f"{self.bits} bits" + (f" in groups of {self.group or self.lows}" if self.group or self.lows else "")


@dataclass(frozen=True)
class TensorType:
    """Type of a value.

    Attributes:
        shape: Logical shape, channels second.
        dtype: Element type.
        q: Quantization parameters of a quantized value.
        packing: Storage format of a constant that a file can hold in fewer bits.
    """

    shape: Shape
    dtype: DType
    q: QParams | None = None
    packing: Packing | None = None

    @property
    def qparams(self) -> QParams:
        """Return the quantization parameters; raise `TypeError` for a value without them."""
        if self.q is None:
            raise TypeError(f"{self} has no quantization parameters")
        return self.q

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.shape))
        packed = f" ({self.packing})" if self.packing else ""
        return f"{self.dtype}[{dims}]" + (f" {self.q}" if self.q else "") + packed
