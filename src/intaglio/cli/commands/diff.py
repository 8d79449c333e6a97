"""`intaglio diff`: what differs between two saved models, and where their results part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from rich.console import RenderableType

from intaglio import numerics
from intaglio.cli import targets
from intaglio.cli.show import Result, name_value_table, table
from intaglio.cli.targets import Call
from intaglio.formatting.number_text import size_text
from intaglio.ir import Graph, Op, TensorType
from intaglio.ops import BY_NAME, interpret
from intaglio.runtime import QuantizedModel
from intaglio.signature import bind, initial_state
from intaglio.torch_private import pytree

BATCH = 2
"""Size of free dimensions in random inputs."""


def run(first: Path, second: Path, data: str | None, trace: bool) -> dict[str, Any]:
    """Compare two files and return the result for JSON."""
    models = [targets.load_saved(str(path)) for path in (first, second)]
    a, b = (model for model in models if model is not None)
    call = targets.call_and_batches(a, data, ())[0] if data is not None else targets.random_call(a, BATCH)
    found: dict[str, Any] = {
        "files": [_file(path, model) for path, model in zip((first, second), (a, b), strict=True)],
        "changes": list(_changes(a.graph, b.graph)),
        "results": None if call is None else _results(a, b, call),
    }
    if trace:
        found["trace"] = _trace(a, b, call)
    return found


def _file(path: Path, model: QuantizedModel) -> dict[str, Any]:
    coverage = model.coverage
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        "model": model.model_info.name,
        "macs_int8": coverage.macs,
        "islands": coverage.islands,
    }


def _changes(a: Graph, b: Graph) -> Iterator[dict[str, Any]]:
    """Yield what differs between two integer graphs, in execution order of the first one."""
    ops = [{op.output: op for op in graph.ops} for graph in (a, b)]
    for name in dict.fromkeys((*ops[0], *ops[1])):
        before, after = (found.get(name) for found in ops)
        known = before or after
        assert known is not None
        where = {"value": name, "path": known.origin.path}
        if before is None or after is None or before.kind != after.kind:
            kinds = [None if op is None else op.kind for op in (before, after)]
            yield {**where, "what": "operator", "first": kinds[0], "second": kinds[1]}
            continue
        yield from ({**where, **change} for change in _type_changes(a.types[name], b.types[name]))
        yield from ({**where, **change} for change in _constant_changes(before, after, a, b))


def _type_changes(before: TensorType, after: TensorType) -> Iterator[dict[str, Any]]:
    if before.dtype is not after.dtype:
        yield {"what": "data type", "first": before.dtype.value, "second": after.dtype.value}
    elif before.q is not None and after.q is not None and before.q != after.q:
        if before.q.scales != after.q.scales:
            yield {"what": "scale", "first": _range(before.q.scales), "second": _range(after.q.scales)}
        if before.q.zeros != after.q.zeros:
            yield {"what": "zero point", "first": _range(before.q.zeros), "second": _range(after.q.zeros)}


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"


def _constant_changes(before: Op, after: Op, a: Graph, b: Graph) -> Iterator[dict[str, Any]]:
    """Yield the differences of the constants that an operator reads, such as weights, in the order of its operands."""
    if len(before.inputs) != len(after.inputs):
        yield {"what": "operands", "first": str(len(before.inputs)), "second": str(len(after.inputs))}
    for place, (left, right) in enumerate(zip(before.inputs, after.inputs, strict=False)):
        if left not in a.constants or right not in b.constants:
            continue
        own, other = a.constants[left], b.constants[right]
        if own.shape != other.shape or own.dtype != other.dtype:
            shapes = (f"{array.dtype}{list(array.shape)}" for array in (own, other))
            yield {"what": f"operand {place}", **dict(zip(("first", "second"), shapes, strict=True))}
        elif not np.array_equal(own, other):
            differ = int((own != other).sum())
            yield {"what": f"operand {place}", "first": "", "second": f"{differ} of {own.size} elements differ"}


def _results(a: QuantizedModel, b: QuantizedModel, call: Call) -> list[dict[str, Any]]:
    """Return for each result whether it has the same bits in both models, and how far it is from the first."""
    first, second = (pytree.tree_leaves(model(*call[0], **call[1])) for model in (a, b))
    if len(first) != len(second):
        return [{"problem": f"the first model has {len(first)} results, the second {len(second)}"}]
    return [_difference(*pair) for pair in zip(first, second, strict=True) if isinstance(pair[0], torch.Tensor)]


def _difference(first: torch.Tensor, second: Any) -> dict[str, Any]:
    if not isinstance(second, torch.Tensor) or first.shape != second.shape:
        return {"problem": "the results differ in shape or type"}
    return {"same_bits": torch.equal(first, second), "sqnr_db": _decibels(first.numpy(), second.numpy())}


def _decibels(first: np.ndarray, second: np.ndarray) -> float | None:
    """Return the signal-to-noise ratio of the second array; ``None`` if the arrays are equal or zero."""
    noise = float(np.square(np.subtract(first, second, dtype=np.float64)).sum())
    signal = float(np.square(first, dtype=np.float64).sum())
    return 10 * math.log10(signal / noise) if noise and signal else None


def _trace(a: QuantizedModel, b: QuantizedModel, call: Call | None) -> list[dict[str, Any]]:
    """Return the values, by name, at which both models differ, in execution order, with the distance of each."""
    if call is None:
        raise typer.BadParameter(targets.NEEDS_DATA, param_hint="--trace")
    if a.islands or b.islands or a.hosts or b.hosts:
        problem = "one of the models has float islands or host operators, which the interpreter does not run"
        raise typer.BadParameter(problem, param_hint="--trace")
    values = [_values(model, call) for model in (a, b)]
    origins = {op.output: op.origin.path for op in a.graph.ops}
    found = []
    for name, own in values[0].items():
        other = values[1].get(name)
        if other is not None and other.shape == own.shape and not np.array_equal(own, other):
            db = _decibels(_real(own, a.graph.types[name]), _real(other, b.graph.types[name]))
            if db is not None:
                found.append({"value": name, "path": origins.get(name, ""), "sqnr_db": db})
    return found


def _values(model: QuantizedModel, call: Call) -> Mapping[str, np.ndarray]:
    """Return every computed value of a call, from the interpreter."""
    arrays = [leaf.numpy() for leaf in [*bind(model.signature, *call), *initial_state(model.signature)]]
    values: dict[str, np.ndarray] = {}
    interpret(model.graph, arrays, BY_NAME, watch=values.__setitem__)
    return values


def _real(values: np.ndarray, kind: TensorType) -> np.ndarray:
    """Return the real numbers that quantized values stand for; values whose scales are computed stay as they are."""
    if kind.q is None or not (kind.q.axis is None or isinstance(kind.q.axis, int)):
        return values
    shape = [1] * values.ndim
    if kind.q.axis is not None:
        shape[kind.q.axis] = -1
    scales, zeros = (
        np.array(part).reshape(shape) if len(part) > 1 else part[0] for part in (kind.q.scales, kind.q.zeros)
    )
    return numerics.dequantize(values, scales, zeros)


def render(result: Result) -> Iterator[RenderableType]:
    """Yield the printed parts of a result."""
    for file in result["files"]:
        facts = f"{100 * file['macs_int8']:.1f} % of MACs in int8, {file['islands']} float islands"
        yield f"{file['file']}: {file['model']}, {size_text(file['bytes'])}, {facts}"
    changes = result["changes"]
    if not changes:
        yield "The programs have the same operators, types, scales and constants."
    else:
        rows = [(c["path"] or c["value"], c["what"], c["first"] or "", c["second"] or "") for c in changes]
        yield table(("module", "what", "first", "second"), rows, f"{len(rows)} differences", text=4)
    for number, found in enumerate(result["results"] or ()):
        yield name_value_table([(f"result {number}", _result_text(found))])
    if "trace" in result:
        values = [(one["path"] or one["value"], one["value"], f"{one['sqnr_db']:.1f}") for one in result["trace"]]
        yield table(("module", "value", "SQNR, dB"), values, "Values that differ, in execution order", text=2)


def _result_text(found: Mapping[str, Any]) -> str:
    if "problem" in found:
        return str(found["problem"])
    if found["same_bits"]:
        return "the same bits"
    return f"{found['sqnr_db']:.1f} dB from the first model's" if found["sqnr_db"] is not None else "differs"
