"""The page of a report: one HTML file without requests, made by a template that escapes everything."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from intaglio.errors import InputError
from intaglio.reporting.pages import view
from intaglio.reporting.pages.colours import COLOUR_MODES
from intaglio.reporting.pages.details import payload
from intaglio.reporting.report_data import ReportData

if TYPE_CHECKING:
    from jinja2 import Template

FOLDER = Path(__file__).parent


def page_of(data: ReportData, other: ReportData | None = None) -> str:
    """Return the page of a report as HTML.

    Args:
        data: the content.
        other: the content of a report to show beside it.

    Raises:
        InputError: jinja2 is not installed.
    """
    style, script = _minified("page.css"), _minified("page.js")
    graphs = tuple(view.graph_views(data))
    rows = list(view.rows(data, other))
    others = [step.name for graph in data.graphs for step in graph.other_steps]
    comparison = data.comparison
    return template().render(
        data=data,
        other=other,
        title=f"intaglio report: {data.name}",
        heading=f"{data.name} in int8",
        verdict=_sentence(comparison.verdict) if comparison is not None else "",
        policy=_policy(style, script),
        style=style,
        script=script,
        cards=list(view.cards(data, other)),
        modes=COLOUR_MODES,
        graphs=graphs,
        losing=list(view.losing_rows(data)),
        suggestions=[view.suggestion_view(one) for one in data.suggestions],
        agreement=any(one.agreement_after is not None for one in data.suggestions),
        precisions=list(dict.fromkeys(row.precision for row in rows)),
        columns=[*view.COLUMNS, *(view.BESIDE if other is not None else ())],
        rows=rows,
        other_steps=", ".join(others),
        run=list(view.run_lines(data)),
        payload=_script_json(payload(data, graphs)),
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


@cache
def template() -> Template:
    """Return the template of the page. Values are escaped; an unknown name is an error."""
    try:
        import jinja2
    except ModuleNotFoundError as error:
        problem = "the page of a report needs the package jinja2"
        raise InputError("report", None, problem, remedy="install it with pip install 'intaglio[report]'") from error
    loader = jinja2.FileSystemLoader(FOLDER, encoding="utf-8")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["trusted"] = _trusted
    return environment.get_template("page.html")


def _trusted(text: str) -> object:
    """Return text of this package, which is not escaped."""
    from markupsafe import Markup

    return Markup(text)


@cache
def _minified(name: str) -> str:
    """Return a file of the page without the spaces at the beginning of lines."""
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    return "\n".join(line.strip() for line in lines if line.strip() and not line.strip().startswith("//"))


def _policy(style: str, script: str) -> str:
    """Return the policy that allows nothing but this style and this script, and no request at all."""
    styles, scripts = (_digest(text) for text in (style, script))
    return f"default-src 'none'; style-src {styles}; script-src {scripts}; base-uri 'none'; form-action 'none'"


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _script_json(value: object) -> str:
    """Return JSON that cannot end the element of the page that holds it."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
