"""Linear layers with int8 and with 4-bit weights, by the number of rows of a call: the best call of each.

    python benchmarks/int4_weights.py
    python benchmarks/int4_weights.py --isa avx512vnni --rows 1,512

Each model has pairs of layers from 2048 to 8192 channels and back, 403 million weights by default, so that the weights
do not fit into the caches of the cores. Weights are rounded to nearest, which changes no time.
"""

from __future__ import annotations

import argparse
import os
import time

import record
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import intaglio
from intaglio.native import cpu as machine

NARROW, WIDE = 2048, 8192
"""Channels."""
NEAREST = {"equalize": 0.0, "rounding": "nearest"}
DATATYPES = {
    "int8": NEAREST,
    "4 bits": {**NEAREST, "weights_dtype": "s4", "weights": "group:32"},
}
"""Settings of all layers by the name of a column."""
BITS = {"int8": 8, "4 bits": 4.125}
"""Bits that a weight takes in memory."""


def best(model: nn.Module, rows: int, calls: int) -> float:
    """Return the milliseconds of the fastest call."""
    x, found = torch.randn(rows, NARROW), float("inf")
    model(x)
    for _ in range(calls):
        start = time.perf_counter()
        model(x)
        found = min(found, 1e3 * (time.perf_counter() - start))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default=machine.isas()[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--rows", default="1,8,64,512")
    parser.add_argument("--threads", default=f"1,{os.cpu_count()}")
    parser.add_argument("--calls", type=int, default=9)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    layers = [layer for _ in range(arguments.pairs) for layer in (nn.Linear(NARROW, WIDE), nn.Linear(WIDE, NARROW))]
    float_model, weights = nn.Sequential(*layers).eval().requires_grad_(False), 2 * arguments.pairs * NARROW * WIDE
    options, data = intaglio.CompileOptions(isa=arguments.isa), [torch.randn(8, NARROW) for _ in range(2)]
    models = {
        name: intaglio.quantize(float_model, data, recipe={"*": recipe}, options=options, progress=False)
        for name, recipe in DATATYPES.items()
    }
    table, results = Table("threads", "rows", *models, title=f"{arguments.isa}: ms, GB/s of weights"), {}
    for threads in map(int, arguments.threads.split(",")):
        torch.set_num_threads(threads)
        for rows in map(int, arguments.rows.split(",")):
            times = {name: best(model, rows, arguments.calls) for name, model in models.items()}
            results[f"{threads}/{rows}"] = times
            cells = (f"{ms:.2f}, {weights * BITS[name] / 8e6 / ms:.1f}" for name, ms in times.items())
            table.add_row(str(threads), str(rows), *cells)
    Console(highlight=False).print(table)
    record.append("int4_weights", arguments, results)


if __name__ == "__main__":
    main()
