"""Displays of progress: a line of a terminal, or one below the cell of a notebook."""

from __future__ import annotations

import importlib
import time
from typing import Any, Protocol

UPDATE_SECONDS = 0.2
"""Shortest time between two updates of the output of a notebook."""


class Display(Protocol):
    """Interface of what shows progress."""

    def show(self, stage: str, done: int, total: int | None, what: str) -> None:
        """Show that ``done`` of ``total`` parts of a stage are done, and ``what`` is at work."""

    def close(self) -> None:
        """Remove what was shown."""


class TerminalDisplay:
    """A line at the end of a terminal: stage, bar, time left, and what is at work."""

    def __init__(self) -> None:
        from rich.console import Console  # Imported here, because it takes a tenth of a second.
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self.bar = Progress(
            *(TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
            *(TimeRemainingColumn(compact=True), TextColumn("{task.fields[what]}", markup=False)),
            console=Console(stderr=True),
            transient=True,
        )
        self.stage, self.task = "", self.bar.add_task("", total=None, what="")
        self.bar.start()

    def show(self, stage: str, done: int, total: int | None, what: str) -> None:
        """Show that ``done`` of ``total`` parts of a stage are done, and ``what`` is at work."""
        if stage != self.stage:
            self.bar.remove_task(self.task)
            self.stage, self.task = stage, self.bar.add_task(stage, total=total, what=what)
        self.bar.update(self.task, completed=done, total=total, what=what)

    def close(self) -> None:
        """Remove what was shown."""
        self.bar.stop()


class NotebookDisplay:
    """A line below the cell of a notebook."""

    def __init__(self) -> None:
        display: Any = importlib.import_module("IPython.display").display
        self.output = display({"text/plain": ""}, raw=True, display_id=True)
        self.stage, self.updated = "", 0.0

    def show(self, stage: str, done: int, total: int | None, what: str) -> None:
        """Show that ``done`` of ``total`` parts of a stage are done, and ``what`` is at work."""
        now = time.monotonic()
        if stage != self.stage or now - self.updated > UPDATE_SECONDS:
            self.stage, self.updated = stage, now
            count = "" if total is None else f" {done} of {total}"
            self.output.update({"text/plain": f"{stage}{count} {what}".rstrip()}, raw=True)

    def close(self) -> None:
        """Remove what was shown."""
        self.output.update({"text/plain": ""}, raw=True)
