"""Mixed precision: `intaglio.search` and greedy skipping, which reach the same accuracy at different latencies.

    python benchmarks/search.py --folder FOLDER --networks mobilenet_v3_large,efficientnet_b0,vit_b_16,minilm

The metric is the signal-to-quantization-noise ratio of the results on inputs that calibration has not seen. The target
is that of the int8 model and `--gain` decibels more. Greedy skipping leaves in float the operators whose own rounding
`intaglio.compare` finds worst: twice as many until the target is reached, then as few as suffice, by bisection. Both
have the same function, and as many evaluations as the run that they were done in allowed. At the end all models are
timed in blocks that alternate.

FOLDER keeps recipes with their parameters, what greedy skipping found, and journals of the searches: a run that was
interrupted continues. `--prepare` does only what a busy machine does not change: it quantizes, skips greedily and
measures errors. `--part` searches for `--minutes`, and times nothing at the end: the next run continues, and the
duration of the search is that of all its parts without what `--prepare` did.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networks
import race
import record
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.errors import UnsupportedError
from intaglio.tune import ReferencePool

MOST_DB = 100.0
"""Ratio of a model without error: a metric must be finite."""
ROUNDS = 8
"""Number of blocks in which a model is timed."""


def normalize(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Give batch norms the statistics of inputs. With others, random networks forget their inputs layer by layer, and
    only errors of the last layers count."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    if norms:
        with torch.no_grad():
            model(*inputs)
    model.eval()


class Decibels:
    """The metric, and how often it was asked."""

    def __init__(self, model: nn.Module, inputs: tuple[torch.Tensor, ...]):
        self.inputs, self.calls = inputs, 0
        with torch.no_grad():
            self.expected = model(*inputs).double()

    def __call__(self, model: Any) -> float:
        self.calls += 1
        with torch.no_grad():
            noise = (model(*self.inputs).double() - self.expected).square().sum() / self.expected.square().sum()
        return min(-10 * torch.log10(noise + 1e-30).item(), MOST_DB)


def greedy(pool: ReferencePool, metric: Decibels, floor: float, most: int) -> list[str]:
    """Selectors of the fewest of the worst operators in float with which the target is reached, or of all that were
    tried."""
    ranked = intaglio.compare(pool.captured, pool.base, pool.batches, samples=16, progress=False).skip_list(10**6)

    def reached(count: int) -> bool:
        try:
            return metric(leaving(pool, ranked[:count])) >= floor
        except UnsupportedError:  # nothing would be quantized
            impossible.add(count)
            return True

    failing, count, impossible = 0, 1, set[int]()
    while metric.calls < most and not reached(count):
        failing, count = count, min(2 * count, len(ranked))
        if failing == count:
            return ranked[:count]
    while count - failing > 1 and (metric.calls < most or count in impossible):
        middle = (failing + count) // 2
        failing, count = (failing, middle) if reached(middle) else (middle, count)
    return ranked[: failing if count in impossible else count]


def leaving(pool: ReferencePool, left: list[str]) -> Any:
    """The int8 model with operators left in float. New values are calibrated as in `search`."""
    return stages.compile(stages.requantize(pool.reference(pool.quantizer_leaving(left)) if left else pool.base))


def prepared(model: nn.Module, data: list, path: Path) -> ReferencePool:
    """The reference of the default recipe, whose parameters are kept in a file."""
    captured = stages.capture(model, data[0])
    if path.exists():
        recipe = intaglio.Recipe.load(path)
        reference = stages.convert(stages.prepare(captured), recipe.parameters)
    else:
        observed = stages.equalize(stages.prepare(captured), data)
        ranges = stages.calibrate(observed, data, progress=False)
        reference = stages.convert(observed, ranges, stages.correct(observed, ranges, data))
        intaglio.Recipe().with_parameters(reference.parameters).save(path)
    return ReferencePool(captured, stages.Quantizer(), reference, data)


def compared(name: str, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Figures of the int8 model, of greedy skipping and of the search; nothing with ``--prepare``."""
    model, shape = networks.build(name)
    torch.manual_seed(1)
    normalize(model, networks.inputs(shape, arguments.batch))
    data = [networks.inputs(shape, arguments.batch) for _ in range(arguments.batches)]
    metric = Decibels(model, networks.inputs(shape, arguments.batch))
    pool = prepared(model, data, arguments.folder / f"{name}.toml")
    base = leaving(pool, [])
    start = metric(base)
    floor = start + arguments.gain
    skipped = greedily(pool, metric, floor, arguments.evaluations, arguments.folder / f"{name}.greedy.json")
    journal = arguments.folder / f"{name}.jsonl"
    options = {"max_drop": MOST_DB - floor, "relative": False, "journal": journal, "progress": False}
    options["quantizer"] = stages.Quantizer(intaglio.Recipe().with_parameters(pool.base.parameters))
    if arguments.prepare:
        search_errors(model, data, metric, options, journal)
        return None
    metric.calls, begin = 0, time.perf_counter()
    budget = {"budget": arguments.minutes, "evaluations": arguments.evaluations}
    result = intaglio.search(model, data, metric, **options, **budget)
    cost = added(arguments.folder / f"{name}.cost.json", seconds=time.perf_counter() - begin, evaluations=metric.calls)
    if arguments.part:
        print(f"{name}: {cost}; reached: {result.reached}")
        return None
    searched = {**cost, "changes": dict(counted(result)), "trials": [trial(one) for one in result.trials]}
    models = {"int8": base, "greedy": leaving(pool, skipped["left"]), "search": result.model}
    found: dict[str, Any] = {"target_db": floor, "int8": {}, "greedy": skipped, "search": searched}
    for method, ms in timed(models, networks.inputs(shape, 1), arguments.seconds).items():
        found[method] |= {"ms": ms, "db": metric(models[method]), "int8_macs": models[method].coverage.macs}
    return found


