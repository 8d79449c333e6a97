"""Groups of operators that fusion, annotation and lowering treat alike, by name."""

ANCHORS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear")
ACCUMULATING = (*ANCHORS, "bmm")
"""What gives an int32 accumulator, which may leave its partition dequantized."""
SUMS = ("add", "scaled_add")
"""Both are `add` in the integer graph; the second has a factor per channel."""
NUMBERS = ("mul_number", "div_number")
"""Scale what they read; behind a product of two activations, its unit."""
