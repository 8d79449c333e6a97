"""`Requantizer`: an alias of `requantize` for users of pattern-based quantization frameworks."""

from __future__ import annotations

from intaglio.argument_checks import check_arguments_except
from intaglio.lower.lowered import Lowered
from intaglio.lower.lowering import requantize
from intaglio.quant.qdq.convert import Reference


class Requantizer:
    """Wrapper with the interface of pattern-based frameworks: `Requantizer().requantize(reference)`."""

    @check_arguments_except("reference")
    def requantize(self, reference: Reference) -> Lowered:
        """Lower a reference model, see `requantize`."""
        return requantize(reference)
