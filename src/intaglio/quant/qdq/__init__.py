"""Scales and zero points from ranges, and the conversion of a prepared graph to the Q/DQ reference model."""
