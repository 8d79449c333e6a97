"""Quantization-aware training."""

from intaglio.quant.qat.finish_training import calibrate_qat, convert_qat
from intaglio.quant.qat.prepared_qat import PreparedQat, prepare_qat

__all__ = ["PreparedQat", "calibrate_qat", "convert_qat", "prepare_qat"]
