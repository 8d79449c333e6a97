"""Training with the rounding in the graph."""

from intaglio.quant.qat.finish import calibrate_qat, convert_qat
from intaglio.quant.qat.prepared import PreparedQat, prepare_qat

__all__ = ["PreparedQat", "calibrate_qat", "convert_qat", "prepare_qat"]
