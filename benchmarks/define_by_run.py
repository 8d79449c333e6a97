"""What define-by-run costs: a converted model that is still plain Python, against the native program of its graph.

    python benchmarks/define_by_run.py chain              per operator, of a chain of 1,000 tiny ones
    python benchmarks/define_by_run.py nothing            per operator that computes nothing: questions, identities
    python benchmarks/define_by_run.py mobilenet_v2,resnet50 --threads 2

`chain`: both run the same kernels on 16 numbers; the program calls them one after the other from native code, in a
call of its own. The difference of the two times, divided by the number of operators, is all that Python adds: what a
model's own loop, PyTorch's dispatch to the interception, deferring, and starting the program take. For modules it
holds the call of the module as well. `nothing`: time of a model with the operators, less that without them, and the
same of the float model, which pays for its own calls too. A network is run four ways: converted, rewritten to its
native program, in float, and in float by torch.compile with its weights frozen.

Before anything is timed, the converted model must give the bits of its program. Ways take turns, in blocks of calls; a
block counts by its median call (of a chain by its best), *best* is the best block and *median* the median one. All in
one process. One JSON line a case goes to standard output, tables follow.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from statistics import median

import networks
import record
import torch
import torch._inductor.config
from torch import nn

from intaglio import eager, stages

Call = Callable[[torch.Tensor], object]
OPERATORS_PER_ITERATION = 20
"""Operators of one iteration of `Functions`, one a line: a line that runs more than 64 times shares parameters."""


class Functions(nn.Module):
    """A linear layer, then functions and methods of PyTorch in a Python loop."""

    def __init__(self, operators: int) -> None:
        super().__init__()
        self.first, self.iterations = nn.Linear(16, 16), operators // OPERATORS_PER_ITERATION

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.iterations):
            x = torch.relu(x)
            x = x + x
            x = x * 0.5
            x = x.clamp(-4.0, 4.0)
            x = x - 0.1
            x = torch.relu(x)
            x = x + x
            x = x * 0.5
            x = x.clamp(-4.0, 4.0)
            x = x - 0.1
            x = torch.relu(x)
            x = x + x
            x = x * 0.5
            x = x.clamp(-4.0, 4.0)
            x = x - 0.1
            x = torch.relu(x)
            x = x + x
            x = x * 0.5
            x = x.clamp(-4.0, 4.0)
            x = x - 0.1
        return x


def modules(operators: int) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), *[(nn.ReLU, nn.Hardswish)[i % 2]() for i in range(operators)])


class IdentityOperators(nn.Module):
    """``repeats`` operators that need nothing between two that do."""

    def __init__(self, operator: str, repeats: int) -> None:
        super().__init__()
        self.first, self.identity, self.dropout = nn.Linear(16, 16), nn.Identity(), nn.Dropout()
        self.operator, self.repeats = IDENTITY_OPERATORS[operator], repeats

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, operator = self.first(x), self.operator
        for _ in range(self.repeats):
            operator(self, x)
        return torch.relu(x)


IDENTITY_OPERATORS: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
    "x.shape": lambda m, x: x.shape,
    "x.size(0)": lambda m, x: x.size(0),
    "x.dtype": lambda m, x: x.dtype,
    "x.contiguous()": lambda m, x: x.contiguous(),
    "nn.Identity": lambda m, x: m.identity(x),
    "nn.Dropout": lambda m, x: m.dropout(x),
    "torch.dropout": lambda m, x: torch.dropout(x, 0.5, False),
    "F.dropout": lambda m, x: nn.functional.dropout(x, 0.5, False),
}


def converted(model: nn.Module, data: Sequence[torch.Tensor]) -> nn.Module:
    prepared = eager.prepare(model, (data[0],))
    for batch in data:
        prepared(batch)
    return eager.convert(prepared)


def program_of(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """The native program of a converted model, which must give the same bits."""
    program = stages.compile(eager.rewrite(model))
    if not torch.equal(model(x), program(x)):
        raise SystemExit("the converted model and its native program differ")
    return program


def times(
    calls: dict[str, Call], x: torch.Tensor, blocks: int, length: int, of_block: Callable[[list[float]], float]
) -> dict[str, dict[str, float]]:
    """Way -> microseconds of the best block and the median one."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call(x)
    for _ in range(blocks):
        for name, call in calls.items():
            found[name].append(of_block([_seconds(call, x) for _ in range(length)]))
    return {name: {"best": 1e6 * min(own), "median": 1e6 * median(own)} for name, own in found.items()}


