"""Progress of long work: what is shown, in which order, and that nothing is shown where it should not be."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import intaglio
from intaglio import progress
from intaglio.errors import CalibrationError

NET = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).eval()
DATA = [torch.randn(4, 3, 8, 8) for _ in range(3)]


class Recorder:
    """A display that keeps what it was to show."""

    def __init__(self) -> None:
        self.seen: list[tuple] = []
        self.closed = 0

    def show(self, stage, done, total, what):
        self.seen.append((stage, done, total, what))

    def close(self):
        self.closed += 1


@pytest.fixture
def display(monkeypatch):
    found = Recorder()
    monkeypatch.setattr(progress, "_display", lambda show: None if show is False else found)
    return found


def test_quantize_shows_all_stages_with_their_numbers_and_layers(display):
    intaglio.quantize(NET, DATA, progress=True)
    stages = list(dict.fromkeys(stage for stage, *_ in display.seen))
    assert stages == ["1/5 capture", "2/5 equalize", "3/5 calibrate", "4/5 correct", "5/5 compile"]
    calibrated = [(done, total) for stage, done, total, _ in display.seen if stage == "3/5 calibrate"]
    assert calibrated == [(0, 3), (1, 3), (2, 3), (3, 3)]
    corrected = [(done, total, what) for stage, done, total, what in display.seen if stage == "4/5 correct"]
    assert corrected == [(0, 2, "0"), (1, 2, "3")]
    assert display.closed == 1


def test_compare_shows_how_many_samples_are_done(display):
    model = intaglio.quantize(NET, DATA, progress=False)
    intaglio.compare(NET, model, DATA, samples=12, progress=True)
    assert [entry for entry in display.seen if entry[0] == "compare"] == [("compare", n, 12, "") for n in (0, 4, 8)]
    count = len(display.seen)
    intaglio.compare(NET, model, DATA, progress=False)
    assert len(display.seen) == count


def test_quantize_names_the_part_at_work(display):
    class Chosen(nn.Module):
        """A network that calls one of its blocks for the values of an input, so that its blocks are quantized."""

        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])

        def forward(self, x):
            return self.blocks[int(x.sum() > 0)](x)

    data = [torch.rand(4, 4), -torch.rand(4, 4)]
    assert len(intaglio.quantize(Chosen().eval(), data, progress=True).parts) == 2
    stages = list(dict.fromkeys(stage for stage, *_ in display.seen))
    assert stages[:3] == ["1/5 capture", "blocks.0: 1/5 capture", "blocks.1: 1/5 capture"]
    names = list(dict.fromkeys(stage.partition(":")[0] for stage in stages[3:]))
    assert names == ["blocks.0, part 1 of 2", "blocks.1, part 2 of 2"]
    assert "blocks.1, part 2 of 2: 3/5 calibrate" in stages


@pytest.mark.slow(reason="a report with changes; quantize shows its stages above")
def test_report_and_explain_show_the_changes_they_try(display):
    model = intaglio.quantize(NET, DATA, progress=False)
    intaglio.report(NET, model, DATA, calls=2, tries=1, progress=True)
    stages = list(dict.fromkeys(stage for stage, *_ in display.seen))
    assert stages == ["1/5 capture", "2/5 compare", "3/5 profile", "4/5 measure", "5/5 changes"]
    changes = [(done, total, what) for stage, done, total, what in display.seen if stage == "5/5 changes"]
    assert [done for done, _, _ in changes] == list(range(changes[0][1]))
    assert all(what for _, _, what in changes)
    display.seen.clear()
    intaglio.explain(model, "0", NET, DATA, calls=2, progress=True)
    explained = {stage for stage, *_ in display.seen}
    assert explained == {"1/4 capture", "2/4 compare", "3/4 profile", "4/4 changes"}  # the float model is not timed
    assert display.closed == 2


@pytest.mark.slow(reason="a search; quantize shows its stages above")
def test_search_shows_its_stages_and_trials(display):
    metrics = iter([1.0, 0.5, 0.6, 0.7, 0.8, 0.9])
    options = {"candidates": {"float": None}, "minimize": "size", "evaluations": 3}
    with pytest.warns(UserWarning, match="no trial reaches the metric"):
        intaglio.search(NET, DATA, lambda model: next(metrics), progress=True, **options)
    stages = list(dict.fromkeys(stage for stage, *_ in display.seen))
    assert stages[-4:] == ["8/9 trials", "5/9 candidates", "6/9 errors", "9/9 measure"]
    trials = [(done, total) for stage, done, total, _ in display.seen if stage == "8/9 trials"]
    assert trials == [(1, 3), (2, 3)]


def test_nothing_is_shown_if_it_is_switched_off(display):
    intaglio.quantize(NET, DATA, progress=False)
    assert display.seen == []
    assert display.closed == 0


def test_the_default_shows_nothing_in_a_pipe(capfd):
    intaglio.quantize(NET, DATA)
    assert "calibrate" not in capfd.readouterr().err


def test_of_several_processes_one_shows_progress(display):
    shown = progress.shows_progress("stage", only_if=lambda: False)(lambda progress=None: None)
    shown(progress=True)
    assert display.closed == 0


def test_work_without_parts_is_reported_as_such(display):
    with progress.progress_shown(True):
        assert list(progress.track([], "stage", 0)) == []
    assert display.seen == [("stage", 0, 0, "")]


def test_an_error_removes_what_is_shown(display):
    with pytest.raises(CalibrationError):
        intaglio.quantize(NET, [DATA[0], DATA[0] * float("nan")], progress=True)
    assert display.closed == 1
    progress.report_progress("capture")
    assert display.seen[-1][0] != "capture"


def test_an_inner_context_leaves_the_outer_one_as_it_is(display):
    with progress.progress_shown(True, ("first", "second")):
        with progress.progress_shown(True, ("other",)):
            progress.report_progress("second", 1, 2, "x")
        progress.report_progress("first")
    assert display.seen == [("2/2 second", 1, 2, "x"), ("1/2 first", 0, None, "")]
    assert display.closed == 1


def test_a_terminal_shows_the_stage_and_the_part_at_work(capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress.progress_shown(True, ("first", "second")):
        assert list(progress.track(range(3), "first", 3)) == [0, 1, 2]
        with progress.progress_of("blocks.[bold]0"):
            progress.report_progress("second", 2, 3, "layer [bold]1")
    text = capfd.readouterr().err
    assert "blocks.[bold]0: 2/2 second" in text
    assert "layer [bold]1" in text


def test_a_notebook_gets_one_line_that_is_empty_at_the_end(monkeypatch):
    shown, shell = [], type("ZMQInteractiveShell", (), {})()
    handle = SimpleNamespace(update=lambda content, raw: shown.append(content["text/plain"]))
    display = SimpleNamespace(display=lambda content, raw, display_id: handle)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    with progress.progress_shown(None, ("first", "second")):
        progress.report_progress("first")
        progress.report_progress("second", 1, 4, "layer")
    assert shown == ["1/2 first", "2/2 second 1 of 4 layer", ""]
