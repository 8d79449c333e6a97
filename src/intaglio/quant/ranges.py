"""`Ranges`: statistics per site, to be saved, merged and turned into parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from intaglio.errors import ArtifactError, CalibrationError
from intaglio.quant.statistics import Statistics

VERSION = 1


@dataclass(frozen=True)
class Ranges:
    """Site name -> mergeable statistics, and how many batches and samples they saw."""

    statistics: Mapping[str, Statistics]
    batches: int = 0
    samples: int = 0

    def merge(self, other: Ranges) -> Ranges:
        """Exactly the ranges of both data sets at once; the sites must be the same."""
        if set(self.statistics) != set(other.statistics):
            odd = sorted(set(self.statistics) ^ set(other.statistics))
            raise CalibrationError("ranges", None, f"the sites differ: {', '.join(odd[:5])}")
        merged = {name: mine.merge(other.statistics[name]) for name, mine in self.statistics.items()}
        return Ranges(merged, self.batches + other.batches, self.samples + other.samples)

    def to_json(self) -> str:
        """Sorted keys and hexadecimal floats: equal ranges give equal text."""
        sites = {name: found.to_dict() for name, found in self.statistics.items()}
        content = {"version": VERSION, "batches": self.batches, "samples": self.samples, "sites": sites}
        return json.dumps(content, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Ranges:
        try:
            content = json.loads(text)
            if content["version"] != VERSION:
                raise ArtifactError("ranges", None, f"version {content['version']}; this intaglio reads {VERSION}")
            sites = {name: Statistics.from_dict(found) for name, found in content["sites"].items()}
            return Ranges(sites, content["batches"], content["samples"])
        except (ValueError, KeyError, TypeError) as error:
            raise ArtifactError("ranges", None, f"not a ranges file: {error}") from error

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Ranges:
        return Ranges.from_json(Path(path).read_text(encoding="utf-8"))

    def text(self) -> str:
        """Count, lowest and highest value of every site."""
        lines = [f"{name}: n={s.count} [{s.low:.6g}, {s.high:.6g}]" for name, s in self.statistics.items()]
        return "\n".join(lines) + "\n"
