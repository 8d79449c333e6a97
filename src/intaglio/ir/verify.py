"""The verifier: structure of a graph and the types each operator takes. Runs after every pass."""

from __future__ import annotations

from collections.abc import Mapping

from intaglio.ir.graph import Graph, Op
from intaglio.ir.moves import MOVES
from intaglio.ir.types import DType

U8, S8, I32, F32, BOOL = DType.U8, DType.S8, DType.I32, DType.F32, DType.BOOL
LEVELS = (U8, S8)
MOVED = (U8, F32, DType.BF16, DType.I64, DType.BOOL)
"""What moves carry, none of them changed."""
PRODUCTS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear")

Rules = Mapping[str, tuple[tuple[tuple[DType, ...], ...], tuple[DType, ...]]]

RULES: Rules = {
    "quantize": (((F32,),), LEVELS),
    "pixels": (((F32,), (F32,), (F32,)), (U8,)),
    "dequantize": (((*LEVELS, I32),), (F32,)),
    **dict.fromkeys(PRODUCTS, (((U8,), (S8,), (I32,)), (I32,))),
    "linear_f32": (((F32,), (S8, DType.F16)), (F32,)),
    "requantize": (((I32,), (F32,)), (U8,)),
    "activate": (((I32,), (F32,)), (U8,)),
    "add": (((U8, I32), (U8,), (F32,), (F32,)), (U8,)),
    "mul": (((U8,), (U8,), (F32,)), (U8,)),
    "affine": (((U8,), (F32,), (F32,)), (U8,)),
    "prelu": (((U8,), (F32,), (F32,)), (U8,)),
    "layer_norm": (((U8,), (F32,), (F32,), (F32,)), (U8,)),
    "clamp": (((U8,),), (U8,)),
    **{kind: ((MOVED,), MOVED) for kind in MOVES if kind != "cat"},
    **{f"max_pool{axes}d": (((U8,),), (U8,)) for axes in (1, 2, 3)},
    **{f"{kind}{axes}d": (((U8,), (F32,)), (U8,)) for kind in ("avg_pool", "adaptive_avg_pool") for axes in (1, 2, 3)},
    **{f"upsample_nearest{axes}d": (((U8,), *[(I32,)] * axes), (U8,)) for axes in (1, 2, 3)},
    "upsample_linear1d": (((U8,), (I32,), (F32,), (F32,)), (U8,)),
    "upsample_bilinear2d": (((U8,), (I32,), (F32,), (I32,), (F32,), (F32,)), (U8,)),
    "table": (((U8,), (U8,)), (U8,)),
    "quantize_rows": (((F32,),), (U8, F32)),
    "dequantize_rows": (((I32,), (F32,), (F32,), (F32,)), (F32,)),
    "attention": (((U8,), (U8,), (U8,)), (U8,)),
    "bmm": (((U8,), (U8,)), (I32,)),
}
"""Kind -> element types each operand may have, and the result's. Kinds not listed carry any types."""
PAIRS = ("quantize_rows",)
"""They give levels and the scales of their rows."""
BODY_RULES = {kind: RULES[kind] for kind in ("quantize", "dequantize")}
"""Of operators inside a loop, whose names are otherwise their own: ops/loop_ops/primitives.py has them."""
KEEP_REST = ("requantize", "add")
"""They may give a value of 16 bits as a level and a rest; a sum may take one, the rest as its last operand."""
OPTIONAL: dict[str, tuple[DType, ...]] = {
    "add": (U8,),
    "activate": (F32,),
    "attention": (BOOL, F32),
    "linear_f32": (F32,),
}
"""Kind -> element types of a last operand that may be left out: a rest, gains, a mask, a bias."""
B_OPERANDS = {"attention": (1, 2), "bmm": (1,)}
"""Kind -> operands that kernels read as they read weights: symmetric, zero point 128, levels 1..255."""


class VerifyError(AssertionError):
    """A graph that our own passes broke: a bug of intaglio, never of its user."""


