"""Evaluation of a graph layer by layer, in float and as it is quantized so far."""
