"""Quantization parameters of all sites in an editable text form that needs no calibration data."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from intaglio.argument_checks import check_arguments, check_fields
from intaglio.errors import MALFORMED, ArtifactError, CalibrationError
from intaglio.formatting.html_text import element, html_table, shortened
from intaglio.ir import QParams
from intaglio.numerics import MIN_SCALE
from intaglio.output_paths import read_text, write_text
from intaglio.quant.annotate.sites import Observed, Site
from intaglio.quant.correct.corrections import Corrected
from intaglio.quant.recipes.choices import Role

PARAMETERS_VERSION = 1
KEYS = ("dtype", "qmin", "qmax", "scale", "zero_point", "group")
"""Keys of an entry; "group" is optional."""
ENTRY_REMEDY = "write the entry as reference.parameters.save(path) does, such as scale 0.02 and zero_point 128"
SHOWN_PARAMETERS = 5
"""Maximum number of names that an error lists."""


@check_fields
@dataclass(frozen=True)
class Parameter:
    """Quantization parameters of one site.

    Attributes:
        dtype: name of the datatype in `DATATYPES`.
        qmin: lowest quantized value.
        qmax: highest quantized value.
        scale: one scale, or one per channel.
        zero_point: one zero point per scale.
        group: number of neighbours in a weight channel that share a step, an integer multiple of the channel's scale; 0
            without groups. The multiples are computed from the weight.
    """

    dtype: str
    qmin: int
    qmax: int
    scale: tuple[float, ...]
    zero_point: tuple[int, ...]
    group: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: hexadecimal scales, and a single number where all channels are equal."""
        entry: dict[str, Any] = {"dtype": self.dtype} | ({"group": self.group} if self.group else {})
        scales = [_hexadecimal(scale) for scale in self.scale]
        zeros = list(self.zero_point[:1] if len(set(self.zero_point)) == 1 else self.zero_point)
        entry |= {"qmin": self.qmin, "qmax": self.qmax}
        return entry | {"scale": _single(scales), "zero_point": _single(zeros)}

    @staticmethod
    def from_dict(name: str, entry: Mapping[str, Any]) -> Parameter:
        """Parse the JSON form of the entry of site `name`.

        Raises:
            ArtifactError: a key or value is invalid.
        """
        try:
            if odd := sorted({"group": 0, **entry}.keys() ^ {*KEYS}):
                raise ValueError(f"missing or unknown keys: {', '.join(odd)}; an entry has exactly {', '.join(KEYS)}")
            scales = tuple(_scale(value) for value in _several(entry["scale"]))
            zeros = tuple(_whole(value) for value in _several(entry["zero_point"]))
            zeros = zeros * len(scales) if len(zeros) == 1 else zeros
            low, high, group = (_whole(entry.get(key, 0)) for key in ("qmin", "qmax", "group"))
            if len(zeros) != len(scales) or not low < high or not all(low <= zero <= high for zero in zeros):
                raise ValueError(
                    f"{len(scales)} scales and {len(zeros)} zero points; each scale needs one, in qmin..qmax"
                )
            return Parameter(str(entry["dtype"]), low, high, scales, zeros, group)
        except MALFORMED as error:
            raise ArtifactError(f"parameters of {name}", None, str(error), remedy=ENTRY_REMEDY) from error


