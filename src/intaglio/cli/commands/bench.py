"""`intaglio bench`: timing of the int8 model and float engines in alternation. A ratio is printed only if it exceeds
noise."""

from __future__ import annotations

import importlib.util
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import RenderableType
from torch import nn

import intaglio
from intaglio.cli import targets
from intaglio.cli.show import Result, name_value_table, table
from intaglio.cli.targets import Call
from intaglio.errors import InputError
from intaglio.runtime import QuantizedModel
from intaglio.torch_private import pytree

BLOCKS = 8
PAUSE = 0.1
"""Seconds between blocks, in which spinning threads of the last engine go to sleep."""
BENCH_BATCH = 1
UNRELATED_MODELS_DB = 3.0
"""Signal-to-noise ratio below which the two models probably compute different functions."""

Run = Callable[[Call], Any]


def run(
    target: str,
    batch: int | None,
    threads: int | None,
    seconds: float,
    against: Sequence[str],
    data: str | None,
    shapes: Sequence[str],
    float_name: str | None,
    isa: str | None,
) -> dict[str, Any]:
    """Prepare the models and inputs, measure, and return the result for JSON."""
    if unknown := [name for name in against if name not in ENGINES]:
        problem = f"unknown engine {', '.join(unknown)}; allowed are {', '.join(ENGINES)}"
        raise typer.BadParameter(problem, param_hint="--against")
    quantized = targets.load_saved(target)
    if quantized is not None:
        model = targets.float_model(float_name, "--float") if float_name else None
        known = data is not None or shapes
        call = (
            targets.call_and_batches(model or quantized, data, shapes)[0] if known else _random_call(quantized, batch)
        )
    else:
        if float_name:
            raise typer.BadParameter(
                "only a saved file needs it, but TARGET is a float model; leave it out", param_hint="--float"
            )
        model = targets.float_model(target)
        call, batches = targets.call_and_batches(model, data, shapes)
        options = intaglio.CompileOptions(isa=isa)
        example = call[0] if not call[1] else None
        found = intaglio.quantize(model, batches, example_inputs=example, options=options, strict=True)
        assert isinstance(found, intaglio.QuantizedModel)
        quantized = found
    if batch is not None:
        call = resized(call, batch)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        return _measure(quantized, model, call, seconds, against)
    finally:
        torch.set_num_threads(before)


def _measure(
    quantized: QuantizedModel, model: nn.Module | None, call: Call, seconds: float, against: Sequence[str]
) -> dict[str, Any]:
    """Measure the int8 model and the float engines, and compare the results of the first."""
    threads = torch.get_num_threads()
    runs, out, error = {"int8": eager_engine(quantized)}, {}, None
    if model is not None:
        model = model.eval()
        expected = eager_engine(model)(call)
        error = decibels(_first_tensor(expected), _first_tensor(quantized(*call[0], **call[1])))
        for name in against:
            missing = [package for package in PACKAGES[name] if importlib.util.find_spec(package) is None]
            if missing:
                out[name] = {"absent": f"{', '.join(missing)} not installed"}
                continue
            try:
                runs[name] = ENGINES[name](model, call, threads)
                runs[name](call)
            except Exception as problem:  # any failure of another engine is reported as its result
                out[name] = {"failed": f"{type(problem).__name__}: {problem}".splitlines()[0]}
                runs.pop(name, None)
    result = time_alternately(runs, call, seconds, threads)
    result["engines"].update(out)
    tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    shapes = [list(tensor.shape) for tensor in tensors]
    return {"model": repr(quantized), "inputs": shapes, "sqnr_db": error, "compared": model is not None, **result}


def eager_engine(model: Callable[..., Any]) -> Run:
    """Return a module as an engine, run without gradients."""

    def engine(call: Call) -> Any:
        with torch.no_grad():
            return model(*call[0], **call[1])

    return engine


def compiled_engine(model: nn.Module, call: Call, threads: int) -> Run:
    """Return the module compiled by torch.compile with frozen weights."""
    import torch._inductor.config

    with torch._inductor.config.patch(freezing=True):
        run = eager_engine(torch.compile(model))
        run(call)  # the first call compiles
    return run


