"""The datatypes levels can have, a record each. What no kernel computes with, the reference model still does."""

from __future__ import annotations

from dataclasses import dataclass

from intaglio.ir import DType, Packing
from intaglio.quant.recipes.choices import Role

LARGEST_GROUP_MULTIPLE = 15
"""The largest multiple of its channel's scale that a group of weights may have as its own: 4 bits in a file."""

INT32_RANGE = (-(2**31), 2**31 - 1)
"""Quantized values of a bias."""
FLOAT8 = (DType.F8E4M3, DType.F8E5M2)
WEIGHT, ACTIVATION = (Role.WEIGHT,), (Role.ACTIVATION,)


@dataclass(frozen=True)
class Datatype:
    """``roles``: those of values that may have it. ``storage``: element type of the levels qmin..qmax while a model
    runs; ``bits``: what a weight takes in a file. ``zero_point``: whether it has one; without, ranges are symmetric.

    ``native``: kernels compute with the levels. An operator with a type that is not computes in float32 on rounded
    values, in the reference model and behind it. ``squares``: scales are those of least squared error; else the largest
    value is the last level.
    """

    name: str
    roles: tuple[Role, ...]
    storage: DType
    qmin: int
    qmax: int
    bits: int = 8
    zero_point: bool = False
    native: bool = True
    squares: bool = False

    @property
    def multiples(self) -> int:
        """The largest multiple that keeps every level times it in int8; groups need two or more."""
        if not self.native or Role.WEIGHT not in self.roles:
            return 1
        return min(LARGEST_GROUP_MULTIPLE, 127 // max(self.qmax, -self.qmin))

    @property
    def floating(self) -> bool:
        """Whether levels are floating-point numbers themselves."""
        return self.storage in FLOAT8

    def packing(self, group: int) -> Packing | None:
        """How a file holds a weight; ``None``: as it is in memory."""
        return Packing(self.bits, self.qmin, group) if self.native and self.bits < 8 else None

    def stored(self, group: int) -> tuple[int, int]:
        """Lowest and highest integer in memory: of levels, or with groups of levels times their multiples."""
        most = self.multiples if group else 1
        return self.qmin * most, self.qmax * most


DATATYPES: dict[str, Datatype] = {
    row.name: row
    for row in (
        Datatype("u8", ACTIVATION, DType.U8, 0, 255, zero_point=True),
        Datatype("u7", ACTIVATION, DType.U8, 0, 127, zero_point=True),
        Datatype("u4", ACTIVATION, DType.U8, 0, 15, zero_point=True),
        Datatype("s16", ACTIVATION, DType.I16, -32767, 32767, native=False),
        Datatype("s8", WEIGHT, DType.S8, -127, 127),
        Datatype("s4", WEIGHT, DType.S8, -8, 7, bits=4, squares=True),
        Datatype("s3", WEIGHT, DType.S8, -4, 3, bits=3, squares=True),
        Datatype("s2", WEIGHT, DType.S8, -2, 1, bits=2, squares=True),
        Datatype("f16", WEIGHT, DType.F16, -65504, 65504, bits=16),
        Datatype("f8e4m3", WEIGHT + ACTIVATION, DType.F8E4M3, -448, 448, native=False),
        Datatype("f8e5m2", WEIGHT + ACTIVATION, DType.F8E5M2, -57344, 57344, native=False),
    )
}
"""Name -> record. A recipe may name any of them; one that is added here works from then on."""
