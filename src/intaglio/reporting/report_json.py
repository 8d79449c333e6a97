"""The content of a report as JSON (docs/reference/formats.md, "Report")."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from intaglio.errors import MALFORMED, ArtifactError
from intaglio.reporting.report_data import GraphReport, ReportData
from intaglio.runtime.reports.speed import MeasuredSpeed
from intaglio.tune.comparison import Comparison

REPORT_VERSION = 1
"""Version of the form."""
NO_SIGNAL = -1000.0
"""Decibels of an error where all exact values are zero."""
ROWS_KEY = "rows"
"""Field of a comparison that JSON leaves out, because each operator has its row."""


def report_dict(data: ReportData) -> dict[str, Any]:
    """Return the content of a report as a dictionary for JSON, in which infinite decibels are ``None``."""
    found = json_value(data)
    for graph, entry in zip(data.graphs, found["graphs"], strict=True):
        for operator, one in zip(graph.operators, entry["operators"], strict=True):
            one["microseconds"], one["share"] = graph.microseconds(operator), graph.share(operator)
            one["of_limit"] = graph.of_limit(operator)
    return {"version": REPORT_VERSION, **found}


def report_json(data: ReportData) -> str:
    """Return `report_dict` as JSON text."""
    return json.dumps(report_dict(data), indent=1, allow_nan=False)


def report_from_json(text: str) -> ReportData:
    """Return the content that `report_json` wrote.

    Raises:
        ArtifactError: the text is something else, or has another version.
    """
    try:
        content = json.loads(text)
        version = content["version"]
        if version == REPORT_VERSION:
            found: ReportData = _decoded(ReportData, content)
            return found
    except MALFORMED as error:
        problem = f"this is not a report: {type(error).__name__}: {error}"
        raise ArtifactError("report", None, problem, remedy=WRITE_AGAIN) from error
    problem = f"the report has version {version!r}; this intaglio reads version {REPORT_VERSION}"
    raise ArtifactError("report", None, problem, remedy=WRITE_AGAIN)


WRITE_AGAIN = "write it again with this version: report.save_json(path)"


def json_value(value: Any) -> Any:
    """Return a value made of dataclasses, tuples and mappings as JSON, in which infinite numbers are ``None`` or
    `NO_SIGNAL`."""
    if isinstance(value, Comparison):
        return {**_fields(value, but=(ROWS_KEY,)), "verdict": value.verdict}
    if isinstance(value, MeasuredSpeed):
        return json_value(value.to_dict())
    if is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    if isinstance(value, Mapping):
        return {str(key): json_value(one) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [json_value(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return NO_SIGNAL if value == -math.inf else None
    return str(value) if isinstance(value, Enum) else value


def _fields(record: Any, but: tuple[str, ...] = ()) -> dict[str, Any]:
    return {one.name: json_value(getattr(record, one.name)) for one in fields(record) if one.name not in but}


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def _decoded(kind: Any, value: Any) -> Any:
    """Return a value of JSON as the type that a field is annotated with. Raise `TypeError` or `ValueError` for a value
    that does not fit."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        return _record(kind, value)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (one for one in arguments if one is not types.NoneType)
        return None if value is None else _decoded(inner, value)
    if origin is tuple:
        inner = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_decoded(one, entry) for one, entry in zip(inner, _checked(list, value), strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: _decoded(arguments[1], entry) for key, entry in _checked(dict, value).items()}
    if kind is float:
        return math.inf if value is None else float(_checked((int, float), value))
    return kind(_checked(str, value)) if issubclass(kind, Enum) else _checked(kind, value)


def _record(kind: type, value: Any) -> Any:
    """Return the dataclass of a dictionary; fields that are missing get their defaults, others are ignored."""
    hints, entry = _hints(kind), _checked(dict, value)
    given = {one.name: _decoded(hints[one.name], entry[one.name]) for one in fields(kind) if one.name in entry}
    if kind is GraphReport and given.get("comparison") is not None:
        given["comparison"] = given["comparison"](given["operators"])
    if kind is Comparison:
        return lambda operators: Comparison(_rows(operators), **given)
    if kind is ReportData and given.get("comparison") is not None:
        alone = [one for graph in given["graphs"] if graph.comparison is None for one in graph.operators]
        given["comparison"] = given["comparison"](alone)
    return kind(**given)


def _rows(operators: Any) -> Any:
    """Return the rows of a comparison, the operator with the largest error of its own first."""
    found = [one.row for one in operators if one.row is not None]
    return tuple(sorted(found, key=lambda row: (row.alone, row.so_far)))


def _checked(kind: Any, value: Any) -> Any:
    """Return a value if it has this type. Raise `TypeError` otherwise."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{value!r:.60} is not a {getattr(kind, '__name__', 'number')}")
    return value
