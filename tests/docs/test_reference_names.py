"""The reference pages name objects and members that exist; only the slow build of the site would notice otherwise."""

import importlib
import re

import pytest

from support.project_files import ROOT

PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
DIRECTIVE = re.compile(r"^\.\. (currentmodule|autofunction|autoclass):: (\S+)|^   :members: (.+)$", re.MULTILINE)


def found(name: str) -> object:
    """Return the object of a dotted name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_on_reference_pages_exist(page):
    module, latest = "", None
    for directive, name, members in DIRECTIVE.findall(page.read_text(encoding="utf-8")):
        if directive == "currentmodule":
            module = name
        elif directive:
            latest = found(name if name.startswith("intaglio.") else f"{module}.{name}")
        else:
            fields = {field for kind in latest.__mro__ for field in vars(kind).get("__annotations__", {})}
            missing = [one for one in members.split(", ") if not hasattr(latest, one) and one not in fields]
            assert not missing, f"{latest.__name__} has no {', '.join(missing)}"
