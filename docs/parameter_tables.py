"""A Sphinx extension: parameters and attributes of the Python API as tables with types, defaults and meanings.

Napoleon turns the sections "Args" and "Attributes" of a docstring into fields; this extension turns the fields into
tables. Types and defaults are those of the signature, as they are written in the source.
"""

import importlib
import inspect
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

EMPTY = inspect.Parameter.empty
TABLES = {"param": "Parameters", "ivar": "Attributes"}
"""Field that Napoleon writes -> title of the table that it becomes a row of."""


def documented(content: addnodes.desc_content) -> Any:
    """Return the object that a description is about."""
    signature = content.parent[0]
    found: Any = importlib.import_module(signature["module"])
    for name in signature["fullname"].split("."):
        found = (
            inspect.getattr_static(found, name)
            if inspect.isclass(found)
            else getattr(found, name)
        )
    if isinstance(found, (classmethod, staticmethod)):
        return found.__func__
    return found


def types_and_defaults(thing: Any) -> dict[str, tuple[str, str]]:
    """Return type and default of every parameter and annotated attribute, as texts; empty where there is none."""
    found: dict[str, tuple[str, str]] = {}
    if inspect.isclass(thing):
        for base in reversed(thing.__mro__):
            found |= {
                name: (text_of(kind), "")
                for name, kind in vars(base).get("__annotations__", {}).items()
            }
            found |= {
                name: (returned(value), "")
                for name, value in vars(base).items()
                if returned(value)
            }
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return found
    for parameter in parameters:
        kind = found.get(parameter.name, ("", ""))[0] or text_of(parameter.annotation)
        found[parameter.name] = kind, default_of(parameter.default)
    return found


def returned(value: Any) -> str:
    """Return the type of a property."""
    getter = (
        value.fget
        if isinstance(value, property)
        else value.func
        if isinstance(value, cached_property)
        else None
    )
    return text_of(inspect.signature(getter).return_annotation) if getter else ""


def text_of(annotation: Any) -> str:
    if annotation is EMPTY:
        return ""
    return (
        annotation
        if isinstance(annotation, str)
        else inspect.formatannotation(annotation)
    )


def default_of(value: Any) -> str:
    if value is EMPTY:
        return ""
    if callable(value):
        return f"{value.__name__}" if hasattr(value, "__name__") else "computed"
    text = str(value) if type(value).__module__ != "builtins" else repr(value)
    return "computed" if text.startswith("<") else text


def make_tables(
    app: Sphinx, domain: str, kind: str, content: addnodes.desc_content
) -> None:
    """Replace the fields of parameters, and those of attributes, by a table each."""
    if domain != "py":
        return
    for fields in content.findall(nodes.field_list):
        for prefix, title in TABLES.items():
            rows = [field for field in fields if words(field)[0] == prefix]
            if rows:
                known = types_and_defaults(documented(content))
                body = nodes.field_body(
                    "", table([row(field, known) for field in rows], title[:-1])
                )
                fields.insert(
                    fields.index(rows[0]),
                    nodes.field("", nodes.field_name("", title), body),
                )
                for field in rows:
                    fields.remove(field)


def words(field: nodes.field) -> list[str]:
    return field[0].astext().split(maxsplit=1)


def row(
    field: nodes.field, known: dict[str, tuple[str, str]]
) -> list[list[nodes.Node]]:
    """Return the cells of a parameter: name with type and default below it, and meaning."""
    name = words(field)[1].replace("\\", "")
    kind, default = known.get(name.lstrip("*"), ("", ""))
    first = [nodes.paragraph("", "", nodes.literal(name, name, classes=["name"]))]
    written = " = ".join(text for text in (kind, default) if text)
    if written:
        first.append(
            nodes.paragraph("", "", nodes.literal(written, written), classes=["type"])
        )
    return [first, list(field[1].children)]


def table(rows: list[list[list[nodes.Node]]], first: str) -> nodes.table:
    group = nodes.tgroup(
        "", nodes.colspec(colwidth=35), nodes.colspec(colwidth=65), cols=2
    )
    group += nodes.thead(
        "", line([[nodes.paragraph("", text)] for text in (first, "Meaning")])
    )
    group += nodes.tbody("", *map(line, rows))
    return nodes.table("", group, classes=["parameters"])


def line(cells: list[list[nodes.Node]]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", *cell) for cell in cells))


def link_by_last_name(
    app: Sphinx, env: Any, node: addnodes.pending_xref, text: nodes.Element
) -> nodes.Node | None:
    """Link a name in a docstring that is documented in another module, if exactly one has it."""
    if node.get("refdomain") != "py":
        return None
    found = dict(candidates(env.get_domain("py").objects, node["reftarget"]))
    if len(found) != 1:
        return None
    ((name, entry),) = found.items()
    reference = nodes.reference("", "", text, internal=True, reftitle=name)
    address = app.builder.get_relative_uri(node["refdoc"], entry.docname)
    reference["refuri"] = f"{address}#{entry.node_id}"
    return reference


def candidates(objects: dict[str, Any], target: str) -> Iterator[tuple[str, Any]]:
    return (
        (name, entry) for name, entry in objects.items() if name.endswith(f".{target}")
    )


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("object-description-transform", make_tables, priority=900)
    app.connect("missing-reference", link_by_last_name)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
