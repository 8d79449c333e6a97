"""intaglio: a float PyTorch model and a few batches of data in, a fast int8 model for the CPU out."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from intaglio import config, errors

__version__ = config.VERSION

__all__ = [
    "AverageMaxCalibrationCallback",
    "CalibrationCallback",
    "CalibrationInfo",
    "Calibrator",
    "Coverage",
    "DatasetManager",
    "GlobalCalibrationCallback",
    "Image",
    "OnnxFile",
    "Parameters",
    "QuantizedModel",
    "Quantizer",
    "QuantizerPattern",
    "Ranges",
    "Recipe",
    "Requantizer",
    "Setting",
    "annotate",
    "autotune",
    "calibrate",
    "capture",
    "compare",
    "compile",
    "convert",
    "correct",
    "eager",
    "equalize",
    "errors",
    "from_qdq",
    "load",
    "prepare",
    "quantize",
    "requantize",
    "share",
    "to_onnx",
]

if TYPE_CHECKING:
    from intaglio import eager
    from intaglio.api import (
        annotate,
        autotune,
        calibrate,
        capture,
        compare,
        compile,
        convert,
        correct,
        equalize,
        from_qdq,
        load,
        prepare,
        quantize,
        requantize,
        to_onnx,
    )
    from intaglio.backends import OnnxFile
    from intaglio.lower import Requantizer
    from intaglio.quant.calibrate.callbacks import (
        AverageMaxCalibrationCallback,
        CalibrationCallback,
        CalibrationInfo,
        Calibrator,
        GlobalCalibrationCallback,
    )
    from intaglio.quant.calibrate.dataset_manager import DatasetManager
    from intaglio.quant.calibrate.distributed import share
    from intaglio.quant.calibrate.ranges import Ranges
    from intaglio.quant.qdq.parameters import Parameters
    from intaglio.quant.recipes.image import Image
    from intaglio.quant.recipes.quantizer import Quantizer
    from intaglio.quant.recipes.recipe import Recipe
    from intaglio.quant.recipes.settings import Setting
    from intaglio.quant.recipes.user_patterns import QuantizerPattern
    from intaglio.runtime import Coverage, QuantizedModel
else:
    HOMES = {
        "eager": "intaglio",
        "errors": "intaglio",
        "OnnxFile": "intaglio.backends",
        "Requantizer": "intaglio.lower",
        "AverageMaxCalibrationCallback": "intaglio.quant.calibrate.callbacks",
        "CalibrationCallback": "intaglio.quant.calibrate.callbacks",
        "CalibrationInfo": "intaglio.quant.calibrate.callbacks",
        "Calibrator": "intaglio.quant.calibrate.callbacks",
        "GlobalCalibrationCallback": "intaglio.quant.calibrate.callbacks",
        "DatasetManager": "intaglio.quant.calibrate.dataset_manager",
        "share": "intaglio.quant.calibrate.distributed",
        "Ranges": "intaglio.quant.calibrate.ranges",
        "Parameters": "intaglio.quant.qdq.parameters",
        "Image": "intaglio.quant.recipes.image",
        "Quantizer": "intaglio.quant.recipes.quantizer",
        "Recipe": "intaglio.quant.recipes.recipe",
        "Setting": "intaglio.quant.recipes.settings",
        "QuantizerPattern": "intaglio.quant.recipes.user_patterns",
        "Coverage": "intaglio.runtime",
        "QuantizedModel": "intaglio.runtime",
    }
    """Public name -> the module that defines it; the others are functions of `intaglio.api`."""

    def __getattr__(name: str) -> Any:
        """Return a public name, imported at its first use: `intaglio --help` does not wait for PyTorch."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = HOMES.get(name, "intaglio.api")
        found = import_module(f"{home}.{name}") if home == "intaglio" else getattr(import_module(home), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
