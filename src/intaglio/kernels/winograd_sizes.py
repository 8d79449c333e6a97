"""Sizes of layers that Winograd's method computes (native/layers/winograd.cpp)."""

MOST_INPUTS = 1024
"""Input channels up to which 32-bit sums cannot overflow."""
POSITIONS = 16
"""Products of a square of 2 by 2 results for each input and output channel."""
FEWEST_PIXELS = 128
"""Smallest number of pixels of an image for which these products take longer than reading their weights."""
