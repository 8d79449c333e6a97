"""Groups of operators that fusion, annotation and lowering treat alike; each is a query of the operator records."""

from __future__ import annotations

from intaglio.ops.records import OPS

ANCHORS = tuple(name for name, record in OPS.items() if record.multiplies_weight and not record.row_groups)
"""Convolutions and linear layers with one weight, whose kernels compute the operators behind them too."""
ACCUMULATING = tuple(name for name, record in OPS.items() if record.accumulates)
"""Operators whose result is an int32 accumulator, which may leave its partition dequantized."""
ADD_OPS = tuple(name for name, record in OPS.items() if record.adds)
"""Sums of two activations. Each becomes an `add` in the integer graph; `scaled_add` has a factor per channel."""
SCALAR_OPS = tuple(name for name, record in OPS.items() if record.multiplies_by_scalar)
"""Operators that multiply or divide by a constant number; after a `bmm` the number is folded into its scale."""
PRECISE_FUNCTIONS = tuple(name for name, record in OPS.items() if record.precise is not None)
"""Functions of one value that a GEMM can apply to its accumulators."""
