"""LSTM, GRU and plain RNN: products in int8, gates in float32, hidden states requantized in every time step.

One operator is a call of the whole layer stack. Its operands are the quantized x (followed by the scales of its tokens
if these are dynamic), then six per layer and direction: weights s8[G, I] and s8[G, H], their scales, and both biases
f32[G], with G = 4 H (input, forget, cell, output), 3 H (reset, update, new) or H; then initial states, if given.
Results are y, the last hidden states and, for an LSTM, the last cell states; a cell does not return y.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from intaglio import numerics
from intaglio.ir import Attrs, Dim, DType, Graph, Op, Shape, TensorType, numel
from intaglio.ops.dynamic_quant import computes_row_scales, per_token_qparams, quantize_dynamic
from intaglio.ops.opdef import Call, Layout, OpDef, first_reason, rank, require_float_operands
from intaglio.ops.products.scratch_memory import CACHE_LINE, ceil_div

GATE_COUNT = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
PER_DIRECTION = 6
"""Number of operands per layer and direction."""


@dataclass(frozen=True)
class Direction:
    """Operands of one layer and direction."""

    w_x: np.ndarray
    w_h: np.ndarray
    columns_x: np.ndarray
    columns_h: np.ndarray
    bias_x: np.ndarray
    bias_h: np.ndarray


def apply_keeping_nan(z: np.ndarray, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Apply a function, but return NaN for NaN."""
    strange = np.isnan(z)
    return np.where(strange, np.float32(np.nan), function(np.where(strange, np.float32(0), z)))


