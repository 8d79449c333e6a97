"""Remedies of errors of `search`: each is provoked, then followed."""

import sys

import pytest
import torch

import intaglio
from intaglio.errors import IntaglioError
from intaglio.mixed_precision.assignment_problem import solver
from intaglio.mixed_precision.objective import Objective
from intaglio.mixed_precision.precision_groups import candidates_of
from intaglio.mixed_precision.search_journal import SearchJournal
from intaglio.mixed_precision.search_start import SearchOptions


def metric(found: object, **options: object) -> float:
    return Objective(lambda _: found, **options).metric_of(None, "the float model")


REMEDIES = {
    "a metric that is no function": (
        lambda: Objective(0.9),
        "pass a function that takes a model and returns its metric",
        lambda: Objective(lambda model: 0.9),
    ),
    "a negative loss": (
        lambda: metric(0.9, max_drop=-0.01),
        "pass max_drop=0.01 to accept a loss of 1 %",
        lambda: metric(0.9, max_drop=0.01),
    ),
    "a latency of zero": (
        lambda: metric(0.9, max_latency=0),
        "pass a number of milliseconds, such as max_latency=5.0",
        lambda: metric(0.9, max_latency=5.0),
    ),
    "a size of zero": (
        lambda: metric(0.9, max_size=0.0),
        "pass a number of megabytes, such as max_size=5.0",
        lambda: metric(0.9, max_size=5.0),
    ),
    "another quantity": (
        lambda: metric(0.9, minimize="sizes"),
        "did you mean 'size'",
        lambda: metric(0.9, minimize="size"),
    ),
    "a metric of several numbers for each sample": (
        lambda: metric(torch.ones(3, 2)),
        "return one finite number, or an array with one for each sample, where higher is better; for a loss, return "
        "its negative",
        lambda: [metric(torch.ones(3).mean()), metric(torch.ones(3)), metric(-0.5)],
    ),
    "a single evaluation": (
        lambda: SearchOptions(evaluations=1),
        "pass evaluations=2 or more",
        lambda: SearchOptions(evaluations=2),
    ),
    "no minutes": (
        lambda: SearchOptions(budget=0.0),
        "pass budget=10 to search for ten minutes",
        lambda: SearchOptions(budget=10),
    ),
    "no candidates": (
        lambda: candidates_of({}, False),
        "pass settings by name: {'float': None}",
        lambda: candidates_of({"float": None}, False),
    ),
}


@pytest.mark.parametrize(("wrong", "remedy", "right"), REMEDIES.values(), ids=REMEDIES)
def test_following_the_remedy_of_a_search_error_removes_it(wrong, remedy, right):
    with pytest.raises(IntaglioError) as raised:
        wrong()
    assert remedy in raised.value.remedy
    right()


def test_a_missing_solver_is_found_before_any_work(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(IntaglioError, match=r"pip install 'intaglio\[search\]'"):
        SearchOptions()
    monkeypatch.undo()
    assert len(solver()) == 3


@pytest.mark.parametrize("text", ["no JSON\n", "[1, 2]\n", '{"journal": "another"}\n'])
def test_a_file_that_is_no_journal_is_refused(tmp_path, text):
    path = tmp_path / "journal.jsonl"
    path.write_text(text)
    with pytest.raises(IntaglioError, match="delete it, or pass the name of another file"):
        SearchJournal(path, "key")
    path.unlink()
    SearchJournal(path, "key").add("float", "", metric=1.0)
    assert SearchJournal(path, "key").known("float", "")["metric"] == 1.0


def test_the_journal_of_another_search_is_refused(tmp_path):
    path = tmp_path / "journal.jsonl"
    SearchJournal(path, "one")
    with pytest.raises(IntaglioError, match="another model, recipe, calibration or machine"):
        SearchJournal(path, "other")
    SearchJournal(tmp_path / "another.jsonl", "other")


def test_a_journal_in_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(IntaglioError, match="pass a journal in another folder"):
        SearchJournal(tmp_path / "missing" / "journal.jsonl", "key")
    SearchJournal(tmp_path / "journal.jsonl", "key")


def test_search_is_a_public_name():
    assert intaglio.search.__name__ == "search"
