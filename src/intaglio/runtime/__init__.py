"""Compiled programs and the module that runs them."""

from intaglio.runtime.artifact import Artifact, build_artifact, open_artifact
from intaglio.runtime.coverage import Coverage, FloatPart
from intaglio.runtime.files import Library, Saved, build_library, example_of
from intaglio.runtime.files import load as load_saved
from intaglio.runtime.islands import HostLoop, float_calls, host_names, loops_in
from intaglio.runtime.model import QuantizedModel

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
    "float_calls",
    "host_names",
    "load_saved",
    "loops_in",
    "open_artifact",
]
