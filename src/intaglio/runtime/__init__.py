"""Compiled programs and the module that runs them."""

from intaglio.runtime.artifact import Artifact, build_artifact, open_artifact
from intaglio.runtime.coverage import Coverage, FloatPart
from intaglio.runtime.files import Saved
from intaglio.runtime.files import load as load_saved
from intaglio.runtime.model import QuantizedModel

__all__ = [
    "Artifact",
    "Coverage",
    "FloatPart",
    "QuantizedModel",
    "Saved",
    "build_artifact",
    "load_saved",
    "open_artifact",
]
