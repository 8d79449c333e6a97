"""Draws networks from the operator records and compares float, reference, interpreter and program.

    PYTHONPATH=src:tests python -m fuzz.graphs --seed 0 --count 1000 --isa all

The network of a seed is the same in every run. Networks stand side by side in modules of ``--together``, so that
capture and compilation are paid once for all of them. Instruction sets take turns, one for each module.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from fuzz.checking import Seen
from fuzz.drawing import draw_network, draw_options
from fuzz.findings import FAILURES, Finding, examine, shrunk
from fuzz.generators import WITHOUT_GENERATOR
from intaglio.native.cpu import isas
from intaglio.ops import BY_NAME

TOGETHER = 32
SECONDS_PER_MODULE = 900
MANY = 2000
"""Networks after which an overload that was never called is told."""


def isas_of(choice: str) -> tuple[str, ...]:
    """Return the instruction sets of ``--isa``: those that the processor supports, or one."""
    return isas() if choice == "all" else (choice,)


def run_module(index: int, seeds: Iterable[int], isa: tuple[str, ...], shrink: bool) -> dict[str, Any]:
    """Examine the networks of a module; return the line of the log."""
    seen, began = Seen(), time.process_time()
    networks, options = [draw_network(seed) for seed in seeds], draw_options(index, isa)
    found: list[Finding] = []
    kinds: Counter[str] = Counter()
    for one in examine(networks, options, index, seen):
        kinds[one.kind] += 1
        found.append(shrunk(one, index) if shrink and kinds[one.kind] == 1 else one)
    return {
        "index": index,
        "networks": len(networks),
        "lines": sum(len(network.lines) for network in networks),
        "isa": options.isa,
        "shapes": options.shapes,
        "findings": [{"seed": one.network.seed, "kind": one.kind, "text": one.text} for one in found],
        "code": [one.network.code() for one in found],
        "stored": [json.loads(one.to_json()) for one in found],
        "refused": dict(seen.refused),
        "targets": dict(seen.targets),
        "kinds": dict(seen.kinds),
        "values": seen.values,
        "differing": seen.differing,
        "seconds": round(time.process_time() - began, 2),
    }


def quiet() -> None:
    """Keep libraries from printing, and Python's collector from taking a quarter of the time of torch.export."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def work(pipe: Connection, isa: tuple[str, ...], shrink: bool) -> None:
    """Examine the modules that come through a pipe."""
    quiet()
    signal.signal(signal.SIGALRM, _too_long)
    while True:
        index, seeds = pipe.recv()
        signal.alarm(SECONDS_PER_MODULE)
        pipe.send(run_module(index, seeds, isa, shrink))
        signal.alarm(0)


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"longer than {SECONDS_PER_MODULE} s")


def run_all(
    jobs: list[tuple[int, list[int]]], isa: tuple[str, ...], shrink: bool, count: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield the lines of the log of all modules, from ``count`` processes; a process that dies is a finding."""
    until = time.monotonic() + seconds
    waiting, running = list(reversed(jobs)), {}
    context = multiprocessing.get_context("spawn")
    workers: list[Any] = []

    def start() -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, isa, shrink), daemon=True)
        process.start()
        theirs.close()
        workers.append(ours)
        running[ours] = (process, None)
        hand_out(ours)

    def hand_out(pipe: Connection) -> None:
        process, _ = running[pipe]
        if waiting and time.monotonic() < until:
            job = waiting.pop()
            running[pipe] = (process, job)
            pipe.send(job)
        else:
            process.terminate()
            del running[pipe]

    for _ in range(min(count, len(jobs))):
        start()
    while running:
        for pipe in wait(list(running)):
            process, job = running[pipe]
            try:
                line = pipe.recv()
            except EOFError:
                process.join()
                del running[pipe]
                index, seeds = job
                if len(seeds) > 1:  # find the network that kills it
                    half = len(seeds) // 2
                    waiting += [(index, seeds[:half]), (index, seeds[half:])]
                else:
                    yield died(index, seeds[0], process.exitcode, isa)
                if waiting:
                    start()
                continue
            yield line
            hand_out(pipe)


def died(index: int, seed: int, code: int, isa: tuple[str, ...]) -> dict[str, Any]:
    """Return the line of a network that ends the process."""
    network, options = draw_network(seed), draw_options(index, isa)
    one = Finding(network, options, f"the process ends with {code}", "")
    return {
        **{"index": index, "networks": 1, "lines": len(network.lines), "isa": options.isa, "shapes": options.shapes},
        "findings": [{"seed": seed, "kind": one.kind, "text": ""}],
        **{"code": [network.code()], "stored": [json.loads(one.to_json())], "refused": {}, "targets": {}, "kinds": {}},
        **{"values": 0, "differing": 0, "seconds": 0},
    }


def summary(lines: list[dict[str, Any]]) -> str:
    """Return counts of networks, findings, refusals, and of the overloads and operators that were met."""
    targets: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    findings: Counter[str] = Counter()
    for line in lines:
        targets.update(line["targets"])
        kinds.update(line["kinds"])
        refused.update(line["refused"])
        findings.update(one["kind"] for one in line["findings"])
    wanted = {target for name, record in BY_NAME.items() if name not in WITHOUT_GENERATOR for target in record.targets}
    never = sorted(wanted - set(targets))
    total = {key: sum(line[key] for line in lines) for key in ("networks", "lines", "values", "differing", "seconds")}
    rate = total["differing"] / max(total["values"], 1)
    return "\n".join(
        [
            f"{total['networks']} networks with {total['lines']} lines in {total['seconds']:.0f} s of Python: "
            f"{sum(findings.values())} fail, {sum(refused.values())} are refused",
            f"{len(wanted & set(targets))} of {len(wanted)} overloads were called"
            + (f"; never: {', '.join(never)}" if total["networks"] >= MANY else ""),
            f"{len(kinds)} operators in integer graphs; "
            f"{total['differing']} of {total['values']} quantized values differ from the reference ({rate:.1e})",
            *[f"  {count} x {kind}" for kind, count in findings.most_common()],
            *[f"  {count} x refused: {kind}" for kind, count in refused.most_common()],
        ]
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=1000, help="number of networks")
    parser.add_argument("--isa", default="all", help="instruction set, or all of this processor in turn")
    parser.add_argument("--together", type=int, default=TOGETHER, help="networks in a module")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no module begins later")
    parser.add_argument("--log", type=Path, help="file for a line of JSON per module")
    parser.add_argument("--store", action="store_true", help=f"write failing networks to {FAILURES.name}/")
    parser.add_argument("--no-shrink", action="store_true", help="report failing networks as they were drawn")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    jobs: dict[int, list[int]] = {}
    for seed in range(given.seed, given.seed + given.count):
        jobs.setdefault(seed // given.together, []).append(seed)
    lines = []
    for line in run_all(list(jobs.items()), isas_of(given.isa), not given.no_shrink, given.processes, given.seconds):
        lines.append(line)
        for one, code, held in zip(line["findings"], line["code"], line["stored"], strict=True):
            again = (
                f"python -m fuzz.graphs --seed {one['seed']} --count 1 --isa {line['isa']} --together {given.together}"
            )
            print(f"{one['seed']}: {one['kind']}\n  {again}\n{code}\n{one['text']}", flush=True)
            if given.store:
                (FAILURES / f"seed_{one['seed']}.json").write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
        if given.log:
            with given.log.open("a", encoding="utf-8") as log:
                kept = {key: value for key, value in line.items() if key not in ("code", "stored")}
                log.write(json.dumps(kept) + "\n")
    print(summary(lines))
    return 1 if any(line["findings"] for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
