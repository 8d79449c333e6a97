"""Passes that bring the quantize and dequantize operators of imported models to the form of a `Reference`."""
