"""Compiled programs and the module that runs them."""

from intaglio.runtime.artifact import Artifact, build_artifact, open_artifact
from intaglio.runtime.coverage import Coverage, FloatPart
from intaglio.runtime.float_islands import HostLoop, host_names, island_of, loops_in
from intaglio.runtime.quantized_model import QuantizedModel
from intaglio.runtime.saved.model_file import Library, Saved, build_library, example_of
from intaglio.runtime.saved.model_file import load as load_saved

__all__ = [
    "Artifact",
    "Coverage",
    "FloatPart",
    "HostLoop",
    "Library",
    "QuantizedModel",
    "Saved",
    "build_artifact",
    "build_library",
    "example_of",
    "host_names",
    "island_of",
    "load_saved",
    "loops_in",
    "open_artifact",
]
