"""The calibration loop, which runs batches through the prepared model and returns statistics."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from intaglio.argument_checks import check_arguments_except
from intaglio.errors import CalibrationError, InputError, did_you_mean
from intaglio.ir import Signature
from intaglio.progress import progress_shown, track
from intaglio.quant.calibrate.batches import Binder, batches, is_function, length_of, log_about_data, peek
from intaglio.quant.calibrate.custom_observer import activation_edges
from intaglio.quant.calibrate.data_checks import check_data
from intaglio.quant.calibrate.distributed import Group, merge_statistics
from intaglio.quant.calibrate.kept_memory import kept_memory
from intaglio.quant.calibrate.observer import observed_part
from intaglio.quant.calibrate.prepare import Prepared
from intaglio.quant.calibrate.ranges import Ranges, SeenBatch
from intaglio.quant.calibrate.tensor_statistics import Statistics
from intaglio.quant.qdq.qparams import activation_ranges
from intaglio.signature import bind, clone_tensors, dims_of
from intaglio.torch_private import pytree
from intaglio.tracing.captured import expect

logger = logging.getLogger("intaglio.lint")


class NonFinite(StrEnum):
    """Treatment of NaN and infinite values in calibration."""

    ERROR = "error"
    IGNORE = "ignore"


@check_arguments_except("prepared")
@kept_memory()
def calibrate(
    prepared: Prepared,
    data: Any,
    *,
    samples: int | None = None,
    progress: bool | None = None,
    nonfinite: str = NonFinite.ERROR.value,
    first_batch: int | None = None,
    group: Group | None = None,
) -> Ranges:
    """Run the data through a prepared model once and return the statistics of every site.

    If it fails, the observers keep their earlier statistics. Memory does not grow with the data, except for a few
    numbers for each batch.

    Args:
        prepared: the model with observers.
        data: an iterable of tensors, tuples, dictionaries or (inputs, label) pairs; a `DataLoader`; or a function that
            is called with the prepared model.
        samples: number of samples after which to stop.
        progress: whether to show a progress bar; by default as configured.
        nonfinite: "error" to raise for NaN and infinite values, "ignore" to leave them out.
        first_batch: index of the first batch; by default that after the batches the model has seen.
        group: the processes of torch.distributed by default, if it is initialized. Every rank calls this function with
            its own batches, and all get the statistics of all batches, bit for bit those of one process.

    Returns:
        The statistics of this call only, with the findings of the data checks, which are also logged.
    """
    expect(prepared, Prepared, "calibrate")
    if nonfinite not in tuple(NonFinite):
        problem = f"{nonfinite!r}; allowed are {tuple(map(str, NonFinite))}"
        raise CalibrationError("nonfinite", None, problem, remedy=did_you_mean(nonfinite, NonFinite))
    group, observer_state = group or Group.current(), prepared.observer_state
    before, earlier = (
        {name: observer.statistics for name, observer in prepared.observers.items()},
        replace(observer_state),
    )
    first = earlier.batch if first_batch is None else first_batch
    observer_state.batch = first + group.rank
    observer_state.stride, observer_state.ignore = group.size, nonfinite == NonFinite.IGNORE
    _reset(prepared, {name: Statistics() for name in before})
    try:
        group.agree(prepared.observers, "sites")
        with progress_shown(False if group.rank else progress):
            seen = group.run_on_all_ranks(lambda: _run(prepared, data, samples, group))
        ranges = _gathered(prepared, seen, group)
        if not ranges.samples and not is_function(data):
            raise without_samples(ranges.batches)
        ended = max(first, *group.gather(observer_state.batch - group.size + 1))
    except BaseException:
        _reset(prepared, before)
        observer_state.batch = earlier.batch
        raise
    finally:
        observer_state.stride, observer_state.ignore = earlier.stride, earlier.ignore
    observer_state.batch = ended
    _reset(prepared, {name: mine.merge(before[name]) for name, mine in ranges.statistics.items()})
    if samples is not None and 0 < ranges.samples < samples and group.rank == 0:
        text = (
            f"calibrated on {ranges.samples} samples in {ranges.batches} batches, which is all data; samples={samples} "
            "asks for more"
        )
        warnings.warn(text, stacklevel=3)
    for finding in ranges.findings if group.rank == 0 else ():
        log_about_data(logger, logging.WARNING, str(finding))
    return ranges


def without_samples(batches: int) -> CalibrationError:
    """Return the error for data whose batches are all empty."""
    problem = f"{batches} batch{'es' * (batches != 1)} without a single sample"
    return CalibrationError("data", None, problem, remedy="give batches whose first axis is not empty")


def _reset(prepared: Prepared, statistics: dict[str, Statistics]) -> None:
    for name, observer in prepared.observers.items():
        observer.statistics = statistics[name]


def _gathered(prepared: Prepared, seen: dict[int, SeenBatch], group: Group) -> Ranges:
    """Return the ranges over the batches of all ranks, after a check that all ranks would choose the same ranges."""
    statistics = {name: observer.statistics for name, observer in prepared.observers.items()}
    if group.size > 1:
        merged = merge_statistics(group, statistics)
        statistics = {name: merged[name] for name in statistics}
        for others in group.gather(seen):
            seen = {**seen, **others}
    count = sum(one.samples for one in seen.values())
    observer_qparams = {
        name: q for name, observer in prepared.observers.items() if (q := observer.custom_qparams()) is not None
    }
    unmergeable = [
        *observer_qparams,
        *(value for value, _ in activation_edges(prepared.annotations.module, prepared.annotations.custom_observers)),
    ]
    if unmergeable and group.size > 1:
        raise CalibrationError(
            "ranges",
            None,
            f"the results of custom observers ({', '.join(unmergeable)}) cannot be merged over {group.size} ranks",
            remedy="calibrate in one process",
        )
    ranges = Ranges(
        statistics,
        len(seen),
        count,
        prepared.fingerprint,
        dict(sorted(seen.items())),
        parameters=observer_qparams or None,
    )
    if group.size > 1:
        chosen = activation_ranges(prepared, {name: s for name, s in statistics.items() if s.finite})
        group.agree([ranges.to_json(), *(f"{name}: {ends}" for name, ends in chosen.items())], "ranges")
    return replace(ranges, findings=check_data(prepared, ranges))


def _run(prepared: Prepared, data: Any, samples: int | None, group: Group) -> dict[int, SeenBatch]:
    """Run this rank's batches and return them by index."""
    if is_function(data):
        data(prepared)
        return {}
    _warn_of_repeats(data)
    binder, seen, observer_state = Binder.of(prepared.signature), dict[int, SeenBatch](), prepared.observer_state
    first, count, size = observer_state.batch - group.rank, 0, 0
    run = _run_of_a_batch(prepared)
    items = batches(data) if group.size > 1 else peek(data)[1]  # A single process must have a batch.
    for item in track(items, "calibrate", length_of(data)):
        args, kwargs = binder(item)
        index = observer_state.batch
        if samples is not None and group.size > 1 and (index - first) * size >= samples:
            break
        try:
            found = _summary_of_inputs(prepared.signature, args, kwargs)
            if prepared.signature.updated_inputs:
                args, kwargs = clone_tensors((args, kwargs))
            run(*args, **kwargs)
        except InputError as error:
            where = f"batch {index - first}, {error.where}"
            raise CalibrationError(where, None, error.problem, remedy=error.remedy) from error
        except CalibrationError as error:
            where = f"batch {index - first}, {error.where}"
            raise type(error)(where, error.operator, error.problem, remedy=error.remedy, source=error.source) from None
        seen[index], size = found, size or found.samples
        count += found.samples
        if samples is not None and group.size == 1 and count >= samples:
            break
    return seen


