"""A function in a process of its own, so that no engine meets what another left behind.

BENCHMARK_VERBOSE=1 shows what such processes print, and the tracebacks of those that fail.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

SPAWN = multiprocessing.get_context("spawn")


class FailedError(Exception):
    """The other process raised; the text is its error's last line."""


def call(function: Callable[..., Any], *args: Any, environment: dict[str, str] | None = None) -> Any:
    """``function(*args)`` in a new process; raises `FailedError` when that does."""
    with opened(_answer_once, function, args, environment=environment) as channel:
        return receive(channel)


@contextlib.contextmanager
def opened(function: Callable, *args: Any, environment: dict[str, str] | None = None) -> Iterator[Connection]:
    """Our end of a channel to a process that runs ``function(its end, *args)``; ended when the block is left."""
    ours, theirs = SPAWN.Pipe()
    with _environment(environment or {}):
        process = SPAWN.Process(target=_guarded, args=(function, theirs, *args), daemon=True)
        process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(timeout=10)
        process.terminate()


def start_all(
    stack: contextlib.ExitStack, serve: Callable, names: Iterable[str], *args: Any
) -> tuple[dict[str, Connection], dict[str, dict]]:
    """A process for each name that runs ``serve(channel, name, *args)``: the channels, and what each sent first. A
    process that failed has no channel, and the result ``failed``."""
    channels, results = dict[str, Connection](), dict[str, dict]()
    for name in names:
        channel = stack.enter_context(opened(serve, name, *args))
        try:
            results[name] = dict(receive(channel))
            channels[name] = channel
        except FailedError as error:
            results[name] = {"failed": str(error)}
    return channels, results


def receive(channel: Connection) -> Any:
    try:
        fine, value = channel.recv()
    except EOFError:
        raise FailedError("the process died") from None
    if not fine:
        raise FailedError(value)
    return value


def _answer_once(channel: Connection, function: Callable, args: tuple) -> None:
    channel.send((True, function(*args)))


def _guarded(function: Callable, channel: Connection, *args: Any) -> None:
    shown = bool(os.environ.get("BENCHMARK_VERBOSE"))
    if not shown:  # engines print much that nobody asked for
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    try:
        function(channel, *args)
    except EOFError:
        pass
    except Exception as error:
        if shown:
            traceback.print_exc()
        lines = f"{type(error).__name__}: {error}".splitlines()
        channel.send((False, lines[0][:200]))


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
