"""Decide which values of a graph are quantized, and give the reason for each operator that stays in float."""
