"""Compiled programs and the module that runs them."""

from intaglio.runtime.artifact import Artifact, build_artifact, open_artifact
from intaglio.runtime.coverage import Coverage, FloatPart
from intaglio.runtime.files import Library, Saved, build_library
from intaglio.runtime.files import load as load_saved
from intaglio.runtime.model import QuantizedModel

__all__ = [
    "Artifact",
    "Coverage",
    "FloatPart",
    "Library",
    "QuantizedModel",
    "Saved",
    "build_artifact",
    "build_library",
    "load_saved",
    "open_artifact",
]