def verify(graph: Graph, after: str = "", rules: Rules = RULES) -> Graph:
    """The graph itself when it is sound, else `VerifyError` naming the pass, the operator and the rule."""
    place = f" after {after}" if after else ""
    defined = {*graph.inputs, *graph.constants}
    _require(len(defined) == len(graph.inputs) + len(graph.constants), f"an input is also a constant{place}")
    for name in defined:
        _require(name in graph.types, f"%{name} has no type{place}")
    for op in graph.ops:
        _check_op(op, graph, defined, place, rules)
        defined.update(op.outputs)
    for name in graph.outputs:
        _require(name in defined, f"output %{name} is never made{place}")
        _require(graph.types[name].dtype is not I32 or graph.types[name].q is None, f"output %{name} is an accumulator")
    _check_accumulators(graph, place)
    for name, array in graph.constants.items():
        _require(tuple(array.shape) == graph.types[name].shape, f"constant %{name} is not {graph.types[name]}{place}")
    return graph


def _check_op(op: Op, graph: Graph, defined: set[str], place: str, rules: Rules) -> None:
    label = f"{op.kind} -> %{', %'.join(op.outputs)}{place}"
    for name in op.inputs:
        _require(name in defined, f"{label}: %{name} is read before it is made")
    for name in op.outputs:
        _require(name not in defined, f"{label}: %{name} is made twice")
        _require(name in graph.types, f"{label}: %{name} has no type")
    if op.body is not None:
        _check_ends(op, op.body, graph, label)
        verify(op.body, f"{op.kind}{place}", BODY_RULES)
    if op.kind not in rules:
        return
    operands, results = rules[op.kind]
    if op.kind.startswith("upsample") and "results" in op.attrs:  # no tables
        operands = (operands[0], *operands[-1:] * ("nearest" not in op.kind))
    if op.kind in OPTIONAL and len(op.inputs) > len(operands):
        operands = (*operands, OPTIONAL[op.kind])
    _require(len(op.inputs) == len(operands), f"{label}: takes {len(operands)} operands, has {len(op.inputs)}")
    for name, allowed in zip(op.inputs, operands, strict=True):
        _require(graph.types[name].dtype in allowed, f"{label}: %{name} is {graph.types[name].dtype}")
    for index in B_OPERANDS.get(op.kind, ()):
        q = graph.types[op.inputs[index]].levels
        around = q.zeros == (128,) and q.qmin >= 1 and q.qmin + q.qmax == 256
        _require(around, f"{label}: %{op.inputs[index]} is not symmetric")
    least, most = 1 + (op.kind in PAIRS), 1 + (op.kind in (*KEEP_REST, *PAIRS))
    _require(least <= len(op.outputs) <= most, f"{label}: {len(op.outputs)} results")
    for result in (graph.types[name] for name in op.outputs):
        _require(result.dtype in results, f"{label}: gives {result.dtype}")
        if op.kind in MOVES:
            _require(result.dtype is graph.types[op.inputs[0]].dtype, f"{label}: a move that changes the element type")
        if result.dtype in (U8, I32):
            _require(result.q is not None, f"{label}: levels without parameters")


def _check_ends(op: Op, body: Graph, graph: Graph, label: str) -> None:
    """What a body reads and gives are the operator's operands and results, in order."""
    for outer, inner in ((op.inputs, body.inputs), (op.outputs, body.outputs)):
        same = [graph.types[name] for name in outer] == [body.types[name] for name in inner]
        _require(len(outer) == len(inner) and same, f"{label}: its body has other ends")


def _check_accumulators(graph: Graph, place: str) -> None:
    """An accumulator has one reader and stays inside its partition."""
    users = graph.users()
    for op in graph.ops:
        for name in op.outputs:
            kind = graph.types[name]
            if kind.dtype is I32 and kind.q is not None:
                _require(len(users[name]) == 1, f"accumulator %{name} has {len(users[name])} readers{place}")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise VerifyError(text)
