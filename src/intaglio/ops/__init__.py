"""Operator records and the reference interpreter of the integer graph. This package does not use torch."""

from __future__ import annotations

from intaglio.ops.interpret import interpret, run_op
from intaglio.ops.opdef import Call, Layout, OpDef, Roles
from intaglio.ops.operator_groups import ACCUMULATING, ADD_OPS, ANCHORS, PRECISE_FUNCTIONS, SCALAR_OPS
from intaglio.ops.preconditions import check_graph, needs, verify, wrong_shapes
from intaglio.ops.records import BY_NAME, BY_TARGET, OPS, checked_records, index, op_def

__all__ = [
    "ACCUMULATING",
    "ADD_OPS",
    "ANCHORS",
    "BY_NAME",
    "BY_TARGET",
    "OPS",
    "PRECISE_FUNCTIONS",
    "SCALAR_OPS",
    "Call",
    "Layout",
    "OpDef",
    "Roles",
    "check_graph",
    "checked_records",
    "index",
    "interpret",
    "needs",
    "op_def",
    "run_op",
    "verify",
    "wrong_shapes",
]
