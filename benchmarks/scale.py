"""How time grows with the batch and shrinks with threads: what the runtime's model predicts, and what the clock says.

    python benchmarks/scale.py                                   resnet18, mobilenet_v2, cifar_resnet20 and a small MLP
    python benchmarks/scale.py resnet18,mlp --batches 1,8 --threads 1,2

Weights are random. A figure is the best call of --rounds blocks, the configurations by turns. "predicted" is the model
of runtime/calls/threads.py for the number of threads it chooses, and the fixed cost of a call, which is that of the
smallest network here; it says nothing of machines other than the one its constants are from.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import networks
import record
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import intaglio
from intaglio.runtime.calls.threads import segment_costs, thread_counts

CALL_SECONDS = 12e-6
"""Seconds from Python into the program and back."""


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).eval()


def build(name: str) -> tuple[nn.Module, networks.Shape]:
    torch.manual_seed(0)
    if name == "mlp":
        return mlp(), (64,)
    if name.startswith("cifar_resnet"):
        model = networks.CifarResNet((int(name.removeprefix("cifar_resnet")) - 2) // 6)
        networks.draw_batch_norms(model)
        return model.eval(), (3, 32, 32)
    return networks.build(name)


def best(call: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest of the calls that fit."""
    call()
    found, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        found = min(found, time.perf_counter() - begin)
    return found


def measure(name: str, batches: list[int], threads: list[int], rounds: int, seconds: float) -> list[dict]:
    """One row for every batch and number of threads."""
    model, shape = build(name)
    quantized = intaglio.quantize(model, [torch.randn(4, *shape) for _ in range(2)], progress=False)
    program, rows = quantized.artifact.program, []
    for batch in batches:
        x, symbols = torch.randn(batch, *shape), {"n": batch}
        for allowed in threads:
            chosen = thread_counts(program, symbols, allowed)
            parts = zip(segment_costs(program, symbols), chosen, strict=True)
            predicted = CALL_SECONDS + sum(cost.time(count) for cost, count in parts)
            rows.append(
                {
                    "network": name,
                    "batch": batch,
                    "allowed": allowed,
                    "threads": max(chosen),
                    "x": x,
                    "predicted_us": predicted * 1e6,
                    "measured_us": float("inf"),
                }
            )
    for _ in range(rounds):
        for row in rows:
            torch.set_num_threads(row["allowed"])
            found = best(lambda x=row["x"]: quantized(x), seconds)
            row["measured_us"] = min(row["measured_us"], found * 1e6)
    return [{key: value for key, value in row.items() if key != "x"} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="?", default="mlp,cifar_resnet20,resnet18,mobilenet_v2")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64")
    parser.add_argument("--threads", default=",".join(str(count) for count in sorted({1, os.cpu_count() or 1})))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.3)
    arguments = parser.parse_args()
    batches, threads = ([int(n) for n in text.split(",")] for text in (arguments.batches, arguments.threads))
    quiet, console, rows = record.idle(), Console(highlight=False), []
    for name in arguments.networks.split(","):
        table = Table(title=name)
        for column in ("batch", "threads allowed", "used", "predicted us", "measured us", "measured / predicted"):
            table.add_column(column, justify="right")
        for row in measure(name, batches, threads, arguments.rounds, arguments.seconds):
            ratio = row["measured_us"] / row["predicted_us"]
            table.add_row(
                str(row["batch"]),
                str(row["allowed"]),
                str(row["threads"]),
                f"{row['predicted_us']:.1f}",
                f"{row['measured_us']:.1f}",
                f"{ratio:.2f}",
            )
            rows.append(row)
        console.print(table)
    quiet = record.busy() <= record.IDLE_SHARE and quiet
    if not quiet:
        console.print("Others used this machine: measured figures that are not worth quoting.")
    record.append("scale", arguments, {"idle": quiet, "rows": rows})


if __name__ == "__main__":
    main()
