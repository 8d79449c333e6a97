"""`requantize` as an object, for those who build a pipeline of objects."""

from __future__ import annotations

from intaglio.lower.integer import requantize
from intaglio.lower.lowered import Lowered
from intaglio.quant.qdq.convert import Reference


class Requantizer:
    """Takes a Q/DQ model to the integer graph; see `requantize`."""

    def requantize(self, reference: Reference) -> Lowered:
        return requantize(reference)
