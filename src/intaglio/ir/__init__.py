"""The integer graph and the compiled program: types, dimensions, operators and records. This package does not use
torch.
"""

from intaglio.ir.constants import Constants, StoredArray
from intaglio.ir.dims import (
    Dim,
    Expression,
    Shape,
    SizeCondition,
    c_expression,
    evaluate,
    evaluator,
    has_quotient,
    numel,
    solve,
    substitute,
    symbol,
    symbols_of,
)
from intaglio.ir.graph import Attrs, Graph, Input, ModelInfo, Op, Origin, Output, Signature, State, fresh, prune
from intaglio.ir.number_array import NumberArray
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
from intaglio.ir.types import SIGN_OFFSET, Axis, DType, Groups, Packing, PerRow, PerRowGroup, QParams, Ref, TensorType
from intaglio.ir.verify import TypeRule, VerifyError, verify_graph

__all__ = [
    "SIGN_OFFSET",
    "ArenaLocation",
    "Attrs",
    "Axis",
    "Constants",
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
    "NumberArray",
    "Op",
    "Origin",
    "Output",
    "Packing",
    "PerRow",
    "PerRowGroup",
    "Program",
    "QParams",
    "RangeCheck",
    "Ref",
    "Schedule",
    "Shape",
    "Signature",
    "SizeCondition",
    "State",
    "StepInfo",
    "StoredArray",
    "TensorType",
    "TypeRule",
    "VerifyError",
    "c_expression",
    "evaluate",
    "evaluator",
    "fresh",
    "graph_text",
    "has_quotient",
    "numel",
    "prune",
    "solve",
    "substitute",
    "symbol",
    "symbols_of",
    "verify_graph",
]
