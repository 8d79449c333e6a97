"""Other places a reference model can go than the native program."""

from intaglio.backends.onnx import OnnxFile, to_onnx

__all__ = ["OnnxFile", "to_onnx"]
