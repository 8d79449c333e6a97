"""The integer graph and the compiled program: types, dimensions, operators and records. This package does not use
torch.
"""

from intaglio.ir.dims import (
    Dim,
    Expression,
    Shape,
    c_expression,
    evaluate,
    evaluator,
    numel,
    solve,
    substitute,
    symbol,
    symbols_of,
)
from intaglio.ir.graph import Attrs, Graph, Input, ModelInfo, Op, Origin, Output, Signature, State, fresh, prune
from intaglio.ir.program_records import (
    ArenaLocation,
    Cost,
    External,
    HostCall,
    IslandCall,
    Program,
    RangeCheck,
    Schedule,
    StepInfo,
)
from intaglio.ir.text import graph_text
from intaglio.ir.types import SIGN_OFFSET, Axis, DType, Groups, Packing, PerRow, QParams, Ref, TensorType
from intaglio.ir.verify import TypeRule, VerifyError, verify_graph

__all__ = [
    "SIGN_OFFSET",
    "ArenaLocation",
    "Attrs",
    "Axis",
    "Cost",
    "DType",
    "Dim",
    "Expression",
    "External",
    "Graph",
    "Groups",
    "HostCall",
    "Input",
    "IslandCall",
    "ModelInfo",
    "Op",
    "Origin",
    "Output",
    "Packing",
    "PerRow",
    "Program",
    "QParams",
    "RangeCheck",
    "Ref",
    "Schedule",
    "Shape",
    "Signature",
    "State",
    "StepInfo",
    "TensorType",
    "TypeRule",
    "VerifyError",
    "c_expression",
    "evaluate",
    "evaluator",
    "fresh",
    "graph_text",
    "numel",
    "prune",
    "solve",
    "substitute",
    "symbol",
    "symbols_of",
    "verify_graph",
]
