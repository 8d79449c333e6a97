"""Decoders with 4-bit or 8-bit weights in several engines: the time of a text of 512 tokens, and of a token after it.

    pip install --no-deps -r benchmarks/requirements-decoders.txt
    python benchmarks/decoder_race.py qwen25_05b --bits 4 --folder /tmp/decoders --prepare
    python benchmarks/decoder_race.py qwen25_05b --bits 4 --folder /tmp/decoders --threads 2

The networks are whole, with random weights. ``--prepare`` writes a file for every engine, and the logits of the float
model. Then every engine lives in a process of its own; they take turns, and a block is a text and the steps after it.
"best" is an engine's best block, "median" the median of its blocks; a block counts by its text, and by its median step.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import decoder_networks
import fresh
import record
import torch
from decoder_engines import ENGINES
from decoder_networks import PAST
from race import PAUSE
from rich.console import Console
from rich.table import Table

from intaglio.native import peak_throughput

CHECKED = 4
"""Steps whose logits are compared with those of the float model, behind the text."""
READ_BYTES = 1 << 30
"""Memory that is read for the bandwidth, more than any cache holds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=decoder_networks.SIZES)
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--folder", type=Path, required=True, help="folder of the engines' files")
    parser.add_argument("--prepare", action="store_true", help="write the files, and measure nothing")
    parser.add_argument("--start", type=Path, help="a file; once the engines are loaded, wait until it exists")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=32)
    arguments = parser.parse_args()
    if arguments.prepare:
        prepare(arguments)
        return
    found = race(arguments)
    record.append("decoder_race", arguments, found)
    report(arguments, found)


def file_of(arguments: argparse.Namespace, engine: str) -> Path:
    return arguments.folder / f"{arguments.network}_{arguments.bits}.{ENGINES[engine].file}"


def prepare(arguments: argparse.Namespace) -> None:
    """Write the files that are missing, each in a process of its own."""
    arguments.folder.mkdir(exist_ok=True)
    fresh.call(write_expected, arguments)
    for engine in arguments.engines.split(","):
        if not file_of(arguments, engine).exists():
            begin = time.perf_counter()
            try:
                fresh.call(write_file, arguments, engine)
                print(f"{engine}: {time.perf_counter() - begin:.0f} s")
            except fresh.FailedError as error:
                print(f"{engine} failed: {error}")


def write_expected(arguments: argparse.Namespace) -> None:
    """Write the logits of the float model, and how many weights a step reads."""
    path = arguments.folder / f"{arguments.network}.pt"
    if not path.exists():
        model = decoder_networks.decoder(arguments.network)
        text, following = calls(arguments.network, CHECKED)
        with torch.no_grad():
            logits = model(torch.cat([text, *following], 1), logits_to_keep=CHECKED + 1).logits[0]
        torch.save({"logits": logits, "weights": decoder_networks.weights_of_a_step(model)}, path)


def write_file(arguments: argparse.Namespace, engine: str) -> None:
    with torch.no_grad():
        model = decoder_networks.decoder(arguments.network)
        ENGINES[engine].prepare(model, arguments.bits, file_of(arguments, engine))


def calls(network: str, steps: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the text, and the token of every step after it."""
    return decoder_networks.tokens(network, PAST, 1), list(decoder_networks.tokens(network, steps, 2).split(1, 1))


def read_bandwidth(threads: int) -> float:
    """Return how many GB a second ``threads`` threads read from memory, at best: a matrix times a vector, in float32,
    or one address after the other.

    A matrix is read several rows at once, which is faster on some processors; on others PyTorch's product is slower
    than memory.
    """
    torch.set_num_threads(threads)
    matrix, best = torch.ones(READ_BYTES // 4 // 4096, 4096), float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        matrix @ matrix[0]
        best = min(best, time.perf_counter() - begin)
    streams = peak_throughput.read_rates(threads, READ_BYTES)
    return max(READ_BYTES / best / 1e9, streams["one_core"] if threads == 1 else threads * streams["each_of_all"])


def race(arguments: argparse.Namespace) -> dict[str, Any]:
    """Load all engines, and let them take turns. Each has what was measured, or why there is nothing.

    The bandwidth is measured in every round, because that of a virtual machine changes by half from minute to minute.
    """
    with contextlib.ExitStack() as stack:
        channels, results = fresh.start_all(stack, serve, arguments.engines.split(","), arguments)
        print("loaded", flush=True)
        while arguments.start and not arguments.start.exists():
            time.sleep(0.2)
        quiet, bandwidth = record.idle(), read_bandwidth(arguments.threads)
        for _ in range(arguments.rounds):
            bandwidth = max(bandwidth, read_bandwidth(arguments.threads))
            for engine, channel in channels.items():
                time.sleep(PAUSE)
                channel.send(None)
                for name, value in fresh.receive(channel).items():
                    results[engine].setdefault(name, []).append(value)
        return {"idle": record.still_idle(quiet), "gb_per_s": bandwidth, "engines": results}


def serve(channel: Connection, engine: str, arguments: argparse.Namespace) -> None:
    """The process of one engine: load, check, then one block per request."""
    torch.set_num_threads(arguments.threads)
    with torch.no_grad():
        begin = time.perf_counter()
        session = ENGINES[engine].load(arguments.network, file_of(arguments, engine), arguments.threads)
        loaded = time.perf_counter() - begin
        text, following = calls(arguments.network, arguments.steps)
        saved = torch.load(arguments.folder / f"{arguments.network}.pt")
        expected, read = saved["logits"], ENGINES[engine].bytes_of_a_step(arguments.bits, saved["weights"])
        got = torch.cat([session.text(text), *(session.step(token) for token in following[:CHECKED])])
        if not got.isfinite().all():
            raise RuntimeError("the logits are not finite")
        error = (got - expected).square().sum() / expected.square().sum()
        channel.send((True, {"load_s": loaded, "sqnr_db": -10 * torch.log10(error).item(), "bytes": read}))
        while True:
            channel.recv()
            channel.send((True, block(session, text, following)))


def block(session: Any, text: torch.Tensor, following: list[torch.Tensor]) -> dict[str, float]:
    """Milliseconds of the text, and of the median step after it."""
    begin = time.perf_counter()
    session.text(text)
    found = {"text_ms": 1e3 * (time.perf_counter() - begin)}
    for name in ("step", "program_step"):
        if call := getattr(session, name, None):
            found[f"{name}_ms"] = 1e3 * statistics.median(seconds(call, token) for token in following)
    return found


def seconds(call: Callable[[torch.Tensor], torch.Tensor], token: torch.Tensor) -> float:
    begin = time.perf_counter()
    call(token)
    return time.perf_counter() - begin


def report(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    console = Console(highlight=False)
    title = f"{arguments.network}, {arguments.bits} bits, {arguments.threads} threads, {found['gb_per_s']:.1f} GB/s"
    table = Table(title=title)
    for column in (
        "engine",
        "step, best ms",
        "step, median",
        "text, best ms",
        "text, median",
        "SQNR dB",
        "loaded in s",
    ):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for engine, one in found["engines"].items():
        if "failed" in one:
            console.print(f"{engine} failed: {one['failed']}", markup=False)
            continue
        steps, texts = one["step_ms"], one["text_ms"]
        figures = (min(steps), statistics.median(steps), min(texts), statistics.median(texts), one["sqnr_db"])
        table.add_row(engine, *(f"{value:.2f}" for value in figures), f"{one['load_s']:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
