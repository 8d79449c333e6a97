"""Engines against each other on one network: time of a call, and its share of what the arithmetic units allow.

    python benchmarks/race.py resnet50 --batch 1
    python benchmarks/race.py mobilenet_v2 --engines onnxruntime_int8,openvino_int8,intaglio --threads 1
    python benchmarks/race.py resnet50 --behind-operators

Every engine lives in a process of its own and is built and checked against the float model first. Then they take
turns, in blocks of --seconds, for --rounds rounds; a block counts by its median call. "best" is an engine's best
block, "median" the median of its blocks. On a machine that others use there is no order: see --anyway.

With --behind-operators PyTorch computes something on all threads before each call, as programs do that prepare images
or sample tokens with it. Its threads then wait by spinning on the cores that the call needs. Only the call is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import core_latency
import fresh
import limits
import networks
import record
import torch
from engines import ENGINES, USUAL
from rich.console import Console
from rich.table import Table

PAUSE = 0.3
"""Seconds between blocks: threads of the last engine that wait by spinning go to sleep."""

OPERATOR_ELEMENTS = 3 * 224 * 224
"""Elements of the operator before a call with --behind-operators: an image."""


def serve(channel: Connection, engine: str, arguments: argparse.Namespace) -> None:
    """The process of one engine: build, check, then one block per request."""
    torch.set_num_threads(arguments.threads)
    model, shape = networks.build(arguments.network, arguments.data, arguments.image, arguments.sequence)
    torch.manual_seed(1)
    calibration = [networks.inputs(shape, arguments.batch) for _ in range(arguments.calibration)]
    example = networks.inputs(shape, arguments.batch)
    with torch.no_grad():
        expected = model(*example)
        begin = time.perf_counter()
        run = ENGINES[engine](model, example, calibration, arguments.threads)
        got = run(*example)
        built = time.perf_counter() - begin
        error = (got - expected).square().sum() / expected.square().sum()
        channel.send((True, {"build_s": built, "sqnr_db": -10 * torch.log10(error + 1e-14).item()}))
        before = torch.rand(OPERATOR_ELEMENTS).sin if arguments.behind_operators else None
        while True:
            seconds = channel.recv()
            run(*example)
            channel.send((True, block(lambda: run(*example), seconds, before)))


def block(call, seconds: float, before: Callable[[], Any] | None = None) -> float:
    """Median milliseconds of the calls that fit into ``seconds``. What runs before each call is not timed."""
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        if before:
            before()
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = "resnet18, resnet50, cifar_resnet20, cifar_resnet56, bert, minilm, or a torchvision model"
    parser.add_argument("network", help=known)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--behind-operators", action="store_true", help="PyTorch computes something before each call")
    add_options(parser, engines=",".join(USUAL), rounds=8, seconds=1.5)
    arguments = parser.parse_args()
    built = networks.build(arguments.network, arguments.data, arguments.image, arguments.sequence)
    macs = networks.count_macs(*built)
    found = measure(arguments, macs)
    record.append("race_behind_operators" if arguments.behind_operators else "race", arguments, found)
    report(arguments, found["engines"], found["limit_ms"], ranked=found["idle"] or arguments.anyway)


def add_options(parser: argparse.ArgumentParser, engines: str, rounds: int, seconds: float) -> None:
    """Those of every race, with these defaults."""
    parser.add_argument("--engines", type=known_engines, default=engines)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--sequence", type=int, default=128, help="tokens of a text")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--calibration", type=int, default=4, help="batches of random images")
    parser.add_argument("--data", type=Path, help="folder of trained weights, for cifar_resnet20 and -56")
    parser.set_defaults(behind_operators=False)
    parser.add_argument("--anyway", action="store_true", help="rank although others use the machine")


def known_engines(text: str) -> str:
    if unknown := set(text.split(",")) - set(ENGINES):
        raise argparse.ArgumentTypeError(f"no engine {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}")
    return text


def measure(arguments: argparse.Namespace, macs: int) -> dict[str, Any]:
    """The race, the limit of a network of ``macs`` an image, and whether nobody else used the machine."""
    quiet = record.idle()
    results, latencies = race(arguments)
    quiet = record.busy() <= record.IDLE_SHARE and quiet
    rates = limits.int8_rates(arguments.threads)
    limit = limits.limit_ms(macs, arguments.batch, rates) if rates else None
    return {
        "idle": quiet,
        "limit_ms": limit,
        "rates_gmacs": rates,
        "core_latency_ns": latencies,
        "engines": results,
    }


def race(arguments: argparse.Namespace) -> tuple[dict[str, dict], list[float | None]]:
    """Engine -> what was measured, or why there is nothing; and the latency between two cores around each round."""
    with contextlib.ExitStack() as stack:
        channels, results = fresh.start_all(stack, serve, arguments.engines.split(","), arguments)
        for engine in channels:
            results[engine]["blocks_ms"] = []
        latencies = [core_latency.nanoseconds()]
        for _ in range(arguments.rounds):
            for engine, channel in list(channels.items()):
                time.sleep(PAUSE)
                channel.send(arguments.seconds)
                try:
                    results[engine]["blocks_ms"].append(fresh.receive(channel))
                except fresh.FailedError as error:
                    results[engine] = {"failed": str(error)}
                    del channels[engine]
            latencies.append(core_latency.nanoseconds())
    return results, latencies


def report(arguments: argparse.Namespace, results: dict[str, dict], limit: float | None, ranked: bool) -> None:
    console = Console(highlight=False)
    title = f"{arguments.network}, batch {arguments.batch}, {arguments.threads} threads"
    table = Table(title=title + (f"; limit {limit:.3f} ms" if limit else ""))
    for column in ("engine", "best ms", "median ms", "of the limit", "SQNR dB", "built in s"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    timed = {engine: found for engine, found in results.items() if "failed" not in found}
    order = sorted(timed, key=lambda engine: min(timed[engine]["blocks_ms"])) if ranked else list(timed)
    for engine in order:
        found = timed[engine]
        best, median = min(found["blocks_ms"]), statistics.median(found["blocks_ms"])
        share = f"{100 * limit / best:.0f} %" if limit else ""
        table.add_row(
            engine, f"{best:.3f}", f"{median:.3f}", share, f"{found['sqnr_db']:.1f}", f"{found['build_s']:.1f}"
        )
    console.print(table)
    for engine in results.keys() - timed.keys():
        console.print(f"{engine} failed: {results[engine]['failed']}", markup=False)
    if not ranked:
        console.print("Others used this machine: no ranking, and figures that are not worth quoting.")


if __name__ == "__main__":
    main()