def onnxruntime_engine(model: nn.Module, call: Call, threads: int) -> Run:
    """Return an engine that runs the module, exported by torch.onnx, in ONNX Runtime."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as folder:
        session = ort.InferenceSession(
            _export_onnx(model, call, Path(folder)), options, providers=["CPUExecutionProvider"]
        )
    return lambda call: session.run(None, _onnx_inputs(call))


def openvino_engine(model: nn.Module, call: Call, threads: int) -> Run:
    """Return an engine that runs the module, exported by torch.onnx, in OpenVINO with float32 arithmetic."""
    import openvino as ov

    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    with tempfile.TemporaryDirectory() as folder:
        read = ov.Core().read_model(_export_onnx(model, call, Path(folder)))
        request = ov.Core().compile_model(read, "CPU", settings).create_infer_request()
    return lambda call: request.infer(_onnx_inputs(call))


ENGINES: Mapping[str, Callable[[nn.Module, Call, int], Run]] = {
    "eager": lambda model, call, threads: eager_engine(model),
    "compile": compiled_engine,
    "onnxruntime": onnxruntime_engine,
    "openvino": openvino_engine,
}
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "eager": (),
    "compile": (),
    "onnxruntime": ("onnxruntime", "onnx", "onnxscript"),
    "openvino": ("openvino", "onnx", "onnxscript"),
}


def _export_onnx(model: nn.Module, call: Call, folder: Path) -> Path:
    if call[1]:
        remedy = "use data of tensors or tuples, or measure against eager and compile only"
        raise InputError("call", None, "inputs passed by keyword cannot be exported to ONNX", remedy=remedy)
    path = folder / "model.onnx"
    names = list(_onnx_inputs(call))
    torch.onnx.export(model, call[0], path, input_names=names, dynamo=True, external_data=False, verbose=False)
    return path


def _onnx_inputs(call: Call) -> dict[str, Any]:
    return {f"input{index}": tensor.numpy() for index, tensor in enumerate(call[0])}


def time_alternately(runs: Mapping[str, Run], call: Call, seconds: float, threads: int) -> dict[str, Any]:
    """Time blocks of calls, with the engines in alternation, and compare the first engine with the others.

    A block counts with the median of its calls.

    Args:
        runs: engines by name.
        call: arguments of the call.
        seconds: time to measure for each engine.
        threads: number of threads, for the result.
    """
    blocks: dict[str, list[float]] = {name: [] for name in runs}
    for engine in runs.values():
        engine(call)
    for _ in range(BLOCKS):
        for name, engine in runs.items():
            time.sleep(PAUSE)
            engine(call)
            blocks[name].append(_block(engine, call, seconds / BLOCKS))
    engines = {
        name: {"best_ms": min(times), "median_ms": statistics.median(times), "blocks_ms": times}
        for name, times in blocks.items()
    }
    first, *others = runs
    return {
        "threads": threads,
        "engines": engines,
        "ratios": {name: speedup(blocks[name], blocks[first]) for name in others},
    }


def _block(engine: Run, call: Call, seconds: float) -> float:
    """Return the median milliseconds of the calls that fit into ``seconds``."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        begin = time.perf_counter()
        engine(call)
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def speedup(other: Sequence[float], own: Sequence[float]) -> dict[str, Any]:
    """Return the speedup by medians, or no ratio if the blocks of one engine differ as much as the medians do."""
    difference = abs(statistics.median(other) - statistics.median(own))
    spread = max(max(other) - min(other), max(own) - min(own))
    shown = spread < difference
    ratio = statistics.median(other) / statistics.median(own) if shown else None
    return {"ratio": ratio, "difference_ms": difference, "spread_ms": spread}


def decibels(expected: torch.Tensor, got: torch.Tensor) -> float | None:
    """Return the signal-to-quantization-noise ratio in decibels, or ``None`` if it is not finite."""
    error = (got.double() - expected.double()).square().sum() / expected.double().square().sum()
    found = -10 * math.log10(error.item()) if error > 0 else math.inf
    return found if math.isfinite(found) else None


def _first_tensor(output: Any) -> torch.Tensor:
    """Return the first floating-point tensor of a result."""
    leaves = [
        leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]
    return leaves[0] if leaves else torch.ones(())


def resized(call: Call, batch: int) -> Call:
    """Return the call with ``batch`` samples in every tensor that has as many as the first tensor. Samples are repeated
    if there are too few."""
    tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not tensors:
        return call
    rows = tensors[0].shape[0]
    index = torch.arange(batch) % rows

    def change(leaf: Any) -> Any:
        fits = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == rows
        return leaf[index] if fits else leaf

    changed: Call = pytree.tree_map(change, call)
    return changed


def _random_call(model: QuantizedModel, batch: int | None) -> Call:
    """Return random inputs of the types that a saved model takes."""
    call = targets.random_call(model, batch or BENCH_BATCH)
    if call is None:
        raise typer.BadParameter(targets.NEEDS_DATA, param_hint="TARGET")
    return call


def render(result: Result) -> Iterator[RenderableType]:
    """Yield the printed parts of a result."""
    error = result["sqnr_db"]
    yield name_value_table(
        (
            ("model", result["model"]),
            ("inputs", ", ".join("x".join(map(str, shape)) for shape in result["inputs"])),
            *((("SQNR of int8", f"{error:.1f} dB"),) if error is not None else ()),
        )
    )
    if error is not None and error < UNRELATED_MODELS_DB:
        yield "The results have little in common: was the int8 model made from this float model, with the same weights?"
    yield from timing_parts(result, "")
    if not result["compared"]:
        yield "No float engine was measured: a saved file does not contain the float model. Add --float MODULE:NAME."


def timing_parts(result: Result, what: str) -> Iterator[RenderableType]:
    """Yield the printed parts of a race."""
    timed = {name: found for name, found in result["engines"].items() if "best_ms" in found}
    threads = f"{result['threads']} thread{'s' * (result['threads'] != 1)}"
    rows = [(name, f"{found['best_ms']:.3f}", f"{found['median_ms']:.3f}") for name, found in timed.items()]
    yield table(("engine", "best ms", "median ms"), rows, ", ".join(part for part in (what, threads) if part))
    for name, found in result["engines"].items():
        for why in ("absent", "failed"):
            if why in found:
                yield f"{name} was not measured: {found[why]}"
    for name, found in result["ratios"].items():
        if found["ratio"] is not None:
            yield (
                f"int8 is {found['ratio']:.2f} times as fast as {name}"
                if found["ratio"] >= 1
                else (f"int8 is slower than {name}: it takes {1 / found['ratio']:.2f} times as long")
            )
        else:
            yield (
                f"no speedup over {name} is reported: the medians differ by {found['difference_ms']:.3f} ms, but "
                f"blocks of one engine by {found['spread_ms']:.3f} ms, so the difference may be noise. Measure on an "
                "idle machine, or longer with --seconds."
            )
