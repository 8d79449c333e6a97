"""Runs of the command line inside of the test process."""

from collections.abc import Callable

import pytest

from intaglio.cli import main

Run = Callable[..., tuple[int, str, str]]


def runner(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function of the words of a command that returns its exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        code = 0
        try:
            main(words)
        except SystemExit as ended:
            code = ended.code or 0
        return code, *capsys.readouterr()

    return run
