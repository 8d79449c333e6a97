"""The file format and the state dictionary of quantized models."""
