"""Corrections, which make an int8 model more accurate without extra cost at run time."""
