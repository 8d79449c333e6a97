"""Engines that `intaglio bench` runs beside the int8 model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from intaglio.cli.targets import Call
from intaglio.errors import InputError
from intaglio.peers import peer_engines
from intaglio.quant.calibrate.batches import binder_for
from intaglio.torch_private import pytree

Run = Callable[[Call], Any]
Calibration = Sequence[tuple[torch.Tensor, ...]]
Engine = Callable[[nn.Module, Call, int, Calibration, Path], Run]
"""Builds a run from the float model, a call, the number of threads, inputs for calibration and a folder for its
files."""


def eager_engine(model: Callable[..., Any]) -> Run:
    """Return a module as an engine, run without gradients."""

    def engine(call: Call) -> Any:
        with torch.no_grad():
            return model(*call[0], **call[1])

    return engine


def compiled_engine(model: nn.Module, call: Call, threads: int, calibration: Calibration, folder: Path) -> Run:
    """Return the module compiled by torch.compile with frozen weights."""
    return eager_engine(peer_engines.compiled(model, *call))


def peer_engine(build: Callable[..., peer_engines.PeerRun]) -> Engine:
    """Return an engine of another tool, which takes tensors by position."""

    def engine(model: nn.Module, call: Call, threads: int, calibration: Calibration, folder: Path) -> Run:
        return eager_engine(build(model, _positional(call), calibration, threads))

    return engine


@dataclass(frozen=True)
class FileEngine:
    """An engine of another tool that runs a file of its own, without the float model.

    Attributes:
        engine: writes the file and runs it.
    """

    engine: peer_engines.EngineFile

    def __call__(self, model: nn.Module, call: Call, threads: int, calibration: Calibration, folder: Path) -> Run:
        """Write the file into the folder, and return a run of it."""
        self.engine.write(model, _positional(call), calibration, folder)
        return self.opened(folder, threads)

    def opened(self, folder: Path, threads: int) -> Run:
        """Return a run of the file that is in the folder."""
        return eager_engine(self.engine.run(folder / self.engine.file, threads))


def _positional(call: Call) -> tuple[Any, ...]:
    """Return the arguments of a call without keywords. Raise `InputError` for other calls."""
    if call[1]:
        remedy = "use data of tensors or tuples, or measure against eager and compile only"
        raise InputError("call", None, "inputs passed by keyword cannot be exported to ONNX", remedy=remedy)
    return call[0]


def calibration_inputs(model: nn.Module, call: Call, batches: Iterable[Any]) -> Calibration:
    """Return the batches in parts of the size of a call, because other engines are built for its shapes, or else the
    call."""
    bind, found = binder_for(model), []
    tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    size = tensors[0].shape[0] if tensors else 0
    for batch in batches if size else ():
        inputs = bind(batch)[0]
        rows = inputs[0].shape[0] if inputs else 0
        starts = range(0, rows - size + 1, size)
        found += [tuple(tensor[start : start + size] for tensor in inputs) for start in starts]
    return found or [call[0]]


INT8 = "int8"
"""Name of the int8 model of intaglio in results."""
INT8_PEERS = "int8"
"""Name of all int8 engines of others in ``--against``."""
PEERS: Mapping[str, Engine] = {
    "torchao": peer_engine(peer_engines.torchao),
    "onnxruntime-int8": FileEngine(peer_engines.ONNXRUNTIME_INT8),
    "openvino-int8": FileEngine(peer_engines.OPENVINO_INT8_DEFAULT),
    "openvino-int8-f32": FileEngine(peer_engines.OPENVINO_INT8),
}
ENGINES: Mapping[str, Engine] = {
    "eager": lambda model, call, threads, calibration, folder: eager_engine(model),
    "compile": compiled_engine,
    "onnxruntime": FileEngine(peer_engines.ONNXRUNTIME),
    "openvino": FileEngine(peer_engines.OPENVINO),
    **PEERS,
}
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "eager": (),
    "compile": (),
    "onnxruntime": ("onnxruntime", "onnx", "onnxscript"),
    "openvino": ("openvino", "onnx", "onnxscript"),
    "torchao": ("torchao",),
    "onnxruntime-int8": ("onnxruntime", "onnx", "onnxscript"),
    "openvino-int8": ("openvino", "nncf", "onnx", "onnxscript"),
    "openvino-int8-f32": ("openvino", "nncf", "onnx", "onnxscript"),
}
