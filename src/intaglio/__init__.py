"""intaglio: a float PyTorch model and a few batches of data in, a fast int8 model for the CPU out."""

import sys
from importlib import import_module
from types import ModuleType
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
    from intaglio.quant import (
        AverageMaxCalibrationCallback,
        CalibrationCallback,
        CalibrationInfo,
        Calibrator,
        DatasetManager,
        GlobalCalibrationCallback,
        Image,
        Parameters,
        Quantizer,
        QuantizerPattern,
        Ranges,
        Recipe,
        Setting,
        share,
    )
    from intaglio.runtime import Coverage, QuantizedModel
else:

    def __getattr__(name: str) -> Any:
        """Public names at their first use: PyTorch takes seconds to import, and `intaglio --help` needs none of it."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "eager":
            return import_module("intaglio.eager")
        from intaglio.api import __dict__ as verbs
        from intaglio.backends import __dict__ as backends
        from intaglio.lower import __dict__ as lower
        from intaglio.quant import __dict__ as quant
        from intaglio.runtime import __dict__ as runtime

        found = next(home[name] for home in (verbs, backends, lower, quant, runtime) if name in home)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

    class _Package(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            """`intaglio.capture` is the function; Python would make it the package of that name on importing it."""
            if not (name == "capture" and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    sys.modules[__name__].__class__ = _Package
