"""Code outside `ops` asks an operator's record; it does not compare the operator's kind with text."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import intaglio
from intaglio.ops import BY_NAME, BY_TARGET, OpDef, index
from support.project_files import syntax_nodes, syntax_tree

SOURCE = Path(intaglio.__file__).parent
KINDS = ("kind", "record.name", "operator", "target")

ALLOWED: dict[str, tuple[int, str]] = {
    "ir/graph.py": (3, "kinds with a meaning of their own, which `Op.is_island`, `is_host` and `is_loop` ask for"),
    "lower/accumulators.py": (1, "the number behind a product is a factor or a divisor"),
    "lower/region_lowering.py": (2, "each operator's own operands are built by a function of its own"),
    "quant/annotate/image_inputs.py": (1, "scales per channel fold into a convolution of images only"),
    "quant/equalization/apply_equalization.py": (1, "equalization knows how it undoes a factor in an operator"),
    "quant/equalization/scalable_results.py": (3, "equalization knows which operators undo a factor"),
    "quant/correct/second_moments.py": (1, "second moments of rows and columns of pixels"),
    "quant/recipes/user_patterns.py": (1, "a user's record may not take a name that exists"),
}
"""File -> comparisons that stay in it, and why. An entry may shrink or go; none may grow or come."""


def comparisons(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every comparison of a kind, or of a record's name, with text in a file."""
    tree = syntax_tree(path)
    constants = {
        target.id
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and _is_text(node.value, set())
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    constants |= {name for node in tree.body if isinstance(node, ast.ImportFrom) for name in _upper(node)}
    for node in syntax_nodes(path):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            asks = any(map(_is_kind, sides)) and any(_is_text(side, constants) for side in sides if not _is_kind(side))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asks = node.func.attr in ("startswith", "endswith", "removeprefix") and _is_kind(node.func.value)
        elif isinstance(node, ast.Match):
            asks = _is_kind(node.subject)
        elif isinstance(node, ast.Subscript):
            asks = _is_kind(node.slice) and isinstance(node.value, ast.Name) and node.value.id in constants
        else:
            asks = False
        if asks:
            yield node.lineno, ast.unparse(node)


def _upper(node: ast.ImportFrom) -> set[str]:
    """Constants that a file imports from another one; which of them are text is not asked."""
    return {alias.asname or alias.name for alias in node.names if alias.name.isupper()}


def _is_kind(node: ast.expr) -> bool:
    """``op.kind``, and the name of a record: ``record.name``, ``record_of(node).name``, ``known_record(node).name``."""
    if not isinstance(node, ast.Attribute) or node.attr not in ("kind", "name"):
        return False
    if node.attr == "kind":
        return not _ends_with(node.value, ("dtype", "p", "spec", "placed"))
    return _ends_with(node.value, ("record", "record_of", "known_record", "op_def"))


def _ends_with(node: ast.expr, names: tuple[str, ...]) -> bool:
    node = node.func if isinstance(node, ast.Call) else node
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")) in names


def _is_text(node: ast.expr, constants: set[str]) -> bool:
    """Whether an expression is text or a collection of text, or a constant that is."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(_is_text(item, constants) for item in node.elts)
    if isinstance(node, ast.Starred):
        return _is_text(node.value, constants)
    if isinstance(node, ast.Dict):
        return any(key is not None and _is_text(key, constants) for key in node.keys)
    if isinstance(node, ast.Call):  # frozenset({...}), dict.fromkeys(...)
        return any(_is_text(argument, constants) for argument in node.args)
    return isinstance(node, ast.Name) and node.id in constants


@cache
def found() -> dict[str, list[tuple[int, str]]]:
    """Comparisons by file, of all files outside `ops`."""
    files = sorted(path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "ops")
    return {str(path.relative_to(SOURCE)): lines for path in files if (lines := list(comparisons(path)))}


def test_code_outside_ops_asks_the_record_and_compares_no_kind_with_text():
    lines = found()
    wrong = {path: lines[path] for path in lines if len(lines[path]) > ALLOWED.get(path, (0, ""))[0]}
    assert not wrong


def test_the_list_of_exceptions_only_shrinks():
    lines = found()
    stale = {path: count for path, (count, _) in ALLOWED.items() if len(lines.get(path, [])) < count}
    assert not stale
    assert sum(count for count, _ in ALLOWED.values()) <= 14


def test_an_overload_has_one_record():
    """Where constants decide between two, the first names the second."""
    count = Counter(target for record in BY_NAME.values() for target in record.targets)
    named = {
        target for record in BY_NAME.values() for other in record.if_not_constant.values() for target in other.targets
    }
    assert {target for target in count if count[target] > 1} == named
    assert set(BY_TARGET) == set(count)
    with pytest.raises(ValueError, match=r"have the target aten\.sqrt\.default: a and b"):
        index([OpDef("a", ("aten.sqrt.default",)), OpDef("b", ("aten.sqrt.default",))])


def test_comparisons_are_recognized_in_every_spelling(tmp_path):
    """The oracle fails: each of these lines is one comparison."""
    path = tmp_path / "some.py"
    lines = [
        'a = op.kind == "add"',
        'b = op.kind in ("add", "mul")',
        "c = op.kind not in NAMES",
        'd = op.kind.startswith("conv")',
        'e = record_of(node).name == "clamp"',
        "f = TABLE[op.kind]",
        "g = op.kind in (*NAMES, *OTHERS)",
        'match op.kind:\n    case "add":\n        pass',
    ]
    path.write_text(
        "\n".join(['from x import OTHERS\nNAMES = ("add",)\nTABLE = {"add": 1}', *lines, "h = op.kind == other"])
    )
    assert len(list(comparisons(path))) == len(lines)
