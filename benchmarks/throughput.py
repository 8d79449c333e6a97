"""Compare calls a second of intaglio's `Pool` with OpenVINO's streams, on independent calls.

    python benchmarks/throughput.py
    python benchmarks/throughput.py --networks resnet50 --batch 4 --rounds 8

OpenVINO compiles for the hint THROUGHPUT, which chooses the number of streams, and an asynchronous queue of its own
keeps as many requests in flight. intaglio's pool is the one that `Pool.fastest` chooses. Each engine has a process of
its own, and they take turns, in blocks of --seconds; the best block counts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fresh
import networks
import race
import record
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from intaglio.peers.peer_engines import Inputs, openvino_int8_model

Rate = Callable[[float], float]
"""Seconds -> calls a second."""


def pool(model: nn.Module, calibration: list[Inputs]) -> tuple[Rate, str]:
    """Return calls a second of intaglio's pool, and its setting."""
    import intaglio

    example = calibration[0]
    quantized = intaglio.quantize(model, calibration, example_inputs=example, progress=False)
    chosen = intaglio.Pool.fastest(quantized, example, seconds=2.0)

    def rate(seconds: float) -> float:
        begin = time.perf_counter()

        def calls():
            while time.perf_counter() - begin < seconds:
                yield example

        count = sum(1 for _ in chosen.map(calls()))
        return count / (time.perf_counter() - begin)

    return rate, str(chosen.measured[0])


def streams(model: nn.Module, calibration: list[Inputs], precision: str | None) -> tuple[Rate, str]:
    """Return calls a second of OpenVINO's asynchronous queue, and its number of streams."""
    import openvino as ov

    options: dict[str, Any] = {"PERFORMANCE_HINT": "THROUGHPUT"}
    if precision is not None:
        options["INFERENCE_PRECISION_HINT"] = precision
    with tempfile.TemporaryDirectory() as folder:
        built = openvino_int8_model(model, calibration[0], calibration, Path(folder))
        compiled = ov.Core().compile_model(built, "CPU", options)
    queue = ov.AsyncInferQueue(compiled)
    arrays = [tensor.numpy() for tensor in calibration[0]]
    finished = [0]
    queue.set_callback(lambda request, data: finished.__setitem__(0, finished[0] + 1))

    def rate(seconds: float) -> float:
        finished[0], begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            queue.start_async(arrays)
        queue.wait_all()
        return finished[0] / (time.perf_counter() - begin)

    return rate, f"{len(queue)} requests"


ENGINES: dict[str, Callable[[nn.Module, list[Inputs]], tuple[Rate, str]]] = {
    "intaglio": pool,
    "openvino_int8": lambda model, calibration: streams(model, calibration, "f32"),
    "openvino_int8_default": lambda model, calibration: streams(model, calibration, None),
}


def serve(channel: Connection, engine: str, network: str, arguments: argparse.Namespace) -> None:
    """The process of one engine: build, then one block for each request."""
    model, shape = networks.build(network)
    torch.manual_seed(1)
    calibration = [networks.inputs(shape, arguments.batch) for _ in range(arguments.calibration)]
    with torch.no_grad():
        rate, setting = ENGINES[engine](model, calibration)
        channel.send((True, setting))
        while True:
            seconds = channel.recv()
            rate(seconds / 4)
            channel.send((True, rate(seconds)))


def measure(network: str, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the setting and the blocks, in calls a second, of each engine."""
    found: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        channels = {}
        for engine in arguments.engines.split(","):
            channels[engine] = stack.enter_context(fresh.opened(serve, engine, network, arguments))
            found[engine] = {"setting": fresh.receive(channels[engine]), "rates": []}
        for _ in range(arguments.rounds):
            for engine, channel in channels.items():
                time.sleep(race.PAUSE)
                channel.send(arguments.seconds)
                found[engine]["rates"].append(fresh.receive(channel))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="resnet50,mobilenet_v2,bert")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--calibration", type=int, default=4, help="batches of random inputs")
    arguments = parser.parse_args()
    table = Table(title=f"calls a second, batch {arguments.batch}, {os.cpu_count()} cores")
    for column in ("network", "engine", "best", "intaglio / engine", "setting"):
        table.add_column(column)
    quiet, results = record.idle(), {}
    for network in arguments.networks.split(","):
        results[network] = found = measure(network, arguments)
        own = max(found["intaglio"]["rates"]) if "intaglio" in found else None
        for engine, one in found.items():
            best = max(one["rates"])
            ratio = f"{own / best:.2f}" if own else "-"
            table.add_row(network, engine, f"{best:.1f}", ratio, one["setting"])
    Console(highlight=False).print(table)
    record.append("throughput", arguments, {"idle": record.still_idle(quiet), **results})


if __name__ == "__main__":
    main()
