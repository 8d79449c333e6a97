"""Measure the seconds and the memory that quantizing and compiling a model take, for each engine.

    python benchmarks/quantizing.py
    python benchmarks/quantizing.py --networks resnet50,bert --engines intaglio,openvino --samples 128 --batch 16
    python benchmarks/quantizing.py --engines intaglio,before --before ../checkout-of-an-earlier-commit

Every engine runs in a process of its own, with an empty kernel cache, and is given the float model and the samples in
memory. The clock starts when PyTorch and the engine are imported and ends when the first call could be made. OpenVINO
converts the PyTorch model itself; ONNX Runtime's time includes the export to ONNX, and torchao's the compilation by
Inductor, at the first call. The engine ``before`` is intaglio as it is in another folder, to compare two commits.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh
import networks
import record
import torch
from engines import ENGINES
from rich.console import Console
from rich.table import Table
from torch import nn

from intaglio.peers.peer_engines import Inputs, openvino_options

MODULES = {"intaglio": ("intaglio.api",), "before": ("intaglio.api",), "openvino": ("openvino", "nncf")}
"""Engine -> what is imported before the clock starts."""
PAUSE = 2
"""Seconds before each engine, in which the process of the last one ends and its memory is freed."""


def openvino(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Any:
    """OpenVINO's conversion of a PyTorch model, NNCF's quantization and the compilation."""
    import nncf
    import openvino as ov

    source = ov.convert_model(model, example_input=example)
    names = [node.any_name for node in source.inputs]
    data = nncf.Dataset([dict(zip(names, (x.numpy() for x in inputs), strict=True)) for inputs in calibration])
    attention = any("ttention" in type(module).__name__ for module in model.modules())
    kind = nncf.ModelType.TRANSFORMER if attention else None
    quantized = nncf.quantize(source, data, subset_size=len(calibration), model_type=kind)
    return ov.compile_model(quantized, "CPU", openvino_options(threads))


def cost(engine: str, network: str, samples: int, batch: int, threads: int, source: str) -> dict[str, float]:
    """Return the seconds and the memory in MB of one engine, and the memory before it began."""
    if engine == "before":
        sys.path.insert(0, source)
        for name in [name for name in sys.modules if name.partition(".")[0] == "intaglio"]:
            del sys.modules[name]  # the engines of others are part of this checkout
    torch.set_num_threads(threads)
    model, shape = networks.build(network)
    torch.manual_seed(0)
    calibration = [networks.inputs(shape, batch) for _ in range(max(1, samples // batch))]
    for module in MODULES.get(engine, ()):
        importlib.import_module(module)
    if engine == "before" and not Path(sys.modules["intaglio"].__file__ or "").is_relative_to(source):
        raise RuntimeError("intaglio was imported from another folder")
    build: Callable[..., Any] = {"openvino": openvino, "before": ENGINES["intaglio"]}.get(engine) or ENGINES[engine]
    resident, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    run = build(model, calibration[0], calibration, threads)
    if engine == "torchao":
        run(*calibration[0])
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"seconds": seconds, "peak_mb": peak / 1024, "before_mb": resident / 1024, "model_mb": parameters / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="resnet50,mobilenet_v2,bert,minilm")
    parser.add_argument("--engines", default="intaglio,openvino")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--before", type=Path, default=Path(), help="folder of the other checkout")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    if "before" in arguments.engines.split(",") and not (arguments.before / "src" / "intaglio").is_dir():
        parser.error("--before must be the folder of a checkout of intaglio")
    source = str((arguments.before / "src").absolute())
    table = Table(title=f"quantize and compile, {arguments.samples} samples, {arguments.threads} threads")
    for column in ("network", "engine", "s", "peak MB", "before MB", "float model MB"):
        table.add_column(column)
    results: dict[str, dict[str, float]] = {}
    quiet = record.idle()
    for network in arguments.networks.split(","):
        for engine in arguments.engines.split(","):
            time.sleep(PAUSE)
            given = (engine, network, arguments.samples, arguments.batch, arguments.threads, source)
            with tempfile.TemporaryDirectory() as folder:
                try:
                    caches = {"INTAGLIO_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
                    found = fresh.call(cost, *given, environment=caches)
                except fresh.FailedError as error:
                    table.add_row(network, engine, str(error)[:60])
                    continue
            results[f"{network}/{engine}"] = found
            figures = (f"{found[key]:.1f}" for key in ("seconds", "peak_mb", "before_mb", "model_mb"))
            table.add_row(network, engine, *figures)
    Console(highlight=False).print(table)
    record.append("quantizing", arguments, {"idle": record.still_idle(quiet), **results})


if __name__ == "__main__":
    main()
