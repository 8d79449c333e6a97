"""The speed of a quantized model beside its float model, for reports."""

from __future__ import annotations

from typing import Any

from torch import nn

from intaglio.errors import IntaglioError
from intaglio.progress import report_progress
from intaglio.quant.calibrate.batches import Call, first_call
from intaglio.reporting.timing.measure_speed import measure_speed
from intaglio.runtime import QuantizedModel
from intaglio.runtime.reports.speed import MeasuredSpeed
from intaglio.tune import random_sample
from intaglio.tune.schedule_search import unflatten_call


def timed_call(float_model: nn.Module, model: Any, data: Any) -> tuple[Call | None, Any]:
    """Return the arguments of the call to time, and data that still starts with it.

    Args:
        float_model: the float model.
        model: its quantized form.
        data: an iterable of batches, or ``None`` for random numbers.

    Returns:
        The first batch as a call. ``None`` in its place without data, if random numbers make no sense.
    """
    if data is not None:
        return first_call(float_model, data, None)
    if not isinstance(model, QuantizedModel):
        return None, None
    try:
        args, kwargs = unflatten_call(model.signature, random_sample(model.signature))
    except IntaglioError:
        return None, None
    return (args, dict(kwargs)), None


def speed_beside_float(
    float_model: nn.Module, model: Any, call: Call | None, most_calls: int
) -> tuple[MeasuredSpeed | None, str]:
    """Time both models in alternation, and return the times, or why there are none.

    Args:
        float_model: the float model.
        model: its quantized form.
        call: arguments of the call, if they are known.
        most_calls: largest number of calls in a block.
    """
    if call is None:
        return None, "the float model was not timed: that needs data"
    report_progress("measure")
    try:
        return measure_speed(float_model, model, call, most_calls=most_calls), ""
    except IntaglioError as error:
        return None, f"the float model was not timed: {error.problem.splitlines()[0]}"
