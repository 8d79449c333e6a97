"""Progress of work that takes long, on terminals and in notebooks.

Stages call `report_progress`, which does nothing unless a caller shows progress with `progress_shown`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from intaglio import config
from intaglio.progress.displays import Display, NotebookDisplay, TerminalDisplay

Function = TypeVar("Function", bound=Callable[..., Any])
Item = TypeVar("Item")

_shown: ContextVar[tuple[Display, Sequence[str]] | None] = ContextVar("shown", default=None)
_module: ContextVar[str] = ContextVar("module", default="")


def report_progress(stage: str, done: int = 0, total: int | None = None, what: str = "") -> None:
    """Report how far a stage is. Nothing happens unless progress is shown, or if it is shown for other stages.

    Args:
        stage: what is done, such as "calibrate".
        done: number of parts that are done.
        total: number of all parts, or ``None`` if it is unknown.
        what: the part at work, such as the path of a layer.
    """
    if (shown := _shown.get()) is not None:
        display, stages = shown
        if len(stages) > 1:
            if stage not in stages:
                return
            stage = f"{stages.index(stage) + 1}/{len(stages)} {stage}"
        module = _module.get()
        display.show(f"{module}: {stage}" if module else stage, done, total, what)


def track(items: Iterable[Item], stage: str, total: int | None) -> Iterator[Item]:
    """Yield items, and report how many of a stage are done."""
    report_progress(stage, 0, total)
    for done, item in enumerate(items, 1):
        yield item
        report_progress(stage, done, total)


@contextmanager
def progress_of(module: str) -> Iterator[None]:
    """Show the name of a module in front of its stages, where several modules have the same stages."""
    token = _module.set(module)
    try:
        yield
    finally:
        _module.reset(token)


@contextmanager
def progress_shown(show: bool | None, stages: Sequence[str] = ()) -> Iterator[None]:
    """Show the progress of what happens inside of the context, and remove it at the end, also if that is an error.

    Inside of another such context nothing changes.

    Args:
        show: whether to show it; ``None``: on a terminal and in a notebook, unless the environment says otherwise.
        stages: names of all stages in their order, if there are several.
    """
    display = None if _shown.get() is not None else _display(show)
    if display is None:
        yield
        return
    token = _shown.set((display, stages))
    try:
        yield
    finally:
        _shown.reset(token)
        display.close()


def shows_progress(*stages: str, only_if: Callable[[], bool], last: str = "") -> Callable[[Function], Function]:
    """Let a function show its progress, if its keyword argument ``progress`` allows it.

    Args:
        stages: names of its stages in their order.
        only_if: whether this process shows progress at all; of several that work together, one does.
        last: the name of a keyword argument, and of one more stage at the end if it is set.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def shown(*args: Any, **kwargs: Any) -> Any:
            every = (*stages, last) if kwargs.get(last) else stages
            with progress_shown(kwargs.get("progress") if only_if() else False, every):
                return function(*args, **kwargs)

        return cast(Function, shown)

    return decorate


def _display(show: bool | None) -> Display | None:
    if show is False or (show is None and not config.show_progress()):
        return None
    return NotebookDisplay() if config.in_notebook() else TerminalDisplay()
