"""Memory of a process that loads an int8 model from its file and runs it: intaglio, ONNX Runtime, OpenVINO.

intaglio has two rows: a file that `intaglio.load` reads, which needs PyTorch, and the Python file of a model that was
exported as C, which needs NumPy.

    python benchmarks/memory.py                 ResNet-50, batch 1
    python benchmarks/memory.py --image 64      smaller images, to see that it runs

Every figure comes from a process of its own: its peak (VmHWM) after importing the libraries, after loading, and after
some calls. What counts is how much the last is above the first: the weights, what loading them takes on the way, and
the memory of a call. Median of --repeats processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh
import record
from rich.console import Console
from rich.table import Table

CALLS = 5
FILES = {
    "intaglio": "model.intaglio",
    "intaglio_exported": "network.py",
    "onnxruntime_int8": "int8.onnx",
    "openvino_int8": "model.xml",
}
"""Engine -> the file its model is loaded from."""


def save_all(network: str, image: int, batch: int, folder: str) -> dict[str, float]:
    """Int8 models of every engine in their files; engine -> MB of its files."""
    import exported
    import networks
    import openvino
    import torch

    import intaglio
    from intaglio.peers import peer_engines

    model, shape = networks.build(network, image=image)
    torch.manual_seed(1)
    example = (torch.randn(batch, *shape),)
    calibration = [example]
    for engine in FILES:
        (Path(folder) / engine).mkdir()
    with torch.no_grad():
        quantized = intaglio.quantize(model, calibration, example_inputs=example, progress=False)
        quantized.save(path_of(folder, "intaglio"))
        work = Path(folder) / "work"
        quantized.export_c(work)
        library = exported.build(work)
        for file in (library, work / "weights.bin"):
            file.rename(Path(path_of(folder, "intaglio_exported")).with_name(file.name))
        python_file = work / library.with_suffix(".py").name.removeprefix("lib")
        python_file.rename(path_of(folder, "intaglio_exported"))
        made = peer_engines.onnxruntime_int8_file(model, example, calibration, work)
        made.rename(path_of(folder, "onnxruntime_int8"))
        peer = peer_engines.openvino_int8_model(model, example, calibration, work)
        openvino.save_model(peer, path_of(folder, "openvino_int8"))
    return {engine: sum(f.stat().st_size for f in (Path(folder) / engine).iterdir()) / 1e6 for engine in FILES}


def path_of(folder: str, engine: str) -> str:
    return str(Path(folder) / engine / FILES[engine])


def intaglio_loader() -> Callable[[str, int], Callable[[Any], Any]]:
    import torch

    import intaglio

    load = intaglio.load  # imports what loading needs

    def loaded(path: str, threads: int) -> Callable[[Any], Any]:
        torch.set_num_threads(threads)
        model = load(path)
        return lambda image: model(torch.from_numpy(image))

    return loaded


def exported_loader() -> Callable[[str, int], Callable[[Any], Any]]:
    import runpy

    return lambda path, threads: runpy.run_path(path)["Network"](threads=threads)


def onnxruntime_loader() -> Callable[[str, int], Callable[[Any], Any]]:
    import onnxruntime

    def loaded(path: str, threads: int) -> Callable[[Any], Any]:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return lambda image: session.run(None, {"input0": image})

    return loaded


def openvino_loader() -> Callable[[str, int], Callable[[Any], Any]]:
    import openvino

    def loaded(path: str, threads: int) -> Callable[[Any], Any]:
        settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
        request = openvino.Core().compile_model(path, "CPU", settings).create_infer_request()
        return lambda image: request.infer({"input0": image})

    return loaded


LOADERS = {
    "intaglio": intaglio_loader,
    "intaglio_exported": exported_loader,
    "onnxruntime_int8": onnxruntime_loader,
    "openvino_int8": openvino_loader,
}


def peaks(engine: str, path: str, shape: tuple[int, ...], threads: int) -> dict[str, float]:
    """MB at most after every stage of a new process, what is resident at the end, and seconds of loading and the first
    call."""
    import numpy as np

    image = np.zeros(shape, np.float32)
    load = LOADERS[engine]()
    found = {"imported": in_mb("VmHWM")}
    begin = time.perf_counter()
    run = load(path, threads)
    found["loaded"] = in_mb("VmHWM")
    run(image)
    found["first_call_s"] = time.perf_counter() - begin
    for _ in range(CALLS - 1):
        run(image)
    return {**found, "ran": in_mb("VmHWM"), "resident": in_mb("VmRSS")}


def in_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Engine -> medians of its peaks, ``above``: those of running above those of importing, ``file``: MB."""
    shape = (arguments.batch, 3, arguments.image, arguments.image)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        files = fresh.call(save_all, arguments.network, arguments.image, arguments.batch, folder)
        for engine in FILES:
            run = (peaks, engine, path_of(folder, engine), shape, arguments.threads)
            fresh.call(*run)  # fills caches
            runs = [fresh.call(*run) for _ in range(arguments.repeats)]
            above = statistics.median(one["ran"] - one["imported"] for one in runs)
            medians = {stage: statistics.median(one[stage] for one in runs) for stage in runs[0]}
            found[engine] = {**medians, "above": above, "file": files[engine]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", nargs="?", default="resnet50")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    found = measure(arguments)
    title = f"{arguments.network}, batch {arguments.batch}, {arguments.threads} threads: MB"
    table = Table(title=f"{title}, median of {arguments.repeats} processes")
    for column in ("engine", "file", "imported", "loaded", "ran", "ran above imported", "resident", "first call, s"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for engine, one in sorted(found.items(), key=lambda entry: entry[1]["above"]):
        keys = ("file", "imported", "loaded", "ran", "above", "resident")
        table.add_row(engine, *(f"{one[key]:.1f}" for key in keys), f"{one['first_call_s']:.3f}")
    Console(highlight=False).print(table)
    record.append("memory", arguments, {"engines_mb": found})


if __name__ == "__main__":
    main()
