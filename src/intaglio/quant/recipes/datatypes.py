"""Datatypes of quantized values. The reference model simulates those that no kernel supports."""

from __future__ import annotations

from dataclasses import dataclass

from intaglio.ir import DType, Packing
from intaglio.quant.recipes.choices import Role

LARGEST_GROUP_MULTIPLE = 15
"""Largest multiple of its channel's scale that a weight group may have; a file stores it in 4 bits."""

INT32_RANGE = (-(2**31), 2**31 - 1)
"""Range of quantized biases."""
FLOAT8 = (DType.F8E4M3, DType.F8E5M2)
WEIGHT, ACTIVATION = (Role.WEIGHT,), (Role.ACTIVATION,)


@dataclass(frozen=True)
class Datatype:
    """Datatype of quantized values.

    Attributes:
        name: name in recipes.
        roles: roles of values that may have it.
        storage: element type at run time.
        qmin: lowest quantized value.
        qmax: highest quantized value.
        bits: bits per weight in a file.
        zero_point: whether it has zero points; otherwise ranges are symmetric.
        native: whether kernels compute with quantized values; otherwise operators compute in float32 on rounded values,
            in the reference model and in the compiled one.
        squares: whether scales minimize the squared error; otherwise the largest value maps to the last quantized
            value.
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
        """Return the largest multiple that keeps quantized values times multiples in int8; groups need at least 2."""
        if not self.native or Role.WEIGHT not in self.roles:
            return 1
        return min(LARGEST_GROUP_MULTIPLE, 127 // max(self.qmax, -self.qmin))

    @property
    def floating(self) -> bool:
        """Return whether quantized values are floating-point numbers."""
        return self.storage in FLOAT8

    def packing(self, group: int) -> Packing | None:
        """Return how a file packs a weight; ``None`` if it is stored as in memory."""
        return Packing(self.bits, self.qmin, group) if self.native and self.bits < 8 else None

    def stored(self, group: int) -> tuple[int, int]:
        """Return the lowest and highest integer in memory, multiples of groups included."""
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
"""Datatypes by the name that recipes use. A new row needs no other change."""
SIGNED_ACTIVATION = Datatype("s8", ACTIVATION, DType.S8, -128, 127, zero_point=True)
"""Record of int8 activations, which have zero points and one value more than int8 weights. Kernels read them as uint8
values that are 128 more."""


def datatype_of(name: str, role: Role) -> Datatype:
    """Return the record of values with this datatype and role."""
    signed = name == SIGNED_ACTIVATION.name and role in ACTIVATION
    return SIGNED_ACTIVATION if signed else DATATYPES[name]


def datatype_names(role: Role) -> tuple[str, ...]:
    """Return the names of datatypes that values with this role may have."""
    return tuple(name for name in DATATYPES if role in datatype_of(name, role).roles)
