"""intaglio quantizes float PyTorch models with a few batches of data and compiles them to int8 programs for CPUs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from intaglio import config, errors

__version__ = config.VERSION

__all__ = [
    "CompileOptions",
    "Image",
    "PartlyQuantizedModel",
    "Pool",
    "QuantizedModel",
    "Recipe",
    "Report",
    "Setting",
    "annotation",
    "calibration",
    "compare",
    "eager",
    "errors",
    "explain",
    "from_checkpoint",
    "load",
    "load_into",
    "patterns",
    "quantize",
    "report",
    "search",
    "stages",
]

if TYPE_CHECKING:
    from intaglio import annotation, calibration, eager, patterns, stages
    from intaglio.api import from_checkpoint, quantize
    from intaglio.backends.native_backend import CompileOptions
    from intaglio.loading import load
    from intaglio.mixed_precision.search_function import search
    from intaglio.parts import PartlyQuantizedModel, load_into
    from intaglio.quant.recipes.image import Image
    from intaglio.quant.recipes.recipe import Recipe
    from intaglio.quant.recipes.settings import Setting
    from intaglio.reporting.explanation import explain
    from intaglio.reporting.make_report import Report, report
    from intaglio.runtime import QuantizedModel
    from intaglio.serving import Pool
    from intaglio.tune.compare_models import compare
else:
    MODULES = {
        "CompileOptions": "intaglio.backends.native_backend",
        "Image": "intaglio.quant.recipes.image",
        "PartlyQuantizedModel": "intaglio.parts",
        "Pool": "intaglio.serving",
        "QuantizedModel": "intaglio.runtime",
        "Recipe": "intaglio.quant.recipes.recipe",
        "Report": "intaglio.reporting.make_report",
        "Setting": "intaglio.quant.recipes.settings",
        "compare": "intaglio.tune",
        "explain": "intaglio.reporting.explanation",
        "from_checkpoint": "intaglio.api",
        "load": "intaglio.loading",
        "load_into": "intaglio.parts",
        "quantize": "intaglio.api",
        "report": "intaglio.reporting.make_report",
        "search": "intaglio.mixed_precision.search_function",
    }
    """Public name -> the module that defines it. Names that are missing here are modules themselves."""

    STAGES = frozenset(
        {
            "annotate",
            "calibrate",
            "capture",
            "compile",
            "convert",
            "correct",
            "equalize",
            "from_qdq",
            "imported_recipe",
            "plan",
            "prepare",
            "read_checkpoint",
            "requantize",
            "with_weights",
        }
    )
    """Functions of `intaglio.stages`, which an error names.

    That module is not asked for them, because `__getattr__` runs while it is imported.
    """

    def __getattr__(name: str) -> Any:
        """Import a public name at its first use, so that `intaglio --help` does not wait for PyTorch."""
        if name not in __all__:
            there = f"; call intaglio.stages.{name}" if name in STAGES else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{there}")
        home = MODULES.get(name)
        found = getattr(import_module(home), name) if home else import_module(f"intaglio.{name}")
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