@check_fields
@dataclass(frozen=True)
class Parameters:
    """Parameters by site name, for every site that has parameters of its own: observed activations and weights.

    Sites that share parameters, biases and declared images have no entry, because theirs are derived. The weights may
    all be missing; their scales are then computed from their values.

    Attributes:
        entries: site name -> `Parameter`.
        corrected: equalization factors, rounded weights and corrected biases.
    """

    entries: Mapping[str, Parameter]
    corrected: Corrected = field(default_factory=Corrected)

    def __repr__(self) -> str:
        return f"Parameters({len(self.entries)} sites)"

    def _repr_html_(self) -> str:
        """Return the sites with their datatypes, scales and zero points for notebooks."""
        rows = [
            (
                name,
                entry.dtype,
                len(entry.scale),
                f"{min(entry.scale):.4g}",
                f"{max(entry.scale):.4g}",
                min(entry.zero_point),
            )
            for name, entry in self.entries.items()
        ]
        shown, more = shortened(rows, "sites")
        columns = ("site", "datatype", "scales", "smallest scale", "largest scale", "smallest zero point")
        return element("p", repr(self)) + html_table(columns, shown, more, text=2)

    @staticmethod
    @check_arguments
    def of(
        sites: Iterable[Site], leaders: Mapping[str, str], qparams: Mapping[str, QParams], corrected: Corrected
    ) -> Parameters:
        """Collect the parameters of a converted model."""
        found = {}
        for site in owners(sites, leaders):
            q = qparams[site.name]
            low, high = (site.record.qmin, site.record.qmax) if site.role == Role.WEIGHT else (q.qmin, q.qmax)
            found[site.name] = Parameter(site.datatype, low, high, tuple(q.scales), tuple(q.zeros), site.group)
        return Parameters(found, corrected)

    def without_weights(self) -> Parameters:
        """Return a copy without the entries and rounded values of weights."""
        kept = {name: entry for name, entry in self.entries.items() if "#" in name}  # activations belong to a call
        return Parameters(kept, Corrected(self.corrected.equalization, biases=self.corrected.biases))

    @check_arguments
    def without(self, sites: Collection[str], anchors: Collection[str]) -> Parameters:
        """Return a copy without the entries and corrections of some sites, and without the biases of some anchors.

        Args:
            sites: names of sites.
            anchors: names of anchor nodes.
        """
        old = self.corrected
        quantized = {name: values for name, values in old.quantized_weights.items() if name not in sites}
        biases = {name: values for name, values in old.biases.items() if name not in anchors}
        kept = {name: entry for name, entry in self.entries.items() if name not in sites}
        return Parameters(kept, Corrected(old.equalization, quantized, biases))

    @check_arguments
    def split(self, names: Iterable[str]) -> tuple[Parameters, Parameters]:
        """Return the parameters of all other sites, with all corrections, and those of the sites `names`."""
        inner = set(names)
        own = {name: entry for name, entry in self.entries.items() if name not in inner}
        part = {name: entry for name, entry in self.entries.items() if name in inner}
        return replace(self, entries=own), Parameters(part)

    @check_arguments
    def changed(self, name: str, **fields: Any) -> Parameters:
        """Return a copy with some fields of the entry `name` replaced, as in ``changed(name, scale=0.02)``."""
        if name not in self.entries:
            raise CalibrationError(
                "parameters", None, f"there is no site {name!r}", remedy=f"choose from {_listed(self.entries)}"
            )
        entry = Parameter.from_dict(name, {**self.entries[name].to_dict(), **fields})
        return replace(self, entries={**self.entries, name: entry})

    @check_arguments
    def checked(self, sites: Iterable[Site], leaders: Mapping[str, str]) -> dict[str, QParams]:
        """Return the quantization parameters by name of the sites that own them.

        Raises:
            CalibrationError: the entries do not belong to these sites, or do not fit their datatypes.
        """
        wanted = {site.name: site for site in owners(sites, leaders)}
        weights = {name for name, site in wanted.items() if site.role == Role.WEIGHT}
        unknown = sorted(set(self.entries) - set(wanted))
        missing = sorted(set(wanted) - set(self.entries) - (set() if weights & set(self.entries) else weights))
        if unknown or missing:
            both = {"unknown": unknown, "missing": missing}
            parts = [f"{kind} {_listed(names)}" for kind, names in both.items() if names]
            raise CalibrationError(
                "parameters",
                None,
                f"they do not belong to this model: {'; '.join(parts)}",
                remedy=OWN_PARAMETERS,
            )
        return {name: _fitting(entry, wanted[name]) for name, entry in self.entries.items()}

    def to_json(self) -> str:
        """Return JSON with one line per site, sorted by name; hexadecimal scales make equal parameters equal text."""
        lines = [f"{json.dumps(name)}: {json.dumps(self.entries[name].to_dict())}" for name in sorted(self.entries)]
        text = f'{{"version": {PARAMETERS_VERSION}, "sites": {{\n' + ",\n".join(lines) + "\n}"
        for section, entries in self.corrected.to_dicts().items():
            rows = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()]
            text += f',\n"{section}": {{\n' + ",\n".join(rows) + "\n}"
        return text + "}\n"

    @staticmethod
    @check_arguments
    def from_json(text: str) -> Parameters:
        """Parse the text of `to_json`. Scales may also be decimal (``0.02``); they are rounded to float32."""
        try:
            content = json.loads(text)
            version, sites = content["version"], content["sites"].items()
        except MALFORMED as error:
            raise ArtifactError("parameters", None, f"this is not a file of parameters: {error}") from error
        if version != PARAMETERS_VERSION:
            problem = f"the file has version {version}; this intaglio reads version {PARAMETERS_VERSION}"
            raise ArtifactError("parameters", None, problem, remedy="save reference.parameters with this version")
        return Parameters.from_dicts(dict(sites), {k: v for k, v in content.items() if k not in ("version", "sites")})

    @staticmethod
    @check_arguments
    def from_dicts(
        entries: Mapping[str, Mapping[str, Any]], sections: Mapping[str, Mapping[str, Any]] | None = None
    ) -> Parameters:
        """Build parameters from parsed entries.

        Args:
            entries: site name -> dictionary of `Parameter.to_dict`.
            sections: corrections, as `Corrected.to_dicts` returns them.
        """
        try:
            corrected = Corrected.from_dicts(sections or {})
        except MALFORMED as error:
            raise ArtifactError("parameters", None, f"the corrections are not valid: {error}") from error
        return Parameters({name: Parameter.from_dict(name, entry) for name, entry in entries.items()}, corrected)

    @check_arguments
    def save(self, path: str | Path) -> None:
        """Write the text of `to_json` to a file."""
        write_text(path, self.to_json())

    @staticmethod
    @check_arguments
    def load(path: str | Path) -> Parameters:
        """Read a file that `save` wrote."""
        return Parameters.from_json(read_text(path))


