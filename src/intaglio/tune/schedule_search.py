"""Timed search over kernel schedules, which ``tune=True`` requests."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from intaglio import build
from intaglio.errors import InputError
from intaglio.ir import Dim, Schedule, Signature, evaluate, symbol, symbols_of
from intaglio.kernels import ISAS
from intaglio.lower import Lowered
from intaglio.native import cpu as machine
from intaglio.plan import (
    CacheSizes,
    Geometry,
    Target,
    analytic_schedules,
    geometries,
    order_candidates,
    plan_graph,
    tile_candidates,
)
from intaglio.runtime import QuantizedModel
from intaglio.signature import TORCH_DTYPES, dims_of
from intaglio.torch_private import pytree
from intaglio.tune.schedule_cache import ScheduleCache

ROUNDS = range(4, 101)
"""Rounds of a race, in each of which every program runs once: at least the first number, then until `SEARCH_SECONDS`
are over or the last number is reached."""
SEARCH_SECONDS = 3.0
MARGIN = 0.98
"""A schedule replaces the analytic one only if its layers take less than this fraction of the time."""

logger = logging.getLogger("intaglio")

Tensors = Sequence[torch.Tensor]
EvenOddTimes = tuple[float, float]
"""Least microseconds in even rounds and in odd rounds. Their difference indicates the noise."""
Times = dict[tuple[Geometry, Schedule], EvenOddTimes]


@dataclass(frozen=True)
class _Task:
    """Data that all programs of a search share.

    Attributes:
        lowered: the integer graph.
        isa: the instruction set.
        layers: geometry of every layer by output value.
        settled: schedules already known.
        call: arguments of the call to time.
    """

    lowered: Lowered
    isa: str
    layers: Mapping[str, Geometry]
    known_schedules: Mapping[Geometry, Schedule]
    call: tuple[tuple[Any, ...], Mapping[str, Any]]


def search(lowered: Lowered, isa: str, inputs: Tensors) -> dict[str, Schedule]:
    """Return the schedules, by output value, of layers for which another schedule than the analytic one is faster.

    Tiles are tried first, then the division of work with the best tile. Finally the best schedule races against the
    analytic one alone, because the minimum of several noisy times is biased. A candidate is used in all layers at once
    and the program's own clock measures each layer, so a race needs only a few programs, independently of the number of
    layers. Results are stored on disk, and layers found there are not timed again.

    Args:
        lowered: the integer graph.
        isa: the instruction set.
        inputs: tensors of the call to time.
    """
    symbols = dims_of(lowered.signature, list(inputs), lowered.graph.byte_inputs())
    planned, table, threads = plan_graph(lowered.graph), ISAS[isa], torch.get_num_threads()
    caches = CacheSizes(*machine.caches()[:2])
    layers, analytic = geometries(planned, symbols), analytic_schedules(planned, Target.of(table, caches))
    start = {layer: analytic[value] for value, layer in layers.items()}
    schedule_cache = ScheduleCache(isa, threads)
    known = {layer: schedule for layer in start if (schedule := schedule_cache.load(layer)) is not None}
    new = [layer for layer in start if layer not in known]
    if new:
        began = time.perf_counter()
        task = _Task(lowered, isa, layers, known, unflatten_call(lowered.signature, inputs))
        found = {layer: start[layer] for layer in new}
        races: tuple[Callable[[Geometry, Schedule], Sequence[Schedule]], ...] = (
            lambda layer, best: tile_candidates(best, layer, table),
            lambda layer, best: (best, *order_candidates(best, layer, caches, threads)),
            lambda layer, best: (best,),
        )
        for tried in races:
            candidates = {layer: list(dict.fromkeys([start[layer], *tried(layer, found[layer])])) for layer in new}
            found = fastest(candidates, _race(task, candidates))
        schedule_cache.store(found)
        known |= found
        changed = sum(found[layer] != start[layer] for layer in new)
        took = time.perf_counter() - began
        logger.info(
            "schedule search: another schedule is faster for %d of %d kinds of layers (%.1f s)", changed, len(new), took
        )
    return {value: known[layer] for value, layer in layers.items() if known[layer] != start[layer]}


def fastest(candidates: Mapping[Geometry, Sequence[Schedule]], times: Times) -> dict[Geometry, Schedule]:
    """Return the schedule of every layer: the fastest of those that beat the first candidate by more than noise and
    margin, or else the first candidate."""
    found = {}
    for layer, options in candidates.items():
        limit = MARGIN * min(times[layer, options[0]])
        faster = [schedule for schedule in options if max(times[layer, schedule]) < limit]
        found[layer] = min(faster, key=lambda schedule: sum(times[layer, schedule]), default=options[0])
    return found


def _race(task: _Task, candidates: Mapping[Geometry, Sequence[Schedule]]) -> Times:
    """Return the microseconds of all layers of a geometry with each of its candidates.

    Program i uses candidate i of every layer, or the first one if there are fewer. Programs are compiled in parallel.
    """
    count = max(map(len, candidates.values()))
    if count == 1:
        return {(layer, options[0]): (0.0, 0.0) for layer, options in candidates.items()}
    variants = []
    for index in range(count):
        taken = {layer: options[index if index < len(options) else 0] for layer, options in candidates.items()}
        taken |= task.known_schedules
        variants.append({value: taken[layer] for value, layer in task.layers.items()})
    with ThreadPoolExecutor(min(count, os.cpu_count() or 1)) as pool:
        programs = list(pool.map(lambda one: build.compile(task.lowered, isa=task.isa, schedules=one), variants))
    times: Times = {}
    for variant, spent in zip(variants, best_times(programs, task.call), strict=True):
        sums: Times = {}
        for value, layer in task.layers.items():
            (even, odd), (more_even, more_odd) = sums.get((layer, variant[value]), (0.0, 0.0)), spent[value]
            sums[layer, variant[value]] = even + more_even, odd + more_odd
        for key, (even, odd) in sums.items():
            least_even, least_odd = times.get(key, (even, odd))
            times[key] = min(even, least_even), min(odd, least_odd)
    return times


def best_times(
    programs: Sequence[QuantizedModel], call: tuple[tuple[Any, ...], Mapping[str, Any]]
) -> list[dict[str, EvenOddTimes]]:
    """Return for each program the least microseconds of every step in even and in odd rounds, by output value.

    The programs alternate, so that a slow moment of the machine affects all of them.
    """
    args, kwargs = call
    values = [step.partition.ops[-1].outputs[0] for step in plan_graph(programs[0].graph).steps]
    best = [{value: [math.inf, math.inf] for value in values} for _ in programs]
    end = time.perf_counter() + SEARCH_SECONDS
    for round_index in range(ROUNDS.stop - 1):
        if round_index >= ROUNDS.start and time.perf_counter() > end:
            break
        for program, least in zip(programs, best, strict=True):
            for value, nanoseconds in zip(values, program.step_times(*args, **kwargs), strict=True):
                least[value][round_index % 2] = min(nanoseconds / 1e3, least[value][round_index % 2])
    return [{value: (even, odd) for value, (even, odd) in least.items()} for least in best]


# ---- what is timed --------------------------------------------------------------------------------------------------


def first_sample(signature: Signature, tensors: Tensors, byte_inputs: Collection[int]) -> list[torch.Tensor]:
    """Return the first sample of a batch."""
    return leading_samples(signature, tensors, byte_inputs, 1)


def leading_samples(
    signature: Signature, tensors: Tensors, byte_inputs: Collection[int], count: int
) -> list[torch.Tensor]:
    """Return the first ``count`` samples of a batch, or all of them if there are fewer."""
    sizes = dims_of(signature, list(tensors), byte_inputs)
    sizes |= {name: min(count, sizes.get(name, count)) for name in _batch(signature)}
    return [
        tensor[tuple(slice(evaluate(dim, sizes)) for dim in entry.type.shape)]
        for entry, tensor in zip(signature.inputs, tensors, strict=True)
    ]


def random_sample(signature: Signature) -> list[torch.Tensor]:
    """Return random tensors for a batch of one: floats between 0 and 1, other types 0. Raise `InputError` if more than
    the batch is dynamic."""
    batch = _batch(signature)
    free = sorted({name for entry in signature.inputs for dim in entry.type.shape for name in symbols_of(dim)} - batch)
    if free:
        raise InputError(
            "tune",
            None,
            f"the sizes {', '.join(free)} are dynamic, and tuning needs to know which values to measure with",
            remedy="pass the arguments of a typical call instead of True: tune=(x,)",
        )
    draw, sizes = torch.Generator().manual_seed(0), dict.fromkeys(batch, 1)
    tensors = []
    for entry in signature.inputs:
        kind, shape = TORCH_DTYPES[entry.type.dtype], [evaluate(dim, sizes) for dim in entry.type.shape]
        floats = torch.rand(shape, generator=draw)
        tensors.append(floats.to(kind) if kind.is_floating_point else torch.zeros(shape, dtype=kind))
    return tensors


def _batch(signature: Signature) -> set[str]:
    """Return the dynamic dimensions that are the first axis of an input."""
    first: list[Dim] = [entry.type.shape[0] for entry in signature.inputs if entry.type.shape]
    return {name for dim in first for name in symbols_of(dim) if dim == symbol(name)}


def unflatten_call(signature: Signature, tensors: Tensors) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the positional and keyword arguments whose leaves are these tensors."""
    leaves: list[Any] = [None] * signature.in_tree.num_leaves
    for leaf, value in signature.fixed.items():
        leaves[leaf] = value
    for entry, tensor in zip(signature.inputs, tensors, strict=True):
        leaves[entry.leaf] = tensor
    args, kwargs = pytree.tree_unflatten(leaves, signature.in_tree)
    return args, kwargs
