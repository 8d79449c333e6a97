"""intaglio: a float PyTorch model and a few batches of data in, a fast int8 model for the CPU out."""

from intaglio import errors
from intaglio.api import annotate, calibrate, capture, compile, convert, prepare, quantize, requantize
from intaglio.quant import Quantizer, Ranges, Recipe, Setting
from intaglio.runtime import Coverage, QuantizedModel

__version__ = "0.1.0"

__all__ = [
    "Coverage",
    "QuantizedModel",
    "Quantizer",
    "Ranges",
    "Recipe",
    "Setting",
    "annotate",
    "calibrate",
    "capture",
    "compile",
    "convert",
    "errors",
    "prepare",
    "quantize",
    "requantize",
]