OWN_PARAMETERS = "use the model and the recipe that they were saved with; reference.parameters has those of a model"


def owners(sites: Iterable[Site], leaders: Mapping[str, str]) -> list[Site]:
    """Return the observed sites that lead their sharing group. The parameters of all others are derived."""
    return [site for site in sites if isinstance(site.spec, Observed) and leaders[site.name] == site.name]


def _fitting(entry: Parameter, site: Site) -> QParams:
    """Return the entry as quantization parameters of the site.

    Raises:
        CalibrationError: the site's datatype or recipe does not allow the entry.
    """
    kind, problem = site.record, None
    # The second factor of a product has the zero point 128.
    low, high = min(kind.qmin, site.qmin), max(kind.qmax, site.qmax)
    if (entry.dtype, entry.group) != (site.datatype, site.group):
        problem = (
            f"they are {_type(entry.dtype, entry.group)}, but the recipe asks for {_type(site.datatype, site.group)}"
        )
    elif len(entry.scale) != 1 and site.axis is None:
        problem = f"{len(entry.scale)} scales are given, but the site has one for all channels"
    elif any(entry.zero_point) and not kind.zero_point:
        problem = f"the zero point is {max(entry.zero_point, key=abs)}, but {kind.name} has zero point 0"
    elif not (low <= entry.qmin and entry.qmax <= high):
        problem = f"the range {entry.qmin}..{entry.qmax} is not a part of {kind.name}, which has {low}..{high}"
    elif site.role == Role.WEIGHT and (entry.qmin, entry.qmax) != (kind.qmin, kind.qmax):
        problem = f"the range is {entry.qmin}..{entry.qmax}, but {kind.name} weights have {kind.qmin}..{kind.qmax}"
    if problem is not None:
        remedy = "change the recipe's weights, weights_dtype or activations_dtype" if "recipe" in problem else None
        raise CalibrationError(f"parameters of {site.name}", None, problem, remedy=remedy)
    low, high = (site.qmin, site.qmax) if site.role == Role.WEIGHT else (entry.qmin, entry.qmax)
    return QParams(entry.scale, entry.zero_point, low, high, site.axis)


def _type(name: str, group: int) -> str:
    return name + (f" in groups of {group}" if group else "")


def _hexadecimal(value: float) -> str:
    """Return the exact hexadecimal form of a float without trailing zeros."""
    digits, _, exponent = float(value).hex().partition("p")
    return f"{digits.rstrip('0').rstrip('.')}p{exponent}"


def _scale(value: Any) -> float:
    """Parse a scale, a number or a decimal or hexadecimal string, and round it to float32."""
    number = float.fromhex(value) if isinstance(value, str) and "x" in value.lower() else float(value)
    scale = float(np.float32(number))
    if isinstance(value, bool) or not (MIN_SCALE <= scale < math.inf):
        raise ValueError(f"the scale {value!r} is not a finite number of at least 2^-126")
    return scale


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not an integer")
    return value


def _several(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else [value]


def _single(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:SHOWN_PARAMETERS]) + (
        f" and {len(names) - SHOWN_PARAMETERS} more" if len(names) > SHOWN_PARAMETERS else ""
    )
