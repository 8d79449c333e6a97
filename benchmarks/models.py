"""Races of several networks, batches and numbers of threads, one after the other, and their tables.

    python benchmarks/models.py --batches 1,16 --threads 1,2
    python benchmarks/models.py --networks resnet50,mobilenet_v2 --engines openvino_int8,intaglio --resume
    python benchmarks/models.py --table                    the tables again, from results/models.jsonl

Each cell (network, batch, threads) is one race as `race.py` runs it: engines in processes of their own that take turns.
It is one line in results/models.jsonl; results/models.md has a table for each batch and number of threads, of the last
line of every cell. --resume leaves out cells that have a line of this commit with all engines asked for.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import networks
import race
import record

NETWORKS = (
    "resnet18",
    "resnet50",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "efficientnet_b0",
    "shufflenet_v2_x1_0",
    "regnet_y_400mf",
    "squeezenet1_1",
    "googlenet",
    "densenet121",
    "resnext50_32x4d",
    "convnext_tiny",
    "vgg11_bn",
)
ENGINES = ("onnxruntime_int8", "openvino_int8", "torchao", "intaglio")
TITLES = {"onnxruntime_int8": "ONNX Runtime int8", "openvino_int8": "OpenVINO int8", "torchao": "torchao int8"}
CELL = ("network", "batch", "threads", "image")
"""Arguments that make a cell."""
LINES, TABLES = (record.FOLDER / "results" / f"models.{kind}" for kind in ("jsonl", "md"))


def cells(arguments: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """Arguments of a race for every network, batch and number of threads; small batches first."""
    for batch, threads, network in itertools.product(arguments.batches, arguments.threads, arguments.networks):
        own = {key: value for key, value in vars(arguments).items() if key not in ("networks", "batches", "threads")}
        yield argparse.Namespace(**{**own, "network": network, "batch": batch, "threads": threads})


def known() -> list[dict[str, Any]]:
    """Lines of results, oldest first."""
    return [json.loads(line) for line in LINES.read_text(encoding="utf-8").splitlines()] if LINES.is_file() else []


def cell_of(line: dict[str, Any]) -> tuple:
    return tuple(line["arguments"][key] for key in CELL)


def is_done(cell: argparse.Namespace, commit: str) -> bool:
    """Whether a line of this commit, whose source had no changes, has every engine of the cell."""
    here = tuple(getattr(cell, key) for key in CELL)
    lines = [line for line in known() if line["commit"] == commit and cell_of(line) == here]
    wanted = set(cell.engines.split(","))
    return not commit.endswith("+") and any(wanted <= line["results"]["engines"].keys() for line in lines)


@cache
def macs(network: str, image: int, data: Path | None) -> int:
    return networks.count_macs(*networks.build(network, data, image))


def measure(cell: argparse.Namespace) -> dict[str, Any]:
    """The results of one race; per engine best, median and spread (largest less smallest block, in median blocks)."""
    found = race.measure(cell, macs(cell.network, cell.image, cell.data))
    return {**found, "engines": {engine: summary(one) for engine, one in found["engines"].items()}}


def summary(found: dict[str, Any]) -> dict[str, Any]:
    if "failed" in found:
        return found
    blocks = found["blocks_ms"]
    middle = statistics.median(blocks)
    return {**found, "best_ms": min(blocks), "median_ms": middle, "spread": (max(blocks) - min(blocks)) / middle}


def tables(lines: list[dict[str, Any]]) -> str:
    """Markdown: a table for each batch and number of threads, best times in ms, the first in bold."""
    last = {cell_of(line): line for line in lines}
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for line in last.values():
        groups.setdefault((line["arguments"]["batch"], line["arguments"]["threads"]), []).append(line)
    return "\n".join(table(*group, groups[group]) for group in sorted(groups))


def table(batch: int, threads: int, lines: list[dict[str, Any]]) -> str:
    """Networks in the order they were measured."""
    ran = {engine for line in lines for engine in line["results"]["engines"]}
    engines = ["intaglio", *[engine for engine in race.ENGINES if engine in ran - {"intaglio"}]]
    titles = ["network", "limit", "intaglio", "of the limit", *[TITLES.get(engine, engine) for engine in engines[1:]]]
    rows = [titles, ["---"] * len(titles), *(row(line, engines) for line in lines)]
    body = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    return f"Batch {batch}, {threads} thread{'s' * (threads != 1)}, best in ms\n\n{body}\n"


def row(line: dict[str, Any], engines: list[str]) -> list[str]:
    """Cells of a network. A run that others disturbed has a star and no bold figure."""
    results, given = line["results"], line["arguments"]
    best = {engine: one["best_ms"] for engine, one in results["engines"].items() if "best_ms" in one}
    first = min(best, key=best.__getitem__, default=None) if results["idle"] or given["anyway"] else None
    times = {engine: f"**{digits(ms)}**" if engine == first else digits(ms) for engine, ms in best.items()}
    for engine in results["engines"].keys() - best.keys():
        times[engine] = "failed"
    limit = results["limit_ms"]
    share = f"{100 * limit / best['intaglio']:.0f} %" if limit and "intaglio" in best else ""
    size = "" if given["image"] == 224 or given["network"].startswith("cifar") else f", {given['image']} pixels"
    name = given["network"] + size + " *" * (not results["idle"])
    listed = [times.get(engine, "") for engine in engines]
    return [name, digits(limit) if limit else "", listed[0], share, *listed[1:]]


def digits(ms: float) -> str:
    """Four that count."""
    return f"{ms:.4g}" if ms < 1000 else f"{ms:.0f}"


def names(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=names, default=list(NETWORKS))
    parser.add_argument("--batches", type=numbers, default=[1, 16])
    parser.add_argument("--threads", type=numbers, default=sorted({1, os.cpu_count()}))
    parser.add_argument("--resume", action="store_true", help="leave out what this commit has been measured on")
    parser.add_argument("--table", action="store_true", help="measure nothing, write the tables again")
    race.add_options(parser, engines=",".join(ENGINES), rounds=4, seconds=1.0)
    arguments = parser.parse_args()
    commit = record.commit()
    for cell in () if arguments.table else cells(arguments):
        if arguments.resume and is_done(cell, commit):
            continue
        results = measure(cell)
        record.append("models", cell, results)
        race.report(cell, results["engines"], results["limit_ms"], ranked=results["idle"] or cell.anyway)
    text = tables(known())
    TABLES.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
