"""`Ranges`: the result of calibration, which can be saved, merged and turned into quantization parameters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from intaglio.argument_checks import check_arguments
from intaglio.errors import MALFORMED, ArtifactError, CalibrationError, InputError, did_you_mean
from intaglio.formatting.html_text import element, html_table, shortened
from intaglio.formatting.plots import MARK, MUTED, axes_for
from intaglio.ir import QParams
from intaglio.output_paths import read_text, write_text
from intaglio.quant.calibrate.range_methods import method_of
from intaglio.quant.calibrate.tensor_statistics import Range, Statistics

RANGES_VERSION = 2
PLOTTED_BINS = 128
"""Largest number of bins of a plot."""
SAME_MODEL = "merge ranges of the same model, prepared with the same recipe"


@dataclass(frozen=True)
class Finding:
    """A problem that calibration noticed in the data.

    Attributes:
        kind: name of the check.
        where: sites, inputs or batches.
        problem: description of the problem.
        remedy: what to do about it, if that is known.
    """

    kind: str
    where: str
    problem: str
    remedy: str | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class SeenBatch:
    """Summary of one batch.

    Attributes:
        samples: number of samples.
        digest: digest of its tensors.
        inputs: extrema of each floating-point input by name.
    """

    samples: int
    digest: int
    inputs: Mapping[str, Range]

    def merge(self, other: SeenBatch) -> SeenBatch:
        """Return the union of two parts of one batch."""
        inputs = dict(self.inputs)
        for name, (low, high) in other.inputs.items():
            lowest, highest = inputs.get(name, (low, high))
            inputs[name] = (min(low, lowest), max(high, highest))
        return SeenBatch(self.samples + other.samples, (self.digest + other.digest) % 2**64, inputs)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON, floats as hexadecimal text."""
        inputs = {name: [low.hex(), high.hex()] for name, (low, high) in self.inputs.items()}
        return {"samples": self.samples, "digest": f"{self.digest:016x}", "inputs": inputs}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> SeenBatch:
        """Return the batch that `to_dict` encoded."""
        inputs = {name: (float.fromhex(low), float.fromhex(high)) for name, (low, high) in data["inputs"].items()}
        return SeenBatch(_count(data["samples"]), int(data["digest"], 16), inputs)


