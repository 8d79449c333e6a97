"""The import table of docs/architecture.md holds for every file of the package."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.project_files import ROOT, syntax_nodes

TABLE = ROOT / "docs" / "architecture.md"
SOURCES = ROOT / "src"


@dataclass(frozen=True)
class Rule:
    allowed: frozenset[str]
    torch: bool


def read_table(text: str) -> dict[str, Rule]:
    """Package → rule, in the table's order; a row that allows what stands below it is an error."""
    rules: dict[str, Rule] = {}
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("| package | may import | torch |"):
            break
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            break
        package, allowed, torch = (cell.strip() for cell in line.strip("|").split("|"))
        assert torch in ("yes", "no"), f"{package}: the torch column says {torch!r}, not yes or no"
        match allowed:
            case "nothing":
                names = set()
            case "everything above":
                names = set(rules)
            case _:
                names = {name.strip() for name in allowed.split(",")}
        assert names <= set(rules), f"{package}: {sorted(names - set(rules))} must stand above it to be allowed"
        rules[package] = Rule(frozenset(names), torch == "yes")
    return rules


def imports(nodes: Iterable[ast.AST], file: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import wherever it stands; relative names resolved, imported names appended."""
    folder = Path(file).parent.parts
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else ()
            stem = [*base, *([node.module] if node.module else [])]
            for alias in node.names:
                yield node.lineno, ".".join([*stem, alias.name])


def package_of(file: str) -> str:
    """'intaglio/ir/dims.py' → 'ir', 'intaglio/errors.py' → 'errors', 'intaglio/__init__.py' → 'intaglio'."""
    name = Path(file).parts[1].removesuffix(".py")
    return "intaglio" if name == "__init__" else name


def violations(nodes: Iterable[ast.AST], file: str, rules: dict[str, Rule]) -> list[str]:
    """One line for each import among `nodes` that the rule of its package forbids; `file` is relative to src."""
    package = package_of(file)
    if package not in rules:
        return [f"src/{file}:1: package '{package}' has no row in {TABLE.relative_to(ROOT)}"]
    rule, found = rules[package], []
    for line, name in imports(nodes, file):
        top, *rest = name.split(".")
        if top == "intaglio":
            # A name that is no package comes from intaglio/__init__.py, the row `intaglio`.
            target = rest[0] if rest and rest[0] in rules else "intaglio"
            if target != package and target not in rule.allowed:
                found.append(f"src/{file}:{line}: {package} may not import {target} ({name})")
        elif not rule.torch and "torch" in (top, *rest):
            found.append(f"src/{file}:{line}: {package} may not import torch ({name})")
    return found


RULES = read_table(TABLE.read_text(encoding="utf-8"))


def test_packages_import_only_what_the_table_allows():
    paths = sorted((SOURCES / "intaglio").rglob("*.py"))
    assert paths, "there is no source to check"
    found = []
    for path in paths:
        file = path.relative_to(SOURCES).as_posix()
        found += violations(syntax_nodes(path), file, RULES)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("file", "source", "broken"),
    [
        ("intaglio/errors.py", "from intaglio import config", "src/intaglio/errors.py:1: errors may not import config"),
        ("intaglio/errors.py", "from . import config", "errors.py:1: errors may not import config"),
        ("intaglio/ir/dims.py", "from ..ops import table", "dims.py:1: ir may not import ops"),
        ("intaglio/ir/__init__.py", "from ..ops import table", "ir/__init__.py:1: ir may not import ops"),
        ("intaglio/ops/a/b.py", "from ...quant.observers import Range", "b.py:1: ops may not import quant"),
        ("intaglio/ir/dims.py", "def f():\n    import torch", "dims.py:2: ir may not import torch"),
        ("intaglio/build/run.py", "from torch.nn import Module", "run.py:1: build may not import torch"),
        ("intaglio/native/load.py", "import safetensors.torch", "load.py:1: native may not import torch"),
        ("intaglio/ir/dims.py", "import intaglio", "dims.py:1: ir may not import intaglio"),
        ("intaglio/quant/run.py", "from intaglio import quantize", "run.py:1: quant may not import intaglio"),
        ("intaglio/misc/x.py", "", "x.py:1: package 'misc' has no row"),
    ],
)
def test_a_forbidden_import_is_found(file, source, broken):
    (found,) = violations(ast.walk(ast.parse(source)), file, RULES)
    assert broken in found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("intaglio/ir/dims.py", "from . import graph\nfrom .graph import Graph\nfrom ..errors import IntaglioError"),
        ("intaglio/lower/run.py", "import torch\nfrom intaglio.quant import Reference"),
        ("intaglio/__init__.py", "from .api import quantize\nfrom . import errors"),
    ],
)
def test_an_allowed_import_passes(file, source):
    assert violations(ast.walk(ast.parse(source)), file, RULES) == []


def test_a_fusion_row_that_refers_to_a_later_row_is_refused():
    text = "| package | may import | torch |\n| --- | --- | --- |\n| errors | ir | no |\n| ir | nothing | no |\n"
    with pytest.raises(AssertionError, match=r"errors: .'ir'. must stand above it"):
        read_table(text)
