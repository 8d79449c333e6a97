"""Compiled programs and the module that runs them."""

from intaglio.runtime.artifact import Artifact, build_artifact, open_artifact
from intaglio.runtime.float_islands import HostLoop, host_names, island_of, loops_in
from intaglio.runtime.quantized_model import QuantizedModel
from intaglio.runtime.reports.coverage import Coverage, FloatPart
from intaglio.runtime.saved.model_file import SavedModel, copied_inputs
from intaglio.runtime.saved.model_file import decode as decode_saved
from intaglio.runtime.saved.saved_libraries import Library, build_library

__all__ = [
    "Artifact",
    "Coverage",
    "FloatPart",
    "HostLoop",
    "Library",
    "QuantizedModel",
    "SavedModel",
    "build_artifact",
    "build_library",
    "copied_inputs",
    "decode_saved",
    "host_names",
    "island_of",
    "loops_in",
    "open_artifact",
]
