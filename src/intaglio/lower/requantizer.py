"""`Requantizer`, the name under which the pattern framework's users look for `requantize`."""

from __future__ import annotations

from intaglio.lower.lowered import Lowered
from intaglio.lower.lowering import requantize
from intaglio.quant.qdq.convert import Reference


class Requantizer:
    """Call `requantize`: the pattern framework's spelling, ``Requantizer().requantize(reference)``."""

    def requantize(self, reference: Reference) -> Lowered:
        return requantize(reference)
