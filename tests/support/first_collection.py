"""The first collection of tests in a new environment, which writes the bytecode of all that is imported.

Workers that import the same modules at the same time compile each of them. The first worker therefore begins alone, and
the others follow when it has compiled most of them; on two cores, where types are checked beside the tests, they all
begin to run tests earlier.
"""

import sys
import time
from pathlib import Path

import pytest

FIRST = "gw0"
SHARE = 0.6
"""Share of the test files after which the other workers begin: they need a third of the first one's time."""
LONGEST = 120.0
"""Seconds after which they begin in any case."""


class FirstCollection:
    """Hooks of one worker, which is the first or waits for it."""

    def __init__(self, worker: str, stamp: Path, files: int) -> None:
        self.worker, self.stamp, self.left = worker, stamp, SHARE * files

    @staticmethod
    def of(worker: str | None, folder: Path) -> "FirstCollection | None":
        """Return the hooks of a worker for the tests of a folder, or ``None`` if bytecode is there already or is not
        written."""
        if worker is None or sys.pycache_prefix is None or sys.dont_write_bytecode:
            return None
        stamp = Path(sys.pycache_prefix) / "collected_tests"
        if stamp.exists():
            return None
        return FirstCollection(worker, stamp, sum(1 for _ in folder.rglob("test_*.py")))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Let all but the first worker wait."""
        end = time.monotonic() + LONGEST
        while self.worker != FIRST and not self.stamp.exists() and time.monotonic() < end:
            time.sleep(0.2)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Let the others begin when most files are collected."""
        self.left -= report.nodeid.endswith(".py")
        if self.left <= 0:
            self._finish()

    def pytest_collection_finish(self) -> None:
        """Let the others begin when fewer files than all are collected."""
        self._finish()

    def _finish(self) -> None:
        if self.worker == FIRST and not self.stamp.exists():
            self.stamp.parent.mkdir(parents=True, exist_ok=True)
            self.stamp.touch()
