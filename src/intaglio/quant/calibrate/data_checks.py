"""Checks of calibration data for common mistakes, which report findings based on the collected statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import fx

from intaglio.fxgraph.nodes import operator
from intaglio.quant.annotate.sites import Observed, Site
from intaglio.quant.calibrate.prepare import Prepared
from intaglio.quant.calibrate.range_methods import OUTLIER_RATIO, contains_mask
from intaglio.quant.calibrate.ranges import Finding, Ranges
from intaglio.quant.recipes.image import LARGEST_BYTE, Image

FEW_SAMPLES = 32
"""With fewer samples the extrema may not be those of the data."""
MIN_BATCHES_FOR_GROWTH = 8
"""Number of batches from which on growing ranges are reported."""
RANGE_GROWTH = 1.1
"""Ratio by which the last quarter of the batches may widen a range."""
PIXEL_RANGE = 32.0
"""Inputs with a maximum between this and 255 and without negative values are bytes; normalized pixels are smaller."""
SHOWN_FINDINGS = 5
"""Number of names that a finding lists."""


def check_data(prepared: Prepared, ranges: Ranges) -> tuple[Finding, ...]:
    """Run every check on the ranges of a prepared model, in the order of `CHECKS`."""
    return tuple(finding for check in CHECKS for finding in check(prepared, ranges))


def few_samples(prepared: Prepared, ranges: Ranges) -> Iterator[Finding]:
    """Report calibration with few samples."""
    if 0 < ranges.samples < FEW_SAMPLES:
        problem = f"{ranges.samples} samples are few"
        yield Finding("few_samples", "data", problem, "ranges of a few hundred samples fit more of the data")


def constant_batches(prepared: Prepared, ranges: Ranges) -> Iterator[Finding]:
    """Report batches of several samples in which every input is constant."""
    constant = [
        index
        for index, batch in ranges.seen.items()
        if batch.samples > 1 and batch.inputs and all(low == high for low, high in batch.inputs.values())
    ]
    if constant:
        yield Finding("constant_batches", _batches(constant), "every input repeats a single value")


def duplicate_batches(prepared: Prepared, ranges: Ranges) -> Iterator[Finding]:
    """Report batches with equal contents."""
    by_digest: dict[int, list[int]] = {}
    for index, batch in ranges.seen.items():
        by_digest.setdefault(batch.digest, []).append(index)
    for equal in by_digest.values():
        if len(equal) > 1:
            yield Finding(
                "duplicate_batches",
                _batches(equal),
                "their contents are equal, and each of them counts",
                "if several processes calibrate, share(data) gives each its own batches",
            )


def pixels_as_bytes(prepared: Prepared, ranges: Ranges) -> Iterator[Finding]:
    """Report images with values in 0..255, and images that are not normalized as declared."""
    for entry in prepared.signature.inputs:
        ends = [batch.inputs[entry.name] for batch in ranges.seen.values() if entry.name in batch.inputs]
        if not ends or len(entry.type.shape) != 4:
            continue
        low, high = min(low for low, _ in ends), max(high for _, high in ends)
        declared = prepared.images.get(entry.name)
        where, bytewise = f"input '{entry.name}'", low >= 0 and PIXEL_RANGE < high <= 255
        if declared is not None and not _fits(declared, low, high):
            yield Finding(
                "pixels_as_bytes",
                where,
                f"values in [{low:.6g}, {high:.6g}], which pixels normalised as declared cannot have",
                "normalise the batches: image.normalize(pixels)",
            )
        elif declared is None and bytewise and entry.type.shape[1] in (1, 3):
            yield Finding(
                "pixels_as_bytes",
                where,
                f"values in [{low:.6g}, {high:.6g}] look like bytes of images",
                "if the model was trained on normalised pixels, normalise them here too",
            )


def never_executed(prepared: Prepared, ranges: Ranges) -> Iterator[Finding]:
    """Report sites that were never executed."""
    empty = [name for name, statistics in ranges.statistics.items() if not statistics.count]
    if empty:
        yield Finding(
            "never_hit",
            _sites(empty),
            "no calibration data reached it, so convert raises an error",
            "calibrate with data that reaches it, or leave it in float with skip=",
        )


def not_finite(prepared: Prepared, ranges: Ranges) -> Iterator[Finding]:
    """Report sites with NaN or infinite values, which were left out."""
    nonfinite = {name: s.nans + s.infinities for name, s in ranges.statistics.items() if s.nans + s.infinities}
    if nonfinite:
        yield Finding(
            "not_finite", _sites(nonfinite), f"{sum(nonfinite.values())} NaN or infinite values were left out"
        )


def masks(prepared: Prepared, ranges: Ranges) -> Iterator[Finding]:
    """Report attention masks: large negative numbers that are added to the operand of a softmax."""
    by_name = _sites_of(prepared)
    masked = [name for name, s in ranges.statistics.items() if by_name[name][1] and contains_mask(s)]
    if masked:
        yield Finding(
            "masks",
            _sites(masked),
            "contains a mask's large negative numbers; the range leaves them out, because softmax is 0 at its "
            "lower end already",
        )


def outliers(prepared: Prepared, ranges: Ranges) -> Iterator[Finding]:
    """Report sites with few values that are far larger than the others."""
    by_name = _sites_of(prepared)
    far: dict[str, list[str]] = {}
    for name, statistics in ranges.statistics.items():
        site, logits = by_name[name]
        known, spec = logits and contains_mask(statistics), site.spec
        if (
            statistics.largest_magnitude > OUTLIER_RATIO * statistics.typical_magnitude
            and not known
            and isinstance(spec, Observed)
        ):
            far.setdefault(spec.method.partition(":")[0], []).append(name)
    for method, names in far.items():
        worst = max(
            (ranges.statistics[name] for name in names), key=lambda s: s.largest_magnitude / s.typical_magnitude
        )
        yield Finding(
            "outliers",
            _sites(names),
            f"values up to {worst.largest_magnitude:.3g}, where all but 1 of 10,000 stay below "
            f"{worst.typical_magnitude:.3g}",
            f"method {method!r} keeps them in the range, so usual values share few quantized values: choose 'mse', "
            "'kl' or 'percentile', or activations = 'token' for linear layers that read them"
            if method in ("minmax", "average", "ema")
            else None,
        )


def growing_ranges(prepared: Prepared, ranges: Ranges) -> Iterator[Finding]:
    """Report sites whose range still grew in the last quarter of the batches."""
    growing = []
    for name, statistics in ranges.statistics.items():
        ends = [ends for _, ends in sorted(statistics.history.items())]
        early = ends[: len(ends) * 3 // 4]
        if len(ends) >= MIN_BATCHES_FOR_GROWTH and _width(ends) > RANGE_GROWTH * _width(early):
            growing.append(name)
    if growing:
        yield Finding(
            "growing_ranges",
            _sites(growing),
            f"the last quarter of the batches still widened the range by more than {RANGE_GROWTH - 1:.0%}",
            "calibrate with more batches",
        )


Check = Callable[[Prepared, Ranges], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (
    few_samples,
    constant_batches,
    duplicate_batches,
    pixels_as_bytes,
    never_executed,
    not_finite,
    masks,
    outliers,
    growing_ranges,
)


def _sites_of(prepared: Prepared) -> dict[str, tuple[Site, bool]]:
    """Return by name each site, loop bodies included, and whether a softmax reads it."""
    logits = softmax_operands(prepared.annotations.module)
    found = {site.name: (site, site.value in logits) for site in prepared.annotations.sites}
    for body in prepared.bodies.values():
        found |= _sites_of(body)
    return found


MASK_PATH_OPERATORS = (
    "add",
    "sub",
    "where",
    "masked_fill",
    "view",
    "reshape",
    "expand",
    "unsqueeze",
    "clone",
    "contiguous",
)
"""ATen operators that may be between a mask and its softmax."""


def softmax_operands(module: fx.GraphModule) -> set[str]:
    """Return the names of values that reach a softmax through `MASK_PATH_OPERATORS` only."""
    found: set[fx.Node] = set()
    waiting = [node for node in module.graph.nodes if _kind(node) in ("softmax", "_softmax")]
    while waiting:
        node = waiting.pop()
        new = [value for value in node.all_input_nodes if value not in found]
        found.update(new)
        waiting += [value for value in new if _kind(value) in MASK_PATH_OPERATORS]
    return {node.name for node in found}


def _kind(node: fx.Node) -> str:
    name = operator(node)
    return name.split(".")[1] if name.startswith("aten.") else ""


def _fits(image: Image, low: float, high: float) -> bool:
    """Return whether values can be normalized pixels, with some room for interpolation that overshoots."""
    pixels = torch.tensor([0, LARGEST_BYTE], dtype=torch.uint8).reshape(2, 1, 1, 1)
    lowest, highest = (end.item() for end in image.normalize(pixels).aminmax())
    room = (highest - lowest) / 4
    return lowest - room <= low and high <= highest + room


def _width(ends: Iterable[tuple[float, float]]) -> float:
    """Return the width of the range that contains zero and all the given ranges."""
    lows, highs = zip(*ends, strict=True)
    return max(0.0, *highs) - min(0.0, *lows)


def _batches(indices: list[int]) -> str:
    return _list("batch" if len(indices) == 1 else "batches", [str(index) for index in indices])


def _sites(names: Iterable[str] | Mapping[str, int]) -> str:
    return _list("", list(names))


def _list(noun: str, words: list[str]) -> str:
    more = f" and {len(words) - SHOWN_FINDINGS} more" if len(words) > SHOWN_FINDINGS else ""
    return f"{noun} {', '.join(words[:SHOWN_FINDINGS])}{more}".strip()