@dataclass(frozen=True)
class Ranges:
    """Mergeable statistics of a calibration.

    Attributes:
        statistics: site name -> statistics.
        batches: number of batches.
        samples: number of samples.
        graph: digest of the prepared graph, "" if unknown.
        seen: batch index -> summary of the batch.
        findings: results of the data checks, which are neither saved nor merged.
        parameters: site name -> parameters that calibration callbacks chose (`Calibrator`); ``None`` without callbacks.
            All other sites use their statistics.
    """

    statistics: Mapping[str, Statistics]
    batches: int = 0
    samples: int = 0
    graph: str = ""
    seen: Mapping[int, SeenBatch] = field(default_factory=dict)
    findings: tuple[Finding, ...] = field(default=(), compare=False)
    parameters: Mapping[str, QParams] | None = None

    def __repr__(self) -> str:
        return f"Ranges({len(self.statistics)} sites, {self.batches} batches, {self.samples} samples)"

    def _repr_html_(self) -> str:
        """Return the smallest and largest values by site for notebooks."""
        found = self.statistics.items()
        rows, more = shortened([(name, f"{s.low:.4g}", f"{s.high:.4g}", f"{s.count:,}") for name, s in found], "sites")
        table = html_table(("site", "smallest", "largest", "values"), rows, repr(self))
        return table + "".join(element("p", text) for text in (more, *map(str, self.findings)) if text)

    @check_arguments
    def plot(self, site: str, ax: Any = None, *, method: str = "mse") -> Any:
        """Draw the histogram of a site's values, and the range that a method chooses for them.

        Args:
            site: name of the site.
            ax: axes of matplotlib to draw on (default: those of a new figure).
            method: range method, as in recipes.

        Returns:
            The axes.

        Raises:
            InputError: matplotlib is not installed, or the site or method is unknown.
        """
        if site not in self.statistics:
            raise InputError(
                "plot", None, f"the ranges have no site {site!r}", remedy=did_you_mean(site, self.statistics)
            )
        try:
            low, high = method_of(method)(self.statistics[site], 0, 255)
        except ValueError as error:
            raise InputError("plot", None, str(error), remedy="pass a method of recipes, such as 'minmax'") from error
        drawn, found = axes_for(ax), self.statistics[site].histogram(PLOTTED_BINS)
        if found is not None:
            start, width, counts = found
            places = [start + width * index for index in range(len(counts))]
            drawn.bar(places, counts, width, align="edge", color=MUTED)
            drawn.set_yscale("log")
        for end in (low, high):
            drawn.axvline(end, color=MARK)
        drawn.set_xlabel(f"{site}; lines: the range of {method!r}, {low:.4g} to {high:.4g}")
        drawn.set_ylabel("values")
        return drawn

    @check_arguments
    def merge(self, other: Ranges) -> Ranges:
        """Return exactly the ranges of both data sets together; the sites must be the same.

        Batches of the same index count as parts of one batch, which affects only the method "ema" and the data checks.
        ``calibrate(..., first_batch=n)`` gives the batches of the second data set other indices.
        """
        if set(self.statistics) != set(other.statistics):
            odd = sorted(set(self.statistics) ^ set(other.statistics))
            problem = f"only one of the two has ranges of the sites {', '.join(odd[:5])}"
            raise CalibrationError("ranges", None, problem, remedy=SAME_MODEL)
        if self.parameters or other.parameters:
            problem = "parameters that a calibration callback or a custom observer chose cannot be merged"
            raise CalibrationError("ranges", None, problem, remedy="calibrate with all batches in one call")
        if self.graph and other.graph and self.graph != other.graph:
            problem = "they belong to different graphs whose sites have the same names"
            raise CalibrationError("ranges", None, problem, remedy=SAME_MODEL)
        merged = {name: mine.merge(other.statistics[name]) for name, mine in self.statistics.items()}
        seen = {**self.seen, **other.seen}
        seen.update({index: self.seen[index].merge(other.seen[index]) for index in self.seen.keys() & other.seen})
        batches, samples = self.batches + other.batches, self.samples + other.samples
        return Ranges(merged, batches, samples, self.graph or other.graph, seen)

    def to_json(self) -> str:
        """Return JSON text with sorted keys and hexadecimal floats, so that equal ranges give equal text."""
        content = {
            "version": RANGES_VERSION,
            "batches": self.batches,
            "samples": self.samples,
            "graph": self.graph,
            "seen": [[index, one.to_dict()] for index, one in sorted(self.seen.items())],
            "sites": {name: found.to_dict() for name, found in self.statistics.items()},
        }
        if self.parameters is not None:
            content["parameters"] = {name: _entry(q) for name, q in self.parameters.items()}
        return json.dumps(content, sort_keys=True)

    @staticmethod
    @check_arguments
    def from_json(text: str) -> Ranges:
        """Return the inverse of `to_json`; raise `ArtifactError` for other text or another version."""
        try:
            content = json.loads(text)
            if content["version"] != RANGES_VERSION:
                raise ArtifactError(
                    "ranges",
                    None,
                    f"the file has version {content['version']}; this intaglio reads version {RANGES_VERSION}",
                    remedy="calibrate again, and save the ranges with this version",
                )
            sites = {name: Statistics.from_dict(found) for name, found in content["sites"].items()}
            seen = {int(index): SeenBatch.from_dict(one) for index, one in content["seen"]}
            chosen = None
            if "parameters" in content:
                chosen = {name: _qparams(entry) for name, entry in content["parameters"].items()}
            batches, samples = _count(content["batches"]), _count(content["samples"])
            return Ranges(sites, batches, samples, str(content["graph"]), seen, parameters=chosen)
        except MALFORMED as error:
            raise ArtifactError("ranges", None, f"this is not a file of ranges: {error}") from error

    @check_arguments
    def save(self, path: str | Path) -> None:
        """Write the ranges to a JSON file."""
        write_text(path, self.to_json())

    @staticmethod
    @check_arguments
    def load(path: str | Path) -> Ranges:
        """Read the ranges from a JSON file."""
        return Ranges.from_json(read_text(path))

    @staticmethod
    @check_arguments
    def merge_files(paths: Iterable[str | Path]) -> Ranges:
        """Return the merged ranges of all files, which may be in any order."""
        found = [Ranges.load(path) for path in paths]
        if not found:
            raise ArtifactError("ranges", None, "there is no file to merge", remedy="pass one path or more")
        return reduce(Ranges.merge, found)

    def text(self) -> str:
        """Return one line for each site with its count, lowest and highest value."""
        lines = [f"{name}: n={s.count} [{s.low:.6g}, {s.high:.6g}]" for name, s in self.statistics.items()]
        lines += [f"{name}: {q}, chosen by a callback" for name, q in (self.parameters or {}).items()]
        return "\n".join(lines) + "\n"


def _count(value: object) -> int:
    """Return `value` if it is a count; raise `ValueError` otherwise."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(f"{value!r:.60} is not a count")


def _entry(q: QParams) -> dict[str, Any]:
    scales = [scale.hex() for scale in q.scales]
    return {"scale": scales, "zero_point": list(q.zeros), "qmin": q.qmin, "qmax": q.qmax, "axis": q.axis}


def _qparams(entry: dict[str, Any]) -> QParams:
    scales, zeros = tuple(map(float.fromhex, entry["scale"])), tuple(map(int, entry["zero_point"]))
    return QParams(scales, zeros, int(entry["qmin"]), int(entry["qmax"]), entry["axis"])