def _run_of_a_batch(prepared: Prepared) -> Callable[..., Any]:
    """Return a function that lets the observers count a batch; it computes results only if a later batch needs them."""
    is_read = prepared.bodies or prepared.signature.state or prepared.signature.updated_inputs
    part = None if is_read else observed_part(prepared.module)
    return prepared if part is None else partial(prepared.observe, part)


def _summary_of_inputs(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SeenBatch:
    """Check the inputs of a call and return a summary of them."""
    digest, inputs, leaves = hashlib.blake2b(digest_size=8), {}, bind(signature, args, kwargs)
    dims_of(signature, leaves)
    for entry, tensor in zip(signature.inputs, leaves, strict=True):
        plain = tensor.detach().resolve_neg().contiguous().reshape(-1)
        digest.update(plain.view(torch.uint8).numpy().data)
        finite = plain[torch.isfinite(plain)] if plain.is_floating_point() else plain[:0]
        if finite.numel():
            low, high = finite.aminmax()
            inputs[entry.name] = (low.item(), high.item())
    return SeenBatch(batch_size(args, kwargs), int.from_bytes(digest.digest(), "big"), inputs)


def batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the samples in a call: the size of the first axis of its first tensor that has axes."""
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    return tensors[0].size(0) if tensors else 1  # a nested tensor has no shape


def _warn_of_repeats(data: Any) -> None:
    """Warn if a `DistributedSampler` repeats samples."""
    sampler = data.sampler if isinstance(data, DataLoader) else None
    repeated = sampler.total_size - len(data.dataset) if isinstance(sampler, DistributedSampler) else 0
    if repeated > 0:
        warnings.warn(
            f"DistributedSampler repeats {repeated} samples so that all ranks get equally many, and they count twice; "
            "intaglio.calibration.share(loader) gives every rank whole batches without repetition",
            stacklevel=6,
        )
