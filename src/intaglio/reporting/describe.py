"""Sentences about an operator with a label each, for explanations and pages."""

from __future__ import annotations

from collections.abc import Iterator

from intaglio.lower.facts.operator_facts import IMPORTED, Precision, SiteFacts
from intaglio.quant.precision.two_bytes import ADDS_BYTES
from intaglio.reporting.number_formats import decibels, macs_text, microseconds, number, percent
from intaglio.reporting.report_data import GraphReport, OperatorReport

Lines = Iterator[tuple[str, str]]

METHOD_MEANINGS = {
    "minmax": "the smallest and largest value",
    "mse": "the range with the least squared error",
    "kl": "the range that changes the distribution least",
    "percentile": "the range without the largest and smallest values",
    "average": "the mean of the extrema of samples",
    "ema": "a moving average of the extrema of batches",
    "absmax": "the largest magnitude of each channel",
}
"""Meanings of the range methods, by name."""
ROUNDING_MEANINGS = {
    "nearest": "to the nearest quantized value",
    IMPORTED: "not by intaglio: the integers are those of the imported checkpoint",
    "gptq": "by GPTQ, so that the result of the operator changes least on calibration data",
    "qronos": "by Qronos, so that the result of the operator is closest to that in the float model on calibration data",
    "adaround": "by AdaRound, so that the result of the operator changes least on calibration data",
}
"""Meanings of the rounding methods of weights, by name."""


def describe(graph: GraphReport, one: OperatorReport) -> Lines:
    """Yield what is known about an operator."""
    yield from place_lines(one)
    yield from precision_lines(graph, one)
    yield from site_lines(graph, one)
    yield from weight_lines(one)
    yield from error_lines(one)
    yield from time_lines(graph, one)


def place_lines(one: OperatorReport) -> Lines:
    """Yield what the operator is in the float model."""
    facts = one.facts
    yield "Module", facts.path or "the model itself"
    yield "Operator", facts.operator + (f", {facts.detail}" if facts.detail else "")
    if facts.source:
        yield "Source", facts.source
    yield "Result", facts.type
    if facts.folded:
        yield "Folded into it", ", ".join(facts.folded)


def precision_lines(graph: GraphReport, one: OperatorReport) -> Lines:
    """Yield in which type the operator runs and why, and what it is fused with."""
    facts = one.facts
    in_bytes = facts.reason == ADDS_BYTES
    match facts.precision:
        case Precision.FLOAT32 if in_bytes:
            yield "Runs", "in two bytes: as int8 layers for each byte of its operand and its weight, added in float32"
        case Precision.INPUT:
            yield "Runs", "an input of the model"
        case Precision.INT8:
            how = (
                "its activations are quantized while the model runs" if facts.dynamic else "with scales that are fixed"
            )
            yield "Runs", f"in int8, {how}: the recipe quantizes it, and a kernel computes it on integers"
        case Precision.FLOAT32:
            yield "Runs", "in float32, in the compiled program"
        case Precision.PYTORCH:
            yield "Runs", "in float32, in PyTorch: the program is interrupted for it"
    if facts.reason and not in_bytes:
        yield "Why not int8", facts.reason
    if facts.entries:
        yield "Recipe", f"the entries {', '.join(facts.entries)} apply, the last one first"
    if one.fused:
        yield "Same kernel", "; ".join(one.fused)
    if one.is_view:
        yield "Memory", "its result shares the memory of its input, so it takes no time"
    steps = graph.steps_of(one)
    if steps:
        yield "Kernel", "; ".join(step.kernel or "PyTorch" for step in steps)
    if facts.selector and facts.precision == Precision.INT8:
        yield "To leave it in float", f"skip={facts.selector!r}"


