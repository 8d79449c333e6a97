"""Records of what was decided about every operator and site of a model, and their form as JSON text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from intaglio.errors import MALFORMED, ArtifactError

IMPORTED = "imported"
"""Rounding of weights whose integers another tool chose."""


class Precision(StrEnum):
    """Types in which an operator runs, and who runs it."""

    INPUT = "input"
    """It is an input of the model."""
    INT8 = "int8"
    """The compiled program computes it with integers."""
    FLOAT32 = "float32"
    """The compiled program computes it in float32."""
    PYTORCH = "PyTorch"
    """PyTorch computes it in a float island."""


@dataclass(frozen=True)
class OperatorFacts:
    """An operator with a floating-point result, or an input.

    Attributes:
        node: its name in the texts of stages.
        path: path of its module.
        operator: ATen operator, or "input".
        source: line of the model's source code.
        detail: what tells it apart from others of the same module and operator.
        folded: paths of the batch norms that were folded into it.
        reads: nodes whose values it reads, through nodes that are not listed.
        type: type and shape of its result.
        macs: multiply-accumulates for a batch of one.
        precision: where and in which type it runs.
        reason: why it stays in float.
        fusion: name of the fusion, or of the operator alone, as which it runs on integers.
        region: number of the operators that run as one kernel; -1 in float.
        value: name of its result in the integer graph; "" if it is not a value of its own there.
        site: name of the site of its result.
        inputs: names of the sites that its kernel reads.
        weight: name of the site of its weight.
        selector: selector that leaves its kernel in float.
        entries: selectors of the recipe's entries that apply to it, the weakest first.
        dynamic: whether its activations are quantized while the model runs.
    """

    node: str
    path: str
    operator: str
    source: str = ""
    detail: str = ""
    folded: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    type: str = ""
    macs: int = 0
    precision: Precision = Precision.PYTORCH
    reason: str = ""
    fusion: str = ""
    region: int = -1
    value: str = ""
    site: str = ""
    inputs: tuple[str, ...] = ()
    weight: str = ""
    selector: str = ""
    entries: tuple[str, ...] = ()
    dynamic: bool = False


@dataclass(frozen=True)
class SiteFacts:
    """A site and the origin of its quantization parameters.

    Attributes:
        name: name of the site.
        node: name of the node whose value it is.
        role: what the value is to its readers.
        datatype: type of the quantized values.
        qmin: smallest quantized value.
        qmax: largest quantized value.
        scales: number of scales.
        scale: smallest and largest scale.
        zero_point: the zero point, or ``None`` if channels have their own.
        spec: source of the parameters as text.
        method: range method that chose them, or "".
        leader: name of the site that they belong to.
        count: number of values that calibration has seen.
        low: smallest of them.
        high: largest of them.
        factors: smallest and largest factor by which equalization divides channels; empty without equalization.
        rounding: method that rounded the weight.
    """

    name: str
    node: str
    role: str
    datatype: str
    qmin: int
    qmax: int
    scales: int = 0
    scale: tuple[float, ...] = ()
    zero_point: int | None = None
    spec: str = ""
    method: str = ""
    leader: str = ""
    count: int = 0
    low: float = 0.0
    high: float = 0.0
    factors: tuple[float, ...] = ()
    rounding: str = ""

    @property
    def range(self) -> tuple[float, float] | None:
        """Return the ends of the range of real values, or ``None`` if channels have their own or it is computed while
        the model runs."""
        if self.scales != 1 or self.zero_point is None:
            return None
        return (self.qmin - self.zero_point) * self.scale[0], (self.qmax - self.zero_point) * self.scale[0]


@dataclass(frozen=True)
class ModelFacts:
    """The operators and sites of one graph.

    Attributes:
        operators: inputs and operators, in execution order.
        sites: the sites by name.
    """

    operators: tuple[OperatorFacts, ...] = ()
    sites: Mapping[str, SiteFacts] | None = None

    def site(self, name: str) -> SiteFacts | None:
        """Return the site of a name, or ``None``."""
        return (self.sites or {}).get(name)

    def to_json(self) -> str:
        """Return JSON text with one line for each operator and site. Fields with their default value are left out."""
        operators = ",\n".join(json.dumps(_entry(one)) for one in self.operators)
        sites = ",\n".join(json.dumps(_entry(one)) for one in (self.sites or {}).values())
        return f'{{"operators": [\n{operators}\n], "sites": [\n{sites}\n]}}\n'

    @staticmethod
    def from_json(text: str) -> ModelFacts:
        """Return the facts that `to_json` wrote.

        Raises:
            ArtifactError: the text is something else.
        """
        try:
            content = json.loads(text)
            operators = tuple(OperatorFacts(**_checked(OperatorFacts, one)) for one in content["operators"])
            sites = [SiteFacts(**_checked(SiteFacts, one)) for one in content["sites"]]
        except MALFORMED as error:
            raise ArtifactError("operators", None, f"these are not facts about operators: {error}") from error
        return ModelFacts(operators, {site.name: site for site in sites})


def _entry(record: OperatorFacts | SiteFacts) -> dict[str, Any]:
    """Return the fields of a record that do not have their default value."""
    return {entry.name: value for entry in fields(record) if (value := getattr(record, entry.name)) != entry.default}


def _checked(kind: type[OperatorFacts] | type[SiteFacts], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for a record. Raise `ValueError` or `TypeError` if a field has another type."""
    found: dict[str, Any] = {}
    types = {one.name: str(one.type) for one in fields(kind)}
    for name, value in entry.items():
        made = tuple(value) if isinstance(value, list) else value
        if not _has_type(made, types[name]):
            raise ValueError(f"{name} is {value!r:.60}")
        found[name] = Precision(value) if types[name] == "Precision" else made
    return found


def _has_type(value: Any, kind: str) -> bool:
    """Return whether a value of a file has the type that a field is annotated with."""
    match kind:
        case "str" | "Precision":
            return isinstance(value, str)
        case "bool":
            return isinstance(value, bool)
        case "int" | "int | None":
            return (value is None and kind != "int") or (isinstance(value, int) and not isinstance(value, bool))
        case "float":
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        case "tuple[str, ...]":
            return isinstance(value, tuple) and all(isinstance(one, str) for one in value)
        case _:
            return isinstance(value, tuple) and all(isinstance(one, (int, float)) for one in value)