def _seconds(call: Call, x: torch.Tensor) -> float:
    begin = time.perf_counter()
    call(x)
    return time.perf_counter() - begin


def measure_chains(operators: int, blocks: int) -> list[dict]:
    rows, x = [], torch.randn(1, 16)
    for name, model in (("functions", Functions(operators)), ("modules", modules(operators))):
        own = converted(model.eval(), [x])
        count = sum(len(segment.events) for segment in eager.session_of(own).segments) - 1
        found = times({"converted": own, "program": program_of(own, x), "float": model}, x, blocks, 20, min)
        cost = {kind: (found["converted"][kind] - found["program"][kind]) / count for kind in ("best", "median")}
        rows.append({"case": f"chain of {name}", "operators": count, "each": cost, "microseconds": found})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def measure_identities(blocks: int, repeats: int = 60) -> list[dict]:
    rows, x = [], torch.randn(1, 16)
    for name in IDENTITY_OPERATORS:
        ways: dict[str, Call] = {}
        for count in (0, repeats):
            model = IdentityOperators(name, count).eval()
            ways[f"float {count}"], ways[f"converted {count}"] = model, converted(model, [x])
            program_of(ways[f"converted {count}"], x)
        found = times(ways, x, blocks, 50, min)
        each = {}
        for way in ("converted", "float"):
            much, little = found[f"{way} {repeats}"], found[f"{way} 0"]
            each[way] = {kind: (much[kind] - little[kind]) / repeats for kind in little}
        rows.append({"case": name, **each})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def network(name: str, blocks: int, length: int) -> dict:
    model, shape = networks.build(name)
    data, x = [torch.randn(2, *shape) for _ in range(2)], torch.randn(1, *shape)
    begin = time.perf_counter()
    own = converted(model, data)
    made = time.perf_counter()
    own(x)
    first = time.perf_counter() - made
    program = program_of(own, x)
    captured = stages.prepare(stages.capture(model, (data[0],)))
    for batch in data:
        captured(batch)
    same = stages.compile(stages.convert(captured)).text("program") == program.text("program")
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        compiled = torch.compile(model)
        ways = {"converted": own, "program": program, "float": model, "torch.compile": compiled}
        found = times(ways, x, blocks, length, median)
    row = {
        "case": name,
        "threads": torch.get_num_threads(),
        "same program as by export": same,
        "seconds to convert": made - begin,
        "seconds of the first call": first,
        "microseconds": found,
    }
    print(json.dumps(row), flush=True)
    return row


def table(rows: list[dict]) -> str:
    """Milliseconds of networks, microseconds of one operator."""
    lines = []
    for row in rows:
        if "threads" in row:
            best = {way: found["best"] / 1e3 for way, found in row["microseconds"].items()}
            cells = [f"{best[way]:.2f}" for way in best] + [f"{best['converted'] / best['program']:.2f}"]
            lines.append(f"| {row['case']}, {row['threads']} threads | {' | '.join(cells)} |")
        elif "each" in row:
            lines.append(f"| {row['case']} | {row['each']['best']:.2f} | {row['each']['median']:.2f} |")
        else:
            lines.append(f"| {row['case']} | {row['converted']['best']:.2f} | {row['float']['best']:.2f} |")
    return "\n".join(lines)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="?", default="chain,nothing,mobilenet_v2,resnet50")
    parser.add_argument("--operators", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--calls", type=int, default=8, help="of a network in a block")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--record", action="store_true", help="add the figures to benchmarks/results")
    arguments = parser.parse_args(given)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    idle, rows = record.idle(), []
    with torch.no_grad():
        for case in arguments.cases.split(","):
            if case == "chain":
                rows += measure_chains(arguments.operators, arguments.blocks)
            elif case == "nothing":
                rows += measure_identities(arguments.blocks)
            else:
                rows.append(network(case, arguments.blocks, arguments.calls))
    print(table(rows))
    if arguments.record:
        record.append("define_by_run", arguments, {"idle": idle, "rows": rows})


if __name__ == "__main__":
    main()
