"""The tables of `problems.py` say what is true of the tests."""

import ast
import re
from pathlib import Path

import pytest

from problems import CASES, LATER, PROBLEMS

FILES = sorted(Path(__file__).parent.glob("test_*.py"))
NUMBERS = re.compile(r"[Pp]roblems? (\d+)(?: and (\d+))?")


def functions(text: str) -> dict[str, str]:
    """Name of every test function -> its docstring."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_docstring(node) or "" for node in found if node.name.startswith("test_")}


TESTS = {
    f"{file.name}::{name}": said for file in FILES for name, said in functions(file.read_text(encoding="utf-8")).items()
}


def test_every_problem_has_a_test_or_says_what_it_waits_for():
    assert sorted([*PROBLEMS, *LATER]) == list(range(1, 41))
    assert all(tests for _, tests in PROBLEMS.values())


@pytest.mark.parametrize("key", [*PROBLEMS, *CASES])
def test_the_tests_named_exist(key):
    named = CASES[key] if isinstance(key, str) else PROBLEMS[key][1]
    assert len(set(named)) == len(named) > 0
    assert not set(named) - set(TESTS)


def test_a_test_that_names_a_problem_is_in_its_row():
    missing = []
    for test, said in TESTS.items():
        for match in NUMBERS.finditer(said):
            missing += [f"{n}: {test}" for n in match.groups() if n and test not in PROBLEMS[int(n)][1]]
    assert not missing


def test_a_test_that_is_gone_is_noticed():
    text = 'def test_one():\n    """Problems 2 and 3."""\n'
    assert functions(text) == {"test_one": "Problems 2 and 3."}
    assert functions(text.replace("test_one", "one")) == {}
    assert NUMBERS.search("Problems 2 and 3.").groups() == ("2", "3")
