"""The calibration loop: batches through the prepared model, statistics out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from intaglio import config
from intaglio.capture.captured import expect
from intaglio.errors import CalibrationError, InputError
from intaglio.quant.data import Binder, peek
from intaglio.quant.prepare import Prepared
from intaglio.quant.ranges import Ranges
from intaglio.quant.statistics import Statistics


def calibrate(prepared: Prepared, data: Any, *, samples: int | None = None, progress: bool | None = None) -> Ranges:
    """Statistics of every site over the data, which is read once.

    ``data``: an iterable of tensors, tuples, dictionaries or (inputs, label) pairs; a `DataLoader`; or a function that
    is called with the prepared model. ``samples`` stops after that many. Memory does not grow with the data. On an
    error the statistics are as they were before. Returns what was counted in this call.
    """
    expect(prepared, Prepared, "calibrate")
    before = {name: observer.statistics for name, observer in prepared.observers.items()}
    _reset(prepared, {name: Statistics() for name in before})
    try:
        if callable(data) and not isinstance(data, torch.Tensor) and not hasattr(data, "__iter__"):
            data(prepared)
            counts = (0, 0)
        else:
            counts = _loop(prepared, data, samples, config.show_progress() if progress is None else progress)
        ranges = Ranges({name: observer.statistics for name, observer in prepared.observers.items()}, *counts)
    except BaseException:
        _reset(prepared, before)
        raise
    _reset(prepared, {name: mine.merge(before[name]) for name, mine in ranges.statistics.items()})
    return ranges


def _reset(prepared: Prepared, statistics: dict[str, Statistics]) -> None:
    for name, observer in prepared.observers.items():
        observer.statistics = statistics[name]


def _loop(prepared: Prepared, data: Any, samples: int | None, progress: bool) -> tuple[int, int]:
    binder, seen, count = Binder.of(prepared.signature), 0, 0
    _, items = peek(data)
    for item in _bar(items, _length(data), progress):
        args, kwargs = binder(item)
        try:
            prepared(*args, **kwargs)
        except InputError as error:
            raise CalibrationError(f"batch {count}, {error.where}", None, error.problem, remedy=error.remedy) from error
        except CalibrationError as error:
            raise CalibrationError(
                f"batch {count}, {error.where}", error.operator, error.problem, remedy=error.remedy, source=error.source
            ) from None
        seen, count = seen + batch_size(args, kwargs), count + 1
        if samples is not None and seen >= samples:
            break
    if not seen:
        raise CalibrationError("data", None, f"{count} batches without a single sample")
    if samples is not None and seen < samples:
        warnings.warn(f"calibrated on {seen} samples in {count} batches; {samples} were asked for", stacklevel=3)
    return count, seen


def batch_size(args: tuple, kwargs: dict[str, Any]) -> int:
    """Samples in a call: the first axis of its first tensor that has axes."""
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.dim()]
    return tensors[0].shape[0] if tensors else 1


def _length(data: Any) -> int | None:
    try:
        return 1 if isinstance(data, torch.Tensor) else len(data)
    except TypeError:
        return None


def _bar(items: Iterator[Any], total: int | None, show: bool) -> Iterator[Any]:
    if not show:
        yield from items
        return
    from rich.console import Console  # only where a bar is drawn: it takes a tenth of a second to import
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("calibrating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield from bar.track(items, total=total)
