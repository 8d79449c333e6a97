"""Predicted times of calls with 1 to 64 threads, from profiles on one thread, and measured times on this machine.

    python benchmarks/scaling.py                                        four networks at batch 1 and 16
    python benchmarks/scaling.py --networks resnet18 --batches 1 --memory 40

The machine's numbers are the times of the steps on one thread, the time of a barrier, and the rate of its memory
(--memory, GB/s of all cores). The time of a barrier is measured on all cores of this machine, with the other networks:
the prediction of a network takes that of the network whose steps are the shortest, which feels it most. More cores than
this machine has are not measured.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import networks
import record
import torch
from rich.console import Console
from rich.table import Table

import intaglio
from intaglio.runtime.reports.profile import Profile

SHOWN = (1, 2, 4, 8, 16, 32, 64)


def quantize(name: str, isa: str | None) -> tuple[intaglio.runtime.QuantizedModel, networks.Shape]:
    model, shape = networks.build(name)
    options = intaglio.CompileOptions(isa=isa) if isa else None
    data = [networks.inputs(shape, 2)]
    return intaglio.quantize(model, data, options=options, progress=False), shape


def profiles(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], rounds: int) -> tuple[Profile, Profile]:
    """Profiles on one thread and on all cores: the fastest of ``rounds`` by turns."""
    best: dict[int, Profile] = {}
    for _ in range(rounds):
        for threads in (1, os.cpu_count() or 1):
            torch.set_num_threads(threads)
            profile = model.profile(*inputs)
            if threads not in best or profile.call_microseconds < best[threads].call_microseconds:
                best[threads] = profile
    return best[1], best[max(best)]


def predict(name: str, found: dict[str, tuple[Profile, Profile]], memory: float | None) -> dict[str, Any]:
    """The prediction for a network, with the time of a barrier that the other networks have, and the measured times."""
    one, shared = found[name]
    others = [pair for key, pair in found.items() if key != name]
    own, other = min(others, key=lambda pair: pair[0].call_microseconds / len(pair[0].parts))
    scaling = one.scaling(SHOWN[-1], barrier_us=own.barrier_us_of(other), memory_gb_per_second=memory)
    return {
        "measured_us": {"1": one.call_microseconds, str(shared.threads): shared.call_microseconds},
        "own_barrier_us": one.barrier_us_of(shared),
        "barrier_us": scaling.barrier_us,
        "predicted_us": {str(count): scaling[count].microseconds for count in (*SHOWN, shared.threads)},
        "fastest": scaling.fastest.threads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="mobilenet_v2,shufflenet_v2_x1_0,resnet50,bert")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--isa", help="instruction set (default: the best one)")
    parser.add_argument("--memory", type=float, help="GB/s at which all cores read weights (default: no limit)")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    made = {name: quantize(name, arguments.isa) for name in arguments.networks.split(",")}
    quiet, found = record.idle(), {}
    for name, (model, shape) in made.items():
        for batch in map(int, arguments.batches.split(",")):
            found[f"{name}, batch {batch}"] = profiles(model, networks.inputs(shape, batch), arguments.rounds)
    quiet = record.busy() <= record.IDLE_SHARE and quiet
    results = {name: predict(name, found, arguments.memory) for name in found}
    show(results)
    isa = next(iter(found.values()))[0].isa
    record.append("scaling", arguments, {"idle": quiet, "isa": isa, "networks": results})


def show(results: dict[str, dict[str, Any]]) -> None:
    table = Table(title="microseconds of a call")
    for column in ("network", "barrier", "measured, all cores", "predicted", *map(str, SHOWN), "fastest"):
        table.add_column(column, justify="left" if column == "network" else "right")
    for name, one in results.items():
        threads, measured = list(one["measured_us"].items())[-1]
        predicted = one["predicted_us"]
        times = (f"{predicted[str(count)]:.0f}" for count in SHOWN)
        table.add_row(
            name,
            f"{one['own_barrier_us']:.2f}",
            f"{measured:.0f}",
            f"{predicted[threads]:.0f} ({measured / predicted[threads]:.2f})",
            *times,
            str(one["fastest"]),
        )
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
