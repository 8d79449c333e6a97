"""Several threads call several models for a long time; memory, descriptors and threads stay as they are.

    python -m fuzz.soak --seconds 600 --made 10000         (make soak)

Eight threads call four models with changing shapes and compare every result with that of the integer graph. In the
middle, children are forked and spawned that call the models, too. Then models are made and dropped, whose programs are
in the kernel cache. Memory is read from /proc before and after.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import intaglio
from fuzz import originals
from intaglio.runtime import QuantizedModel

NETWORKS = ("nested", "chains", "recommender", "attention")
LARGEST_BATCH = 9
WARM_UP = 0.1
"""Share of the time after which memory is read first."""
LARGEST_GROWTH = 24 << 20
"""Bytes by which resident memory may differ: the allocator's arenas of threads, and pages that are touched late."""


class Held(NamedTuple):
    """Resident bytes, descriptors, threads and mapped shared objects of a process."""

    bytes: int
    descriptors: int
    threads: int
    libraries: int


class Task(NamedTuple):
    """A model with calls of changing shapes and the results that they must have."""

    model: QuantizedModel
    calls: Sequence[tuple[tuple[Any, ...], Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--made", type=int, default=10_000, help="models to make and drop")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        wrong = soak(Path(folder), arguments.threads, arguments.seconds, arguments.made)
    print("\n".join(wrong) or "memory is flat, and all results are right")
    sys.exit(bool(wrong))


def soak(folder: Path, threads: int, seconds: float, made: int, networks: Sequence[str] = NETWORKS) -> list[str]:
    """Run calls, processes and makes, print what they held, and return what is wrong."""
    tasks, wrong = [task_of(folder, name) for name in networks], list[str]()
    counts, stop = [0] * threads, threading.Event()

    def work(index: int) -> None:
        draw = random.Random(index)
        try:
            while not stop.is_set():
                call_once(draw.choice(tasks), draw)
                counts[index] += 1
        except BaseException as error:
            wrong.append(f"thread {index}: {type(error).__name__}: {error}")

    wrong += children(tasks, folder, networks[0], spawn=True)  # multiprocessing keeps some descriptors after the first
    workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    time.sleep(seconds * WARM_UP)
    before, processes, end = held(), 0, time.monotonic() + seconds * (1 - WARM_UP)
    while time.monotonic() < end and not wrong:
        time.sleep(min(seconds / 20, 10))
        wrong += children(tasks, folder, networks[0], spawn=processes % 8 == 0)
        processes += 1 + (processes % 8 == 0)
    stop.set()
    for worker in workers:
        worker.join()
    gc.collect()
    print(f"{sum(counts):,} calls by {threads} threads of {len(tasks)} models, {processes} processes in the middle")
    wrong += grown("calls", before, held(), threads_ended=threads)
    return wrong + makes(folder / networks[0], made)


# ---- calls ------------------------------------------------------------------------------------------------------


def task_of(folder: Path, name: str) -> Task:
    """Return a model, saved in the folder, with calls of several batches."""
    case = originals.MODELS[name]
    model = originals.compiled(case, None)
    model.save(folder / name)
    torch.manual_seed(0)
    calls = [case.inputs(batch) for batch in range(1, LARGEST_BATCH)]
    return Task(model, [(call, model(*call)) for call in calls])


def call_once(task: Task, draw: random.Random) -> None:
    """Call a model with one of its shapes, and sometimes with a slice of a batch. Raise if a bit differs."""
    call, expected = draw.choice(task.calls)
    if not originals.same(task.model(*call), expected):
        raise AssertionError(f"{task.model.model_info.name}: another result")


def children(tasks: Sequence[Task], folder: Path, name: str, spawn: bool) -> list[str]:
    """Fork a process that calls all models, and perhaps spawn one that loads and calls one. Return what failed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for task in tasks:
                for _ in range(3):
                    call_once(task, random.Random(0))
            status = 0
        finally:
            os._exit(status)
    wrong = []
    if (status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) != 0:
        wrong.append(f"a forked process ends with {status}")
    if spawn:
        task = tasks[0]
        process = multiprocessing.get_context("spawn").Process(
            target=load_and_compare, args=(folder / name, task.calls[0])
        )
        process.start()
        process.join()
        if process.exitcode != 0:
            wrong.append(f"a spawned process ends with {process.exitcode}")
    return wrong


def load_and_compare(path: Path, call: tuple[tuple[Any, ...], Any]) -> None:
    """Load a model in another process and compare its result."""
    assert originals.same(intaglio.load(path)(*call[0]), call[1])


# ---- making and dropping ----------------------------------------------------------------------------------------


def makes(path: Path, count: int) -> list[str]:
    """Make and drop models: load, call, save, copy. Return what grew."""
    case = originals.MODELS[path.name]
    torch.manual_seed(0)
    call = case.inputs(2)
    expected = intaglio.load(path)(*call)
    before = held()
    for number in range(count):
        if number == count // 10:
            before = held()
        model = intaglio.load(path)
        if not originals.same(model(*call), expected):
            return [f"model {number} gives another result"]
    gc.collect()
    print(f"{count:,} models made and dropped")
    return grown("models", before, held())


# ---- what is held -----------------------------------------------------------------------------------------------


def held() -> Held:
    """Return what this process holds."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    with open("/proc/self/maps") as file:
        libraries = {line.split()[-1] for line in file if ".so" in line}
    counted = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(libraries)
    return Held(pages * os.sysconf("SC_PAGE_SIZE"), *counted)


def grown(what: str, before: Held, after: Held, threads_ended: int = 0) -> list[str]:
    """Print two states, and return what is larger in the second one than it may be."""
    for name in Held._fields:
        print(f"  {what}: {name} {getattr(before, name):,} -> {getattr(after, name):,}")
    wrong = [
        f"{what}: {name} grew" for name in ("descriptors", "libraries") if getattr(after, name) > getattr(before, name)
    ]
    if after.threads > before.threads - threads_ended:
        wrong.append(f"{what}: threads grew")
    return wrong + [f"{what}: memory grew"] * (after.bytes > before.bytes + LARGEST_GROWTH)


if __name__ == "__main__":
    main()
