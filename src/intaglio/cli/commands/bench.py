"""`intaglio bench`: timing of the int8 model and other engines in alternation. A ratio is printed only if it exceeds
noise."""

from __future__ import annotations

import importlib.util
import math
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import RenderableType
from torch import nn

import intaglio
from intaglio.cli import targets
from intaglio.cli.engine_memory import EngineProcess, memory_line
from intaglio.cli.engines import (
    ENGINES,
    INT8,
    INT8_PEERS,
    PACKAGES,
    PEERS,
    Calibration,
    Run,
    calibration_inputs,
    eager_engine,
)
from intaglio.cli.show import Result, name_value_table, table
from intaglio.cli.targets import Call
from intaglio.errors import IntaglioError
from intaglio.reporting.timing.measure_speed import measure_speed
from intaglio.runtime import QuantizedModel
from intaglio.torch_private import pytree

BLOCKS = 8
PAUSE = 0.1
"""Seconds between blocks, in which spinning threads of the last engine go to sleep."""
BENCH_BATCH = 1
MEMORY_COLUMNS = {"resident": "resident MB", "peak": "peak MB"}
"""Columns of the memory, by name of the field."""
UNRELATED_MODELS_DB = 3.0
"""Signal-to-noise ratio below which the two models probably compute different functions."""


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
    memory: bool,
) -> dict[str, Any]:
    """Prepare the models and inputs, measure, and return the result for JSON."""
    against = tuple(one for name in against for one in (PEERS if name == INT8_PEERS else (name,)))
    if unknown := [name for name in against if name not in ENGINES]:
        problem = f"unknown engine {', '.join(unknown)}; allowed are {', '.join(ENGINES)}"
        raise typer.BadParameter(problem, param_hint="--against")
    quantized = targets.load_saved(target)
    sources = {INT8: target, "float": float_name or ""} if quantized is not None else {INT8: "", "float": target}
    batches: Any = ()
    if quantized is not None:
        model = targets.float_model(float_name, "--float") if float_name else None
        known = data is not None or shapes
        call, batches = (
            targets.call_and_batches(model or quantized, data, shapes)
            if known
            else (_random_call(quantized, batch), ())
        )
    else:
        if float_name:
            raise typer.BadParameter(
                "only a saved file needs it, but TARGET is a float model; leave it out", param_hint="--float"
            )
        model = targets.float_model(target)
        call, batches = targets.call_and_batches(model, data, shapes)
        batches = list(batches) if set(against) & set(PEERS) else batches  # read by several tools
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
        return _measure(quantized, model, call, batches, seconds, against, sources if memory else None)
    finally:
        torch.set_num_threads(before)


def _measure(
    quantized: QuantizedModel,
    model: nn.Module | None,
    call: Call,
    batches: Iterable[Any],
    seconds: float,
    against: Sequence[str],
    sources: Mapping[str, str] | None,
) -> dict[str, Any]:
    """Measure the int8 model and the other engines, and compare their results with those of the float model.

    Args:
        quantized: the int8 model.
        model: the float model, if it is known.
        call: arguments of the timed call.
        batches: batches for calibration.
        seconds: seconds to measure each engine.
        against: names of the other engines.
        sources: file of the int8 model ("" if it was not saved) and MODULE:NAME of the float model, from which other
            processes get them; ``None`` to measure no memory.
    """
    threads = torch.get_num_threads()
    calibration = calibration_inputs(model, call, batches) if model is not None and set(against) & set(PEERS) else []
    with tempfile.TemporaryDirectory() as folder:
        race = _Race(quantized, model, call, calibration, Path(folder))
        for name in against if model is not None else ():
            race.add(name)
        result = time_alternately(race.runs, call, seconds, threads)
        slower = measure_speed(model, quantized, call).losing if model is not None else ()
        for name, found in result["engines"].items():
            found["sqnr_db"] = race.errors.get(name)
        if sources is not None:
            for name, found in race.memory(sources).items():
                result["engines"][name].update(found)
    result["engines"].update(race.problems)
    tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    return {
        "model": repr(quantized),
        "inputs": [list(tensor.shape) for tensor in tensors],
        "sqnr_db": race.errors.get(INT8),
        "compared": model is not None,
        "slower": [str(one) for one in slower],
        **result,
    }


