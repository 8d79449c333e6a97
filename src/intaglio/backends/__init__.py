"""Reference models in the forms of other engines."""

from intaglio.backends.onnx import OnnxFile, to_onnx

__all__ = ["OnnxFile", "to_onnx"]