def site_lines(graph: GraphReport, one: OperatorReport) -> Lines:
    """Yield where the scale of the result comes from."""
    site = one.site
    if site is None:
        if one.facts.precision == Precision.INT8 and one.counted_with == "" and one.fused:
            yield "Result rounded", "only behind the operators of its kernel"
        elif one.facts.precision == Precision.INT8:
            yield "Result rounded", "no: it is returned in float32, from the accumulator"
        return
    yield "Quantized as", f"{site.datatype}, {site.qmin} to {site.qmax}"
    if site.scales == 1 and site.scale:
        yield "Scale", f"{site.scale[0]:.6g}, zero point {site.zero_point}"
    elif site.scales:
        yield "Scale", f"{site.scales} scales, {site.scale[0]:.4g} to {site.scale[1]:.4g}"
    if (ends := site.range) is not None:
        yield "Range", f"{number(ends[0])} to {number(ends[1])}"
    yield "From", origin_of_scale(graph, site)
    if site.factors:
        low, high = site.factors
        yield "Equalization", f"its channels are divided by factors of {low:.3g} to {high:.3g}"
    row = one.row
    if row is not None and row.use is not None:
        yield "Outside of the range", f"{percent(row.use.below, 3)} below, {percent(row.use.above, 3)} above"
        if row.use.levels is not None:
            yield "In use", f"{percent(row.use.levels, 0)} of the quantized values occur"


def origin_of_scale(graph: GraphReport, site: SiteFacts) -> str:
    """Return how a scale was determined."""
    if site.leader != site.name:
        owner = next((one.name for one in graph.operators if one.facts.site == site.leader), site.leader)
        return f"it has the parameters of {owner}"
    if not site.method:
        return site.spec
    meaning = METHOD_MEANINGS.get(site.method.partition(":")[0], "")
    method = f"method {site.method}" + (f" ({meaning})" if meaning else "")
    if not site.count:
        return method
    return f"{method} over {site.count:,} values of calibration from {number(site.low)} to {number(site.high)}"


def input_lines(graph: GraphReport, one: OperatorReport) -> Lines:
    """Yield the quantized values that the operator's kernel reads."""
    for name in one.facts.inputs:
        source = next((other for other in graph.operators if other.facts.site == name), None)
        if source is None or source.site is None:
            yield "Reads", name
            continue
        site, ends = source.site, source.site.range
        range_text = f", {number(ends[0])} to {number(ends[1])}" if ends is not None else ""
        yield "Reads", f"{source.name}: {site.datatype}{range_text}; {origin_of_scale(graph, site)}"


def weight_lines(one: OperatorReport) -> Lines:
    """Yield how the weight was rounded."""
    weight = one.weight
    if weight is None:
        return
    shape = "×".join(map(str, weight.shape))
    scales = f"{len(weight.scales)} scales" if len(weight.scales) > 1 else "one scale"
    yield "Weight", f"{shape}, {weight.datatype}, {scales}, {decibels(weight.all_decibels)}"
    yield "Weight rounded", ROUNDING_MEANINGS.get(weight.rounding, weight.rounding)
    worst = min(range(len(weight.decibels)), key=weight.decibels.__getitem__)
    yield "Worst channel", f"{worst}, with {decibels(weight.decibels[worst])}"


def error_lines(one: OperatorReport) -> Lines:
    """Yield the errors of the operator."""
    row = one.row
    if row is None:
        return
    yield "Own error", f"{decibels(row.alone)}, cosine similarity {row.alone_cosine:.6f}"
    yield "Error so far", f"{decibels(row.so_far)}, cosine similarity {row.so_far_cosine:.6f}"
    yield "Values in float", f"{number(row.low)} to {number(row.high)}"


def time_lines(graph: GraphReport, one: OperatorReport) -> Lines:
    """Yield the time of the operator's kernel."""
    time = graph.microseconds(one)
    if time is None:
        if one.counted_with:
            yield "Time", f"counted for {one.counted_with}"
        return
    limit = graph.of_limit(one)
    reached = f", {percent(limit, 0)} of the peak throughput" if limit is not None else ""
    yield "Time", f"{microseconds(time)}, {percent(graph.share(one))} of all steps{reached}"
    if one.facts.macs:
        yield "MACs", f"{macs_text(one.facts.macs)} for one sample"
