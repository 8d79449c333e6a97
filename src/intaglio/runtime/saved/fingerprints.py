"""Fingerprints of quantized models: digests of everything that determines their results."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from intaglio.errors import ArtifactError
from intaglio.ir import Dim, Graph, Origin
from intaglio.runtime.float_islands import island_program, loops_in
from intaglio.runtime.saved.archive import to_json
from intaglio.runtime.saved.json_codec import NotStorableError, ParameterTable, encode_dim, encode_graph

FINGERPRINT_FORMAT = "intaglio fingerprint 1"
"""First words that are digested. The number changes when the arithmetic of an operator does."""


def fingerprint_of(
    graph: Graph,
    islands: Mapping[str, tuple[nn.Module, tuple[Dim, ...]]],
    state: Iterable[torch.Tensor],
    bodies: Mapping[str, str],
) -> str:
    """Return the SHA-256 digest of what determines the results of a model.

    Args:
        graph: the integer graph, with weights and scales. Module paths and source lines in it do not count.
        islands: module and size arguments of every float island, by key.
        state: initial values of mutable buffers.
        bodies: fingerprints of the bodies of loops, by name.

    Raises:
        ArtifactError: a part of the model has no form that can be written.
    """
    total, parameters, arrays = hashlib.sha256(FINGERPRINT_FORMAT.encode()), ParameterTable(), dict[str, np.ndarray]()
    try:
        total.update(to_json(encode_graph(_without_origins(graph), parameters, arrays)))
    except NotStorableError as error:
        raise ArtifactError("fingerprint", None, f"a part of the model cannot be written: {error}") from error
    arrays["scales of channels"] = parameters.array()
    for index, tensor in enumerate(state):
        arrays[f"state {index}"] = _bytes_of(tensor)
    for key, (module, dims) in sorted(islands.items()):
        total.update(to_json([key, [encode_dim(dim) for dim in dims], island_program(module).to_json()]))
        arrays.update({f"{key}/{name}": _bytes_of(tensor) for name, tensor in module.named_buffers()})
        for name, loop in sorted(loops_in(module).items()):
            total.update(to_json([name, loop.carried, loop.condition.calls.to_json(), bodies[name]]))
            arrays.update({f"{key}/{name}/{one}": _bytes_of(t) for one, t in loop.condition.named_buffers()})
    for name, array in sorted(arrays.items()):
        total.update(f"{name} {array.dtype} {list(array.shape)}\n".encode())
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def fingerprint_of_programs(
    programs: Mapping[str, str], tensors: Mapping[str, torch.Tensor] | None = None, numbering: str | int | None = "mask"
) -> str:
    """Return the SHA-256 digest of what determines the results of a model that has several programs.

    Args:
        programs: fingerprints of the programs, by name.
        tensors: tensors of the float rest of the model, by name.
        numbering: how positions of tokens follow from a call, in models that generate.
    """
    total = hashlib.sha256(f"{FINGERPRINT_FORMAT} of programs".encode())
    counted = {"tokens": True, "mask": False}.get(str(numbering), numbering)  # as digests have had it from the start
    total.update(to_json([sorted(programs.items()), counted]))
    for name, tensor in sorted((tensors or {}).items()):
        array = _bytes_of(tensor)
        total.update(f"{name} {len(array)}\n".encode())
        total.update(array.tobytes())
    return total.hexdigest()


def _without_origins(graph: Graph) -> Graph:
    """Return a graph whose operators do not know the modules and source lines that they came from."""
    ops = (replace(op, origin=Origin(), body=op.body and _without_origins(op.body)) for op in graph.ops)
    return replace(graph, ops=tuple(ops))


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """Return type, shape and contents of a tensor as one array of bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    header = np.frombuffer(f"{plain.dtype} {list(plain.shape)} ".encode(), np.uint8)
    return np.concatenate([header, plain.flatten().view(torch.uint8).numpy()]) if plain.numel() else header
