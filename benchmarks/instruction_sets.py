"""A network with the kernels of every instruction set of this CPU: the best call of each, and its share of the limit.

    python benchmarks/instruction_sets.py                                 ResNet-50, one thread
    python benchmarks/instruction_sets.py --networks mobilenet_v2 --threads 2 --isas avxvnni,avx2

The network is quantized once, and its programs take turns. The limit is the time in which the integer units could do
all multiply-accumulates, at the rate that a loop on registers reaches in the same turns; memory is not considered. The
results must be equal before anything is timed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import networks
import record
import torch
from rich.console import Console
from rich.table import Table

import intaglio
from intaglio.native import cpu as machine
from intaglio.native import peak_throughput as limits

BLOCK_SECONDS = 0.15
"""Seconds of one block of calls."""
PEAK_SECONDS = 0.005
"""Seconds of a measurement of the peak."""


def programs(model: intaglio.QuantizedModel, isas: list[str]) -> dict[str, intaglio.QuantizedModel]:
    """Return a model compiled for each instruction set."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.intaglio"
        model.save(path)
        return {isa: intaglio.load(path, isa=isa) for isa in isas}


def best_ms(run: Callable[[], object]) -> float:
    """Return the milliseconds of the best call of a block."""
    best, end = float("inf"), time.perf_counter() + BLOCK_SECONDS
    while time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return 1e3 * best


def compare(name: str, arguments: argparse.Namespace) -> dict[str, dict[str, float | None]]:
    """Return the milliseconds of each instruction set, and its share of the limit where its rate can be measured."""
    model, shape = networks.build(name, arguments.data)
    macs = networks.count_macs(model, shape) * arguments.batch
    int8 = intaglio.quantize(model, [networks.inputs(shape, 2) for _ in range(2)], progress=False)
    x, found = networks.inputs(shape, arguments.batch), dict[str, list[float]]()
    compiled, rates = programs(int8, arguments.isas.split(",")), dict[str, float]()
    results = [program(*x) for program in compiled.values()]
    if not all(torch.equal(results[0], result) for result in results):
        raise SystemExit(f"{name}: the instruction sets give different results")
    for _ in range(arguments.rounds):
        for isa, program in compiled.items():
            found.setdefault(isa, []).append(best_ms(lambda program=program: program(*x)))
            rate = sum(limits.int8_rates(isa, arguments.threads, PEAK_SECONDS))
            rates[isa] = max(rates.get(isa, 0.0), rate)
    return {
        isa: {"ms": min(times), "share": macs / rates[isa] / 1e6 / min(times) if rates[isa] else None}
        for isa, times in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="resnet50")
    parser.add_argument("--isas", default=",".join(isa for isa in machine.isas() if isa != machine.IsaName.PORTABLE))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--data", type=Path, help="folder of weights and images, for the CIFAR networks; see README.md")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    quiet, results = record.idle(), {}
    table = Table("network", "instruction set", "ms", "share of the limit", title=f"{arguments.threads} threads")
    for name in arguments.networks.split(","):
        with torch.no_grad():
            results[name] = compare(name, arguments)
        for isa, one in results[name].items():
            share = "–" if one["share"] is None else f"{100 * one['share']:.0f} %"
            table.add_row(name, isa, f"{one['ms']:.2f}", share)
    Console(highlight=False).print(table)
    record.append("instruction_sets", arguments, {"idle": record.still_idle(quiet), **results})


if __name__ == "__main__":
    main()
