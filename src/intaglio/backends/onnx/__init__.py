"""ONNX: a reference in operators that ONNX has, and the file."""
