"""The package keeps its shape: small files, functions and folders, no import cycles, one name for one thing.

There are no exceptions.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from support.project_files import syntax_nodes, syntax_tree

SOURCES = Path(__file__).parents[2] / "src"
PACKAGE = SOURCES / "intaglio"
MOST_FILES, MOST_LINES, MOST_LINES_OF_A_FUNCTION = 15, 400, 50
SHARED_NAMES = frozenset({"__init__", "__main__"})


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCES).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, known: Mapping[str, Path]) -> set[str]:
    """Return every module of the package that a file imports, inside functions and for type checking too."""
    found = set()
    for node in syntax_nodes(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            while name and name not in known:
                name = name.rpartition(".")[0]
            found.add(name)
    return {name for name in found if name} - {module_of(path)}


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in graph[name]:
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            component = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(component) > 1:
                found.append(sorted(component))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in syntax_nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def lines_of_code(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return a function's lines without its docstring."""
    first = node.body[0]
    documented = ast.get_docstring(node) is not None
    return node.end_lineno - node.lineno + 1 - (first.end_lineno - first.lineno + 1 if documented else 0)


def test_no_folder_has_more_than_fifteen_files():
    folders: dict[str, int] = defaultdict(int)
    for path in PACKAGE.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            folders[str(path.parent.relative_to(SOURCES))] += 1
    assert {folder: count for folder, count in folders.items() if count > MOST_FILES} == {}


def test_no_file_has_more_than_four_hundred_lines():
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".h", ".cpp", ".c", ".S")]
    lengths = {str(path.relative_to(SOURCES)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {file: count for file, count in lengths.items() if count > MOST_LINES} == {}


def test_no_function_has_more_than_fifty_lines():
    found = {}
    for path in python_files():
        for node in functions(path):
            if (count := lines_of_code(node)) > MOST_LINES_OF_A_FUNCTION:
                found[f"{path.relative_to(SOURCES)}:{node.name}"] = count
    assert found == {}


def test_no_modules_import_each_other():
    known = {module_of(path): path for path in python_files()}
    assert cycles({name: imported_modules(path, known) for name, path in known.items()}) == []


def test_a_cycle_is_found():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def shared(names: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return {name: places for name, places in sorted(names.items()) if len(places) > 1}


def test_no_two_modules_share_a_name():
    names = defaultdict(list)
    for path in python_files():
        if path.stem not in SHARED_NAMES:
            names[path.stem].append(str(path.relative_to(SOURCES)))
    assert shared(names) == {}


def test_no_two_classes_share_a_name():
    names = defaultdict(list)
    for path in python_files():
        for node in syntax_tree(path).body:
            if isinstance(node, ast.ClassDef):
                names[node.name].append(str(path.relative_to(SOURCES)))
    assert shared(names) == {}


def test_no_two_constants_share_a_name():
    names = defaultdict(list)
    for path in python_files():
        for node in syntax_tree(path).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                if isinstance(target, ast.Name) and re.fullmatch(r"[A-Z][A-Z0-9_]*", target.id):
                    names[target.id].append(str(path.relative_to(SOURCES)))
    assert shared(names) == {}
