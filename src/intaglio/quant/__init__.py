"""Quantize a captured graph: one package for each stage, from recipes to the Q/DQ reference model."""
