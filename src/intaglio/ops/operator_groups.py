"""Groups of operators that fusion, annotation and lowering treat alike, by name; each is a question to the records."""

from __future__ import annotations

from intaglio.ops.records import OPS

ANCHORS = tuple(name for name, record in OPS.items() if record.multiplies_weight)
"""Convolutions and linear layers."""
ACCUMULATING = tuple(name for name, record in OPS.items() if record.accumulates)
"""What gives an int32 accumulator, which may leave its partition dequantized."""
SUMS = tuple(name for name, record in OPS.items() if record.adds)
"""Each is `add` in the integer graph; `scaled_add` has a factor per channel."""
NUMBERS = tuple(name for name, record in OPS.items() if record.scales)
"""Scale what they read; behind a product of two activations, its unit."""
PRECISE_FUNCTIONS = tuple(name for name, record in OPS.items() if record.precise is not None)
"""Functions of one value that a product can compute on its accumulators."""
