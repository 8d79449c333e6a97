"""Compiled programs and the module that runs them."""

from intaglio.runtime.artifact import Artifact, build_artifact
from intaglio.runtime.coverage import Coverage, FloatPart
from intaglio.runtime.model import QuantizedModel

__all__ = ["Artifact", "Coverage", "FloatPart", "QuantizedModel", "build_artifact"]
