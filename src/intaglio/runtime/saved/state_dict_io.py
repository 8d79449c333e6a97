"""The state dictionary of a `QuantizedModel`: conversion of its integer graph to tensors and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from intaglio import numerics
from intaglio.errors import MALFORMED, ArtifactError
from intaglio.ir import Constants, Graph, Op, Signature, State, TensorType, VerifyError
from intaglio.ops import verify
from intaglio.runtime.saved.archive import from_json, to_json
from intaglio.runtime.saved.json_codec import ParameterTable, decode_graph, encode_graph
from intaglio.runtime.saved.model_file import SCALES_MEMBER

GRAPH = "graph"
"""Key of the graph's JSON text as bytes. The keys of its constants are this key, a dot and the name."""

CLAMP_ATTRS = frozenset({"low", "high"})
"""Attributes whose values follow from scales and may therefore differ."""

LOAD_SAME_MODEL = (
    "load it into a model of the same float model and recipe; model.save and intaglio.load keep whole models"
)


def tensors_of(graph: Graph) -> dict[str, torch.Tensor]:
    """Return copies of the graph's text, constants and scales as tensors by key."""
    parameters, arrays = ParameterTable(), dict[str, np.ndarray]()
    text = to_json(encode_graph(graph, parameters, arrays))
    arrays[SCALES_MEMBER] = parameters.array()
    constants = {f"{GRAPH}.{name}": torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    return {GRAPH: torch.frombuffer(bytearray(text), dtype=torch.uint8), **constants}


def graph_of(state: Mapping[str, Any], like: Graph) -> Graph:
    """Return the graph that the tensors of a state dictionary hold.

    Raises:
        ArtifactError: the state holds no graph, or one that differs from ``like`` in more than weights and scales.
    """
    try:
        arrays = {key.removeprefix(f"{GRAPH}."): tensor.detach().cpu().numpy() for key, tensor in state.items()}
        text, parameters = arrays.pop(GRAPH).tobytes(), ParameterTable(arrays.pop(SCALES_MEMBER))
        graph = verify(decode_graph(from_json(text), parameters, Constants(arrays)), "load_state_dict")
    except (*MALFORMED, VerifyError) as error:
        problem = f"the state does not contain an integer graph: {type(error).__name__}: {error}"
        raise ArtifactError("load_state_dict", None, problem, remedy=LOAD_SAME_MODEL) from error
    if (different := difference(graph, like)) is not None:
        raise ArtifactError(
            "load_state_dict", None, f"the state is that of another model: {different}", remedy=LOAD_SAME_MODEL
        )
    return graph


def with_state_parameters_of(signature: Signature, graph: Graph) -> Signature:
    """Return the signature with the quantization parameters of mutable buffers from ``graph``. Their initial values are
    requantized."""
    return replace(signature, state=tuple(_requantized(kept, graph.types[kept.name]) for kept in signature.state))


def _requantized(kept: State, kind: TensorType) -> State:
    """Return a mutable buffer requantized to the type ``kind``, or unchanged if it is not quantized."""
    if kept.type.q is None or kept.type == kind:
        return kept
    old, new = kept.type.q, kind.qparams
    real = numerics.dequantize(kept.initial, old.step, old.zero)
    quantized = numerics.quantize(real, new.step, new.zero, new.qmin, new.qmax).astype(kept.initial.dtype)
    return replace(kept, type=kind, initial=quantized)


def difference(graph: Graph, like: Graph) -> str | None:
    """Return a text with the first difference between two graphs other than weights and scales, or ``None``."""
    for name, other in like.types.items():
        kind = graph.types.get(name)
        if kind is None or (kind.shape, kind.dtype) != (other.shape, other.dtype):
            return f"%{name} is {other} in this model, but {kind or 'missing'} in the state"
    for op, other_op in zip(graph.ops, like.ops, strict=False):
        if _structure(op) != _structure(other_op):
            there = f"{op.kind} with other operands or attributes" if op.kind == other_op.kind else op.kind
            return f"%{other_op.outputs[0]} is computed by {other_op.kind} in this model, but by {there} in the state"
    outside = [(g.inputs, g.outputs, set(g.constants), len(g.ops), len(g.types)) for g in (graph, like)]
    return None if outside[0] == outside[1] else "it has other inputs, outputs or operators"


def _structure(op: Op) -> Any:
    attrs = {key: value for key, value in op.attrs.items() if key not in CLAMP_ATTRS}
    body = op.body and [_structure(inner) for inner in op.body.ops]
    return op.kind, op.inputs, op.outputs, attrs, CLAMP_ATTRS.intersection(op.attrs), body
