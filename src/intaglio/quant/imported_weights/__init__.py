"""Weights that another tool quantized: as values of a model, as modules, and in a captured graph."""