def lstm_step(x: np.ndarray, h: np.ndarray, state: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the next hidden and cell state of an LSTM (Hochreiter and Schmidhuber 1997, with forget gates).

    ``c = f * c + i * g``, ``h = o * tanh(c)``. ``x`` and ``h`` are the products f32[B, 4 H], states are f32[B, H].
    """
    i, f, g, o = np.split(x + h, 4, -1)
    gates = [apply_keeping_nan(z, numerics.sigmoid) for z in (i, f, o)]
    cell = gates[1] * state[1] + gates[0] * apply_keeping_nan(g, numerics.tanh_f32)
    return gates[2] * apply_keeping_nan(cell, numerics.tanh_f32), cell


def gru_step(x: np.ndarray, h: np.ndarray, state: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Return the next hidden state of a GRU (Cho et al. 2014, with a bias inside of the reset).

    ``n = tanh(x_n + r * h_n)``, ``h = n + z * (h - n)``. ``x`` and ``h`` are the products f32[B, 3 H], the state f32[B,
    H].
    """
    (x_r, x_z, x_n), (h_r, h_z, h_n) = np.split(x, 3, -1), np.split(h, 3, -1)
    r, z = apply_keeping_nan(x_r + h_r, numerics.sigmoid), apply_keeping_nan(x_z + h_z, numerics.sigmoid)
    n = apply_keeping_nan(x_n + r * h_n, numerics.tanh_f32)
    return (n + z * (state[0] - n),)


def rnn_tanh_step(x: np.ndarray, h: np.ndarray, state: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Return the next hidden state of a plain RNN (Elman 1990): ``h = tanh(x + h)``, all f32[B, H]."""
    return (apply_keeping_nan(x + h, numerics.tanh_f32),)


def rnn_relu_step(x: np.ndarray, h: np.ndarray, state: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Return the next hidden state of a plain RNN with ReLU: ``h = relu(x + h)``, all f32[B, H]."""
    total = x + h
    return (np.where(total < 0, np.float32(0), total),)


CELL_STEPS = {"lstm": lstm_step, "gru": gru_step, "rnn_tanh": rnn_tanh_step, "rnn_relu": rnn_relu_step}


def product(
    quantized: np.ndarray,
    zero: int,
    row_scales: np.ndarray,
    weight: np.ndarray,
    column_scales: np.ndarray,
    bias: np.ndarray,
) -> np.ndarray:
    """Multiply u8[..., K] by s8[G, K]; return f32[..., G], `numerics.dequantize_rows` of the exact accumulator."""
    acc = (quantized.astype(np.float64) - zero) @ weight.astype(np.float64).T
    return numerics.dequantize_rows(acc.astype(np.int64).astype(np.int32), row_scales, column_scales, bias)


def run_direction(
    kind: str, of_x: np.ndarray, d: Direction, state: Sequence[np.ndarray], reverse: bool
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Run all time steps of one layer and direction.

    The hidden state is dynamically quantized per token for the next step.

    Args:
        kind: name of the layer in `CELL_STEPS`.
        of_x: Products of x with the input weights, f32[T, B, G].
        d: Operands of the direction.
        state: Initial states f32[B, H].
        reverse: Run from the last time step to the first.

    Returns:
        y f32[T, B, H] and the last states.
    """
    steps, batch = of_x.shape[:2]
    y, now = np.zeros((steps, batch, d.w_h.shape[1]), np.float32), tuple(state)
    with np.errstate(over="ignore", invalid="ignore"):
        for t in reversed(range(steps)) if reverse else range(steps):
            quantized, row_scales = quantize_dynamic(now[0], "token")
            of_h = product(quantized, numerics.ROW_ZERO, row_scales, d.w_h, d.columns_h, d.bias_h)
            now = CELL_STEPS[kind](of_x[t], of_h, now)
            y[t] = now[0]
    return y, now


def recurrent_reference(
    op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType
) -> tuple[np.ndarray, ...]:
    """Run layer after layer; y is dynamically quantized per token between layers."""
    attrs, rest = op.attrs, list(args)
    quantized = rest.pop(0)
    row_scales = rest.pop(0) if attrs["rows"] else np.full((1,) * quantized.ndim, types[0].qparams.step, np.float32)
    zero, count = types[0].qparams.zero, attrs["layers"] * attrs["directions"]
    parts = [Direction(*rest[PER_DIRECTION * i : PER_DIRECTION * (i + 1)]) for i in range(count)]
    given = rest[PER_DIRECTION * count :]
    if attrs["cell"]:
        quantized, row_scales, given = quantized[None], row_scales[None], [state[None] for state in given]
    elif attrs["batch_first"]:
        quantized, row_scales = quantized.swapaxes(0, 1), row_scales.swapaxes(0, 1)
    zeros = np.zeros((quantized.shape[1], parts[0].w_h.shape[1]), np.float32)
    last: list[tuple[np.ndarray, ...]] = []
    for layer in range(attrs["layers"]):
        found = []
        for direction in range(attrs["directions"]):
            d = parts[attrs["directions"] * layer + direction]
            of_x = product(quantized, zero, row_scales, d.w_x, d.columns_x, d.bias_x)
            state = [s[len(last)] for s in given] or [zeros] * states(op.kind)
            y, now = run_direction(op.kind, of_x, d, state, reverse=direction == 1)
            found.append(y)
            last.append(now)
        y = np.concatenate(found, -1)
        quantized, row_scales = quantize_dynamic(y, "token")
        zero = numerics.ROW_ZERO
    finals = tuple(np.stack(parts) for parts in zip(*last, strict=True))
    if attrs["cell"]:
        return tuple(state[0] for state in finals)
    return (np.ascontiguousarray(y.swapaxes(0, 1)) if attrs["batch_first"] else y, *finals)


def states(kind: str) -> int:
    """Return the number of states: 2 for an LSTM, 1 for the others."""
    return 2 if kind == "lstm" else 1


def result_shapes(kind: str, attrs: Attrs, x: Shape, hidden: int) -> tuple[Shape, ...]:
    """Return the shape of every result."""
    if attrs["cell"]:
        return ((x[0], hidden),) * states(kind)
    batch = x[0] if attrs["batch_first"] else x[1]
    final = (attrs["layers"] * attrs["directions"], batch, hidden)
    return ((*x[:2], attrs["directions"] * hidden), *[final] * states(kind))


def infer_recurrent(kind: str) -> Callable[[Attrs, Sequence[Shape]], Shape]:
    """Return the shape rule of the first result."""

    def infer(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
        hidden = shapes[2 + attrs["rows"]][1]
        return result_shapes(kind, attrs, shapes[0], int(hidden))[0]

    return infer


def bind_recurrent(call: Call) -> Attrs:
    """Return the geometry of a call of the layer stack or of one cell."""
    given = call.arguments
    cell = "_cell" in call.target
    return {
        "layers": 1 if cell else int(given["num_layers"]),
        "directions": 1 if cell or not given["bidirectional"] else 2,
        "batch_first": bool(given.get("batch_first", False)),
        "cell": cell,
    }


def require_fixed_features(call: Call) -> str | None:
    """Return why a call is refused: the number of input features must be fixed."""
    size = call.shape()[-1]
    return None if isinstance(size, int) else f"the number of input features, {size}, is dynamic"


def require_no_dropout(call: Call) -> str | None:
    """Return why a call is refused: dropout between layers is not supported."""
    if call.arguments.get("train") and float(call.arguments.get("dropout", 0)) > 0:
        return "dropout between layers is active, as in training"
    return None


def macs_of_weights(x: Shape, weights: Sequence[Shape]) -> Dim:
    """Count the multiply-accumulates of a call: every weight is used in every time step of every entry of the batch."""
    total: Dim = 0
    for shape in weights:
        if len(shape) == 2:
            total = total + numel(x[:-1]) * numel(shape)
    return total


def recurrent_macs(attrs: Attrs, shapes: Sequence[Shape], result: Shape) -> Dim:
    """Count the multiply-accumulates of a call of the integer operator."""
    first, places = 1 + attrs["rows"], attrs["layers"] * attrs["directions"]
    weights = [shapes[first + PER_DIRECTION * place + which] for place in range(places) for which in (0, 1)]
    return macs_of_weights(shapes[0], weights)


def recurrent_scratch(op: Op, types: Mapping[str, TensorType]) -> Dim:
    """Return the number of 64-byte lines that threads share, in the order of `cut_up` in sequences/recurrent.h."""
    x, (gates, hidden) = types[op.inputs[0]].shape, types[op.inputs[2 + op.attrs["rows"]]].shape
    d, batch, rows = op.attrs["directions"], x[int(not (op.attrs["cell"] or op.attrs["batch_first"]))], numel(x[:-1])
    wide, cells = d * hidden, d * batch
    state, result = cells * hidden, rows * wide
    floats: tuple[Dim, ...] = (d * rows * gates, result, rows, cells * gates, state, state, cells)
    total: Dim = 0
    for size in (*(4 * count for count in floats), result, state):
        total = total + ceil_div(size, CACHE_LINE)
    return total


def valid_recurrent(op: Op, graph: Graph) -> None:
    """Check weights, scales and biases against the geometry of the call, and the shapes of states and results."""
    attrs = op.attrs
    flags, counts = [attrs.get(key) for key in FLAGS], [attrs.get(key) for key in COUNTS]
    if set(attrs) != {*FLAGS, *COUNTS} or not all(type(flag) is bool for flag in flags):
        raise ValueError(f"{op.kind} has wrong attributes: {dict(attrs)}")
    layers, directions = counts
    if type(layers) is not int or layers < 1 or directions not in (1, 2):
        raise ValueError(f"{op.kind} has wrong attributes: {dict(attrs)}")
    first, places = 1 + attrs["rows"], layers * directions
    x, given = graph.types[op.inputs[0]], op.inputs[first + PER_DIRECTION * places :]
    if len(op.inputs) not in (first + PER_DIRECTION * places, first + PER_DIRECTION * places + states(op.kind)):
        raise ValueError(f"{op.kind} has {len(op.inputs)} operands, which do not fit its attributes {dict(attrs)}")
    if x.dtype is not DType.U8 or x.q is None or len(x.shape) != 3 - attrs["cell"] or not isinstance(x.shape[-1], int):
        raise ValueError(f"%{op.inputs[0]} is {x}; {op.kind} expects u8 values with a fixed number of features")
    if attrs["rows"]:
        maker = graph.makers().get(op.inputs[1])
        made = maker is not None and computes_row_scales(maker) and maker.outputs == op.inputs[:2]
        if not made or x.q != per_token_qparams(op.inputs[1]):
            raise ValueError(f"%{op.inputs[0]} is {x}, which does not belong to the per-token scales %{op.inputs[1]}")
    elif isinstance(x.q.axis, int) or len(x.q.scales) != 1:
        raise ValueError(f"%{op.inputs[0]} is {x}; {op.kind} expects quantized values with one scale")
    weight = graph.types[op.inputs[first + 1]]
    hidden = weight.shape[1] if len(weight.shape) == 2 else None
    if not isinstance(hidden, int):
        raise ValueError(f"%{op.inputs[first + 1]} is {weight}, but must be a matrix of fixed sizes")
    for place in range(places):
        names = op.inputs[first + PER_DIRECTION * place : first + PER_DIRECTION * (place + 1)]
        width = x.shape[-1] if place < directions else directions * hidden
        _check_place(names, GATE_COUNT[op.kind] * hidden, int(width), hidden, graph)
    shapes = result_shapes(op.kind, attrs, x.shape, hidden)
    results = [graph.types[name] for name in op.outputs]
    if tuple(kind.shape for kind in results) != shapes or any(kind.dtype is not DType.F32 for kind in results):
        raise ValueError(
            f"{op.kind} computes f32 results of shapes {shapes}, but they are {[str(kind) for kind in results]}"
        )
    for name in given:
        kind = graph.types[name]
        if kind.shape != shapes[-1] or kind.dtype is not DType.F32 or name in graph.constants:
            raise ValueError(
                f"%{name} is {kind}, but a state of {op.kind} must be an f32 activation of shape {shapes[-1]}"
            )


FLAGS, COUNTS = ("batch_first", "cell", "rows"), ("layers", "directions")


def _check_place(names: tuple[str, ...], gates: int, inputs: int, hidden: int, graph: Graph) -> None:
    """Check the six constants of a layer and direction: two weights, their scales, their biases."""
    expected = [(gates, inputs), (gates, hidden), *[(gates,)] * (PER_DIRECTION - 2)]
    for name, shape in zip(names, expected, strict=True):
        kind = DType.S8 if len(shape) == 2 else DType.F32
        if name not in graph.constants or (graph.types[name].shape, graph.types[name].dtype) != (shape, kind):
            raise ValueError(f"%{name} is {graph.types[name]}, but must be a constant {kind} of shape {shape}")
        if kind is DType.F32 and not np.isfinite(graph.constants[name]).all():
            raise ValueError(f"%{name} has numbers that are not finite")


def _record(kind: str, targets: tuple[str, ...]) -> OpDef:
    return OpDef(
        name=kind,
        targets=targets,
        operands=("input",),
        anchor=True,
        bind=bind_recurrent,
        check=first_reason(require_float_operands, rank(2, 3), require_fixed_features, require_no_dropout),
        infer=infer_recurrent(kind),
        reference=recurrent_reference,
        validate=valid_recurrent,
        results_differ=True,
        macs=recurrent_macs,
        layout=Layout.ROW_MAJOR,
        shared_scratch=recurrent_scratch,
        kernel="recurrent",
    )


RECURRENT_OPS = tuple(_record(kind, (f"aten.{kind}.input", f"aten.{kind}_cell.default")) for kind in CELL_STEPS)
RECURRENT = tuple(record.name for record in RECURRENT_OPS)
