"""The integer graph and what is made of it: types, operators, partitions, plans, programs. No torch."""

from intaglio.ir.dims import Dim, Expression, Shape, c_expression, evaluate, numel, symbol, symbols_of
from intaglio.ir.graph import About, Graph, Input, Op, Origin, Output, Signature, fresh, prune
from intaglio.ir.partition import (
    Buffer,
    External,
    IslandCall,
    Partition,
    Placement,
    Plan,
    Program,
    Schedule,
    Step,
    StepNote,
    Work,
    lies,
)
from intaglio.ir.text import graph_text, partitions_text
from intaglio.ir.types import Axis, DType, Groups, QParams, Ref, Rows, TensorType
from intaglio.ir.verify import VerifyError, verify

__all__ = [
    "About",
    "Axis",
    "Buffer",
    "DType",
    "Dim",
    "Expression",
    "External",
    "Graph",
    "Groups",
    "Input",
    "IslandCall",
    "Op",
    "Origin",
    "Output",
    "Partition",
    "Placement",
    "Plan",
    "Program",
    "QParams",
    "Ref",
    "Rows",
    "Schedule",
    "Shape",
    "Signature",
    "Step",
    "StepNote",
    "TensorType",
    "VerifyError",
    "Work",
    "c_expression",
    "evaluate",
    "fresh",
    "graph_text",
    "lies",
    "numel",
    "partitions_text",
    "prune",
    "symbol",
    "symbols_of",
    "verify",
]
