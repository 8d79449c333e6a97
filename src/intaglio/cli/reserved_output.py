"""Output that a command reserves for its result: stdout for JSON, or none at all."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_output(json: bool, quiet: bool) -> Iterator[None]:
    """Keep the output of models and libraries away from a command's own.

    Args:
        json: redirect what they print to stderr, because stdout is reserved for JSON.
        quiet: suppress what they print, and progress, warnings and messages of intaglio below errors.
    """
    with contextlib.ExitStack() as stack:
        if quiet:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(_only_errors(logging.getLogger("intaglio")))
            stack.enter_context(_without_progress())
        elif json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


@contextlib.contextmanager
def _only_errors(logger: logging.Logger) -> Iterator[None]:
    """Let a logger report nothing below errors."""
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _without_progress() -> Iterator[None]:
    """Switch progress off by its environment variable."""
    before = os.environ.get("INTAGLIO_PROGRESS")
    os.environ["INTAGLIO_PROGRESS"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["INTAGLIO_PROGRESS"]
        else:
            os.environ["INTAGLIO_PROGRESS"] = before