def greedily(pool: ReferencePool, metric: Decibels, floor: float, most: int, path: Path) -> dict[str, Any]:
    """Return the operators that greedy skipping leaves in float. A file holds them after the first call."""
    if not path.exists():
        metric.calls = 1  # the int8 model is known
        left = greedy(pool, metric, floor, most)
        path.write_text(json.dumps({"left": left, "evaluations": metric.calls}), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def counted(result: Any) -> Counter:
    """Number of groups by the candidate that the search chose."""
    return Counter(result.chosen.assignment.values())


def added(path: Path, **figures: float) -> dict[str, float]:
    """Return figures of a search, with those of its earlier parts added, and keep them in a file."""
    if not figures["evaluations"]:  # the journal had everything
        figures["seconds"] = 0.0
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = {key: value + earlier.get(key, 0) for key, value in figures.items()}
    path.write_text(json.dumps(found), encoding="utf-8")
    return found


def trial(one: Any) -> dict[str, float]:
    """Return the figures of a trial."""
    return {"changed": len(one.assignment), "ms": one.latency_ms, "db": one.metric}


def search_errors(model: nn.Module, data: list, metric: Callable, options: dict, path: Path) -> None:
    """Run a search and keep of its journal only what does not depend on the speed of the machine."""
    intaglio.search(model, data, metric, **options, budget=60.0, evaluations=2)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line).get("kind") in (None, "error")]
    path.write_text("".join(kept), encoding="utf-8")


def timed(models: dict[str, Any], inputs: tuple[torch.Tensor, ...], seconds: float) -> dict[str, float]:
    """Return milliseconds of a call of each model: the least median of blocks of calls, which alternate."""
    best = dict.fromkeys(models, math.inf)
    with torch.no_grad():
        for _ in range(ROUNDS):
            for name, model in models.items():
                time.sleep(race.PAUSE)
                model(*inputs)
                best[name] = min(best[name], race.block(lambda model=model: model(*inputs), seconds / ROUNDS))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for recipes and journals")
    parser.add_argument("--networks", default="mobilenet_v3_large,efficientnet_b0,vit_b_16,minilm")
    parser.add_argument("--gain", type=float, default=6.0, help="decibels above the int8 model")
    parser.add_argument("--evaluations", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each search")
    parser.add_argument("--seconds", type=float, default=4.0, help="to time each model at the end")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--prepare", action="store_true", help="only quantize, skip greedily and measure errors")
    parser.add_argument("--part", action="store_true", help="only search")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    quiet, results = arguments.prepare or record.idle(), {}
    for name in arguments.networks.split(","):
        found = compared(name, arguments)
        if found is not None:
            results[name] = found
            print(name, json.dumps(found, indent=1))
    if results:
        results["idle"] = record.still_idle(quiet)
        record.append("search", arguments, results)


if __name__ == "__main__":
    main()
