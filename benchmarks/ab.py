"""Compare the speed of the models that two commits compile, and tell whether the difference is real.

    python benchmarks/ab.py main~5 main
    python benchmarks/ab.py 22f715a HEAD --networks resnet50,bert --batch 16 --threads 1 --rounds 20

Each commit is checked out into a folder of its own and runs in a process of its own, with an empty kernel cache. The
processes take turns, in blocks of --seconds, for --rounds rounds; a block counts by its median call, and a round by the
ratio of its two blocks. The interval has the median ratio in 95 of 100 samples of rounds (bootstrap). A difference is
real if the interval does not contain 1. Whether both give the same bits is shown too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fresh
import networks
import numpy as np
import record
import torch
from rich.console import Console
from rich.table import Table

SAMPLES = 10_000
"""Samples of rounds for the interval."""
CONFIDENCE = 0.95
PAUSE = 0.3
"""Seconds between blocks: threads of the other process that wait by spinning go to sleep."""


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Check a commit out into a temporary folder, and yield the folder."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "source"
        git = ("git", "-C", str(record.FOLDER), "worktree")
        subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
        try:
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def serve(channel: Connection, source: str, network: str, arguments: argparse.Namespace) -> None:
    """The process of one commit: build, send the result for one input, then one block for each request."""
    sys.path.insert(0, source)
    from race import block  # this imports intaglio too

    import intaglio

    if not Path(intaglio.__file__).is_relative_to(source):
        raise RuntimeError("intaglio was imported from another folder")
    torch.set_num_threads(arguments.threads)
    model, shape = networks.build(network, arguments.data)
    torch.manual_seed(1)
    calibration = [networks.inputs(shape, arguments.batch) for _ in range(arguments.calibration)]
    with torch.no_grad():
        quantized = intaglio.quantize(model, calibration, example_inputs=calibration[0], progress=False)
        channel.send((True, quantized(*calibration[0]).numpy()))
        while True:
            seconds = channel.recv()
            quantized(*calibration[0])
            channel.send((True, block(lambda: quantized(*calibration[0]), seconds)))


def compare(sources: tuple[str, str], network: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the blocks of both commits in ms, and whether their results have the same bits."""
    with contextlib.ExitStack() as stack:
        channels = []
        for source in sources:
            cache = {"INTAGLIO_CACHE_DIR": stack.enter_context(tempfile.TemporaryDirectory())}
            channels.append(stack.enter_context(fresh.opened(serve, source, network, arguments, environment=cache)))
        results = [fresh.receive(channel) for channel in channels]
        blocks: tuple[list[float], list[float]] = ([], [])
        for number in range(arguments.rounds):
            for at in (0, 1) if number % 2 else (1, 0):
                time.sleep(PAUSE)
                channels[at].send(arguments.seconds)
                blocks[at].append(fresh.receive(channels[at]))
    return {"first_ms": blocks[0], "second_ms": blocks[1], "same_bits": bool(np.array_equal(*results))}


def interval(first: list[float], second: list[float]) -> tuple[float, float, float]:
    """Return the median ratio of the second to the first, and the ends of its interval."""
    ratios = np.array(second) / np.array(first)
    drawn = np.random.default_rng(0).integers(0, len(ratios), (SAMPLES, len(ratios)))
    medians = np.median(ratios[drawn], axis=1)
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(np.median(ratios)), float(low), float(high)


def verdict(low: float, high: float) -> str:
    """Say what an interval of ratios shows."""
    if low > 1:
        return "slower"
    return "faster" if high < 1 else "no difference shown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", help="a commit")
    parser.add_argument("second", help="the commit that is compared with it")
    parser.add_argument("--networks", default="resnet50,mobilenet_v2")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--calibration", type=int, default=2, help="batches of random inputs")
    parser.add_argument("--data", type=Path, help="folder of trained weights, for cifar_resnet20 and -56")
    arguments = parser.parse_args()
    table = Table(title=f"{arguments.second} beside {arguments.first}, batch {arguments.batch}")
    for column in ("network", "first, best ms", "second, best ms", "ratio", "95 %", "second is", "bits"):
        table.add_column(column)
    quiet, results = record.idle(), {}
    with checkout(arguments.first) as first, checkout(arguments.second) as second:
        for network in arguments.networks.split(","):
            found = compare((str(first / "src"), str(second / "src")), network, arguments)
            ratio, low, high = interval(found["first_ms"], found["second_ms"])
            results[network] = {**found, "ratio": ratio, "interval": [low, high]}
            best = (f"{min(found[key]):.3f}" for key in ("first_ms", "second_ms"))
            bits = "the same" if found["same_bits"] else "differ"
            table.add_row(network, *best, f"{ratio:.3f}", f"{low:.3f} to {high:.3f}", verdict(low, high), bits)
    Console(highlight=False).print(table)
    record.append("ab", arguments, {"idle": record.still_idle(quiet), **results})


if __name__ == "__main__":
    main()