class _Race:
    """The int8 model and the other engines that could be built.

    Attributes:
        runs: the engines by name, the int8 model first.
        errors: signal-to-noise ratios of their first results.
        problems: why others could not be built.
    """

    def __init__(
        self, quantized: QuantizedModel, model: nn.Module | None, call: Call, calibration: Calibration, folder: Path
    ) -> None:
        self.model, self.call, self.calibration, self.folder = model, call, calibration, folder
        self.quantized = quantized
        self.runs: dict[str, Run] = {INT8: eager_engine(quantized)}
        self.errors: dict[str, float | None] = {}
        self.problems: dict[str, dict[str, str]] = {}
        if model is not None:
            self.expected = _first_tensor(eager_engine(model.eval())(call))
            self.errors[INT8] = decibels(self.expected, _first_tensor(quantized(*call[0], **call[1])))

    def add(self, name: str) -> None:
        """Build an engine, or note why it cannot be built."""
        assert self.model is not None
        missing = [package for package in PACKAGES[name] if importlib.util.find_spec(package) is None]
        if missing:
            self.problems[name] = {"absent": f"{', '.join(missing)} not installed"}
            return
        try:
            (folder := self.folder / name).mkdir()
            run = ENGINES[name](self.model, self.call, torch.get_num_threads(), self.calibration, folder)
            self.errors[name] = decibels(self.expected, _first_tensor(run(self.call)))
            self.runs[name] = run
        except Exception as problem:  # any failure of another engine is reported as its result
            self.problems[name] = {"failed": f"{type(problem).__name__}: {problem}".splitlines()[0]}

    def memory(self, sources: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """Return what the processes of the engines need, by name of the engine."""
        found: dict[str, dict[str, Any]] = {}
        for name in self.runs:
            source, folder = sources[INT8 if name == INT8 else "float"], self.folder / name
            folder.mkdir(exist_ok=True)
            try:
                if not source:
                    self.quantized.save(source := str(folder / "model.intaglio"))
                isa, threads = self.quantized.artifact.program.isa, torch.get_num_threads()
                process = EngineProcess(name, source, threads, isa, str(folder))
                found[name] = {"memory_mb": dict(process.memory(self.call, self.calibration))}
            except IntaglioError as error:
                found[name] = {"memory_problem": error.problem.splitlines()[0]}
        return found


def time_alternately(runs: Mapping[str, Run], call: Call, seconds: float, threads: int) -> dict[str, Any]:
    """Time blocks of calls, with the engines in alternation, and compare the first engine with the others.

    A block counts with the median of its calls.

    Args:
        runs: engines by name.
        call: arguments of the call.
        seconds: time to measure for each engine.
        threads: number of threads, for the result.
    """
    blocks: dict[str, list[list[float]]] = {name: [] for name in runs}
    for engine in runs.values():
        engine(call)
    for _ in range(BLOCKS):
        for name, engine in runs.items():
            time.sleep(PAUSE)
            engine(call)
            blocks[name].append(_block(engine, call, seconds / BLOCKS))
    medians = {name: list(map(statistics.median, times)) for name, times in blocks.items()}
    engines = {
        name: {
            "best_ms": min(medians[name]),
            "median_ms": statistics.median(medians[name]),
            "blocks_ms": medians[name],
            "percentiles_ms": percentiles([one for times in blocks[name] for one in times]),
        }
        for name in runs
    }
    first, *others = runs
    return {
        "threads": threads,
        "engines": engines,
        "ratios": {name: speedup(medians[name], medians[first]) for name in others},
    }


def percentiles(times: Sequence[float]) -> dict[str, float]:
    """Return the time that 50, 90 and 99 of 100 calls take at most."""
    ordered = sorted(times)
    return {str(share): ordered[math.ceil(share / 100 * len(ordered)) - 1] for share in (50, 90, 99)}


def _block(engine: Run, call: Call, seconds: float) -> list[float]:
    """Return the milliseconds of the calls that fit into ``seconds``."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        begin = time.perf_counter()
        engine(call)
        times.append((time.perf_counter() - begin) * 1e3)
    return times


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
    yield from (f"slower in int8 than in PyTorch: {one}" for one in result["slower"])
    if not result["compared"]:
        yield "No float engine was measured: a saved file does not contain the float model. Add --float MODULE:NAME."


def _cells(found: Mapping[str, Any], with_memory: bool) -> tuple[str, ...]:
    """Return the cells of an engine: its times, its memory, and how close its results are to those of the float
    model."""
    shares, error, memory = found.get("percentiles_ms", {}), found.get("sqnr_db"), found.get("memory_mb", {})
    times = (found["best_ms"], found["median_ms"], *(shares[share] for share in ("90", "99") if shares))
    cells = [f"{time:.3f}" for time in times]
    sizes = [f"{memory[name]:.0f}" if name in memory else "" for name in (MEMORY_COLUMNS if with_memory else ())]
    return (*cells, *[""] * (4 - len(cells)), *sizes, "" if error is None else f"{error:.1f}")


def timing_parts(result: Result, what: str) -> Iterator[RenderableType]:
    """Yield the printed parts of a race."""
    timed = {name: found for name, found in result["engines"].items() if "best_ms" in found}
    threads = f"{result['threads']} thread{'s' * (result['threads'] != 1)}"
    said = memory_line(timed)
    rows = [(name, *_cells(found, bool(said))) for name, found in timed.items()]
    memory = MEMORY_COLUMNS.values() if said else ()
    columns = ("engine", "best ms", "median ms", "90 % ms", "99 % ms", *memory, "SQNR dB")
    yield table(columns, rows, ", ".join(part for part in (what, threads) if part))
    if said:
        yield said
    for name, found in result["engines"].items():
        for why in ("absent", "failed"):
            if why in found:
                yield f"{name} was not measured: {found[why]}"
        if "memory_problem" in found:
            yield f"the memory of {name} was not measured: {found['memory_problem']}"
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
