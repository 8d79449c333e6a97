"""Rules of the tests themselves: rooms as in src, helpers in support, cases in markers."""

import ast
import re
from collections.abc import Iterable

import pytest

from support.known_problems import NOT_TESTED, PROBLEMS
from support.project_files import ROOT, TESTS, syntax_nodes, syntax_tree

BESIDE_THE_PACKAGE = {"docs", "end_to_end", "fuzz", "golden", "support"}
MOST_FILES = 15
QUANTIZES = re.compile(r"(report_models|stages|eager)\.[a-z]\w*|(intaglio\.)?(quantize|report|bench|search|tune|load)")
CASE = re.compile(r"(backend|calibration|document|(export )?problem|patterns row) \d+|(frontends|patterns) [A-D]\d+")
NUMBERED = re.compile(r"test_(backend|calibration|cases?|defect|eager|frontends?|(export_)?problem|row)_[a-d]?\d")


FILES = sorted(TESTS.rglob("*.py"))
TEST_FILES = [path for path in FILES if path.name.startswith("test_")]


def imported(nodes: Iterable[ast.AST]) -> list[tuple[str, str]]:
    """Every (module, name) that a file imports; the name of ``import a.b`` is empty."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.module or "", alias.name) for alias in node.names]
    return found


def private_imports(pairs: list[tuple[str, str]]) -> list[str]:
    names = [f"{module}.{name}" for module, name in pairs if f"{module}.".startswith("intaglio.")]
    return [name for name in names if re.search(r"\._(?!_)", name)]


def functions(nodes: Iterable[ast.AST]) -> list[ast.FunctionDef]:
    return [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]


def calls_when_imported(tree: ast.Module) -> list[str]:
    """Names of the functions that are called when a file is imported: at its top level, in decorators and defaults."""
    found, left = [], list(ast.iter_child_nodes(tree))
    while left:
        node = left.pop()
        if isinstance(node, ast.Call):
            found.append(ast.unparse(node.func))
        if isinstance(node, ast.FunctionDef):
            left += [*node.decorator_list, node.args]
        elif not isinstance(node, ast.Lambda):
            left += ast.iter_child_nodes(node)
    return found


def is_marker(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name and ast.unparse(node) == f"pytest.mark.{name}"


def cases(nodes: Iterable[ast.AST]) -> list[str]:
    """Strings in the ``case`` markers of a file, those of its parameters included."""
    calls = [n for n in nodes if isinstance(n, ast.Call) and is_marker(n.func, "case")]
    return [argument.value for call in calls for argument in call.args if isinstance(argument, ast.Constant)]


def test_folders_of_tests_mirror_the_package():
    rooms = {path.parent.relative_to(TESTS).as_posix() for path in TEST_FILES} - {"."}
    package = ROOT / "src" / "intaglio"
    assert not {room for room in rooms - BESIDE_THE_PACKAGE if not list(package.glob(f"{room}*"))}


def test_no_test_folder_has_too_many_files():
    rooms = {path.parent for path in TEST_FILES}
    assert not {room.name: n for room in rooms if (n := len(list(room.glob("test_*.py")))) > MOST_FILES}


def test_names_of_files_are_unique():
    """Golden texts are kept by them."""
    names = [path.name for path in TEST_FILES]
    assert not {name for name in names if names.count(name) > 1}


def test_no_test_imports_another_test_and_none_a_private_name():
    for path in FILES:
        pairs = imported(syntax_nodes(path))
        tests = [module for module, _ in pairs if re.search(r"(^|\.)test_", module)]
        assert not tests, f"{path.name} imports {tests}: what two files need goes to tests/support"
        assert not private_imports(pairs), path.name


def test_names_say_behaviour_and_cases_are_markers():
    for path in TEST_FILES:
        numbered = [node.name for node in functions(syntax_nodes(path)) if NUMBERED.match(node.name)]
        assert not numbered, f"{path.name}: {numbered}; the number goes to @pytest.mark.case"
        assert not [case for case in cases(syntax_nodes(path)) if not CASE.fullmatch(case)], path.name


def test_slow_tests_have_a_reason():
    for path in TEST_FILES:
        slow = [node for node in syntax_nodes(path) if is_marker(node, "slow")]
        calls = [node for node in syntax_nodes(path) if isinstance(node, ast.Call) and node.func in slow]
        assert len(calls) == len(slow), path.name
        assert all([keyword.arg for keyword in call.keywords] == ["reason"] for call in calls), path.name


def test_every_known_problem_has_a_test_or_a_reason():
    assert sorted([*PROBLEMS, *NOT_TESTED]) == list(range(1, 41))
    named = {case for path in TEST_FILES for case in cases(syntax_nodes(path))}
    assert not {number for number in PROBLEMS if f"problem {number}" not in named}
    assert {int(case.split()[1]) for case in named if case.startswith("problem ")} <= set(PROBLEMS)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from intaglio.lower.lowering import _simulated", ["intaglio.lower.lowering._simulated"]),
        ("import intaglio._hidden", ["intaglio._hidden."]),
        ("from intaglio import __version__\nfrom torch import _C", []),
    ],
)
def test_a_private_import_is_seen(text, found):
    assert private_imports(imported(ast.walk(ast.parse(text)))) == found


def test_no_file_quantizes_a_model_when_it_is_imported():
    """Every process that runs tests imports all files first."""
    for path in FILES:
        called = [name for name in calls_when_imported(syntax_tree(path)) if QUANTIZES.fullmatch(name)]
        assert not called, f"{path.name} calls {called} for every test of the suite: call it in the test"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("MODEL = f(g(1))", ["f", "g"]),
        ("@mark.parametrize('x', [a.b()])\ndef test(x=c()):\n    d()", ["a.b", "c", "mark.parametrize"]),
        ("MAKE = lambda: f()", []),
    ],
)
def test_calls_of_an_import_are_seen(text, found):
    assert sorted(calls_when_imported(ast.parse(text))) == found
