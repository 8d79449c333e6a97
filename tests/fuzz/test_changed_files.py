"""A short run of the driver that changes files (`make fuzz-files` runs more)."""

import os
import signal

import pytest

from fuzz import files, isolated


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> files.Driver:
    return files.Driver(seed=1, folder=tmp_path_factory.mktemp("files"), names=("islands",))


def test_changed_files_are_refused_or_harmless(driver):
    for number in range(60):
        driver.run(number)


def test_crashes_hangs_and_errors_are_results_of_their_own_and_the_rest_runs():
    def run(number: int) -> str:
        if number == 1:
            raise ValueError("wrong")
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        while number == 3:
            pass
        return "fine"

    found = list(isolated.isolated(run, 0, 5, seconds=0.2))
    assert [(one.number, one.kind) for one in found] == [
        *((0, "fine"), (1, "error"), (2, "crash"), (3, "hang"), (4, "fine"))
    ]
    assert [one.failure is None for one in found] == [True, False, False, False, True]


def test_a_bias_that_does_not_fit_changed_parameters_is_refused(driver, monkeypatch):
    """The case changes a file of parameters, which is the same whatever models the driver has."""
    monkeypatch.setattr(driver, "seed", 20_000)
    assert driver.run(14_244) == "parameters refused"
