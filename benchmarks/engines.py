"""What is raced: ``engine(model, example, calibration, threads)`` gives a callable.

``example`` is a tuple of inputs whose shapes are those of every later call; ``calibration`` a list of such tuples.
Each engine is set up the way its own documentation tells a user to, with its defaults; engines of others are those of
`intaglio bench`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from other_engines import OTHER_ENGINES
from torch import nn

from intaglio.peers.peer_engines import (
    Inputs,
    onnxruntime,
    onnxruntime_call,
    onnxruntime_int8,
    openvino,
    openvino_call,
    openvino_int8,
    openvino_int8_default,
    torchao,
)
from intaglio.peers.peer_engines import PeerRun as Run


def eager(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Run:
    """PyTorch as it is, float32."""
    return model


def inductor(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Run:
    """torch.compile with weights frozen, float32."""
    import torch._inductor.config

    torch._inductor.config.freezing = True
    return torch.compile(model)


def intaglio(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Run:
    """intaglio.quantize."""
    import intaglio

    return intaglio.quantize(model, calibration, example_inputs=example)


def intaglio_precise(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Run:
    """The same with functions behind layers in float32 instead of tables."""
    import intaglio

    recipe = intaglio.Recipe.from_toml('[default]\nfunctions = "precise"')
    return intaglio.quantize(model, calibration, example_inputs=example, recipe=recipe)


def intaglio_accurate(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Run:
    """The same with shortcuts of 16 bits."""
    import intaglio

    return intaglio.quantize(model, calibration, example_inputs=example, recipe="accurate")


def intaglio_inductor(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Run:
    """intaglio's reference model, compiled by TorchInductor."""
    from intaglio import stages

    return stages.compile(intaglio_reference(model, example, calibration), backend="inductor", example_inputs=example)


def intaglio_onnxruntime(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Run:
    """intaglio's reference model, written as ONNX and run by ONNX Runtime."""
    with tempfile.TemporaryDirectory() as folder:
        return onnxruntime_call(intaglio_onnx_file(model, example, calibration, Path(folder)), threads)


def intaglio_openvino(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Run:
    """The same file, run by OpenVINO."""
    import openvino as ov

    with tempfile.TemporaryDirectory() as folder:
        file = intaglio_onnx_file(model, example, calibration, Path(folder))
        return openvino_call(ov.Core().read_model(file), threads)


def intaglio_onnx_file(model: nn.Module, example: Inputs, calibration: list[Inputs], folder: Path) -> Path:
    from intaglio import stages

    path = folder / "intaglio.onnx"
    stages.compile(intaglio_reference(model, example, calibration), backend="onnx", path=path)
    return path


def intaglio_reference(model: nn.Module, example: Inputs, calibration: list[Inputs]) -> Any:
    """With integer weights and quantize and dequantize, which every backend takes."""
    from intaglio import stages

    prepared = stages.prepare(stages.capture(model, example))
    return stages.convert(prepared, stages.calibrate(prepared, calibration))


ENGINES: dict[str, Callable[..., Run]] = {
    engine.__name__: engine
    for engine in (
        eager,
        inductor,
        torchao,
        onnxruntime,
        onnxruntime_int8,
        openvino,
        openvino_int8,
        openvino_int8_default,
        intaglio,
        intaglio_precise,
        intaglio_accurate,
        intaglio_inductor,
        intaglio_onnxruntime,
        intaglio_openvino,
        *OTHER_ENGINES,
    )
}
USUAL = [name for name in ENGINES if name not in {engine.__name__ for engine in OTHER_ENGINES}]
"""Names of the engines that are raced unless others are asked for."""
