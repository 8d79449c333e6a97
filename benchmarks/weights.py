"""A linear layer whose weights alone are float16 or int8, against PyTorch's float32 layer: the best block of each.

    python benchmarks/weights.py                       what tables are made of
    python benchmarks/weights.py --isa avx2 --threads 1

Blocks of the engines take turns. Each result is compared with the float layer's before anything is timed. Weights of
one call are in the third-level cache for the next one as far as they fit it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping

import record
import torch
from torch import nn

import intaglio
from intaglio.native import cpu as machine

SIZES = ((768, 3072), (4096, 4096))
"""Inputs and outputs."""
DATATYPES = {"f16": 0.001, "s8": 0.01}
"""Of weights -> the largest share of the result's norm that they may change."""
BLOCK_SECONDS = 0.02
"""Of one block."""


def engines(inputs: int, outputs: int, isa: str) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    layer = nn.Linear(inputs, outputs).eval().requires_grad_(False)
    x, found = torch.randn(4, inputs), {"torch": layer}
    for name, allowed in DATATYPES.items():
        recipe = {"*": {"activations": "float", "weights_dtype": name}}
        found[name] = intaglio.quantize(layer, [x], recipe=recipe, options=intaglio.CompileOptions(isa=isa))
        if (found[name](x) - layer(x)).norm() > allowed * layer(x).norm():
            raise SystemExit(f"{name} weights, {inputs} x {outputs}: another result than the float layer's")
    return found


def best(runs: Mapping[str, Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor, rounds: int) -> dict[str, float]:
    """Microseconds of a call."""
    found = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            run(x)
            calls, start = 0, time.perf_counter()
            while (spent := time.perf_counter() - start) < BLOCK_SECONDS:
                run(x)
                calls += 1
            found[name] = min(found[name], 1e6 * spent / calls)
    return found


def lines(given: argparse.Namespace) -> Iterator[dict[str, object]]:
    for inputs, outputs in SIZES:
        runs = engines(inputs, outputs, given.isa)
        for rows in given.rows:
            times = best(runs, torch.randn(rows, inputs), given.rounds)
            ratios = {name: round(times["torch"] / times[name], 2) for name in DATATYPES}
            print(
                f"{inputs} x {outputs}, {rows} rows: "
                + ", ".join(f"{name} {value:.0f} us" for name, value in times.items())
                + f"; torch / ours {ratios}",
                flush=True,
            )
            yield {"inputs": inputs, "outputs": outputs, "rows": rows, "us": times, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 128])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default=machine.isas()[0])
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    idle = record.idle()
    record.append("weights", given, {"idle": idle, "layers": list(lines(given))})


if __name__ == "__main__":
    main()
