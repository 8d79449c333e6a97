"""Cases of a fuzzing driver in child processes, so that a crash or a hang is one result and the rest still runs."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import re
import select
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NamedTuple

HARD_LIMIT = 4
"""A case that does not return to Python is killed after this many time limits."""
PROGRESS = 10_000
"""After so many cases each, a line says how many there were."""


class Result(NamedTuple):
    """The result of case ``number``. ``failure`` is the reason why it is a failure, or ``None``."""

    number: int
    kind: str
    failure: str | None


class TookTooLongError(BaseException):
    """Raised in a case when its time is over. Not an `Exception`, so that code under test does not catch it."""


def isolated(run: Callable[[int], str], first: int, count: int, seconds: float) -> Iterator[Result]:
    """Run ``run(number)`` for ``count`` numbers from ``first`` on in child processes and yield a result for each.

    Args:
        run: returns the kind of the result; every exception is a failure.
        first: the first number.
        count: how many cases there are.
        seconds: time limit of a case.
    """
    done = first
    while done < first + count:
        for result in _one_child(run, done, first + count, seconds):
            done = result.number + 1
            yield result


def _one_child(run: Callable[[int], str], first: int, end: int, seconds: float) -> Iterator[Result]:
    """Yield the results of one child process: all of them, or those up to the first case that crashes or hangs."""
    current = mmap.mmap(-1, 8)  # the number of the case that runs, also when the child is gone
    current[:] = struct.pack("q", first)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _work(run, range(first, end), seconds, writer, current)
    os.close(writer)
    with os.fdopen(reader, "rb") as results:
        while True:
            ready, _, _ = select.select([results], [], [], HARD_LIMIT * seconds)
            if not ready:
                os.kill(child, signal.SIGKILL)
            try:
                yield Result(*pickle.load(results))
            except EOFError:
                break
    _, status = os.waitpid(child, 0)
    (number,) = struct.unpack("q", current[:])
    if not ready:
        yield Result(number, "hang", f"hangs outside of Python for more than {HARD_LIMIT * seconds:.0f} s")
    elif status:
        yield Result(number, "crash", f"the process ends with {os.waitstatus_to_exitcode(status)}")


def _work(run: Callable[[int], str], numbers: range, seconds: float, writer: int, current: mmap.mmap) -> None:
    """Run the cases of a child process and end it."""
    signal.signal(signal.SIGALRM, _over)
    status = 1
    with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "wb", buffering=0) as results:
        for number in numbers:
            current[:] = struct.pack("q", number)
            results.write(pickle.dumps(_result_of(run, number, seconds)))
        status = 0
    sys.stderr.flush()
    os._exit(status)


def _result_of(run: Callable[[int], str], number: int, seconds: float) -> tuple[int, str, str | None]:
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            return number, run(number), None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except TookTooLongError:
        return number, "hang", f"takes more than {seconds:.0f} s:\n{_last_lines()}"
    except BaseException:
        return number, "error", _last_lines()


def _last_lines(most: int = 24) -> str:
    return "\n".join(traceback.format_exc().splitlines()[-most:])


def _over(number: int, frame: FrameType | None) -> None:
    raise TookTooLongError


class Summary:
    """Counts results by kind and prints failures with the command that reproduces them."""

    def __init__(self, title: str, reproduce: str) -> None:
        """Create an empty summary.

        Args:
            title: what the cases are.
            reproduce: command of one case, with ``{number}`` for the number.
        """
        self.title, self.reproduce = title, reproduce
        self.counts: Counter[str] = Counter()
        self.failures: list[Result] = []
        self.alike: Counter[str] = Counter()
        self.begin = time.monotonic()

    def add(self, result: Result) -> None:
        """Count a result. Print it if it is a failure of a place in the code where none was before."""
        self.counts[result.kind] += 1
        if (done := self.counts.total()) % PROGRESS == 0:
            print(f"{done:,} cases, {len(self.failures)} failures", flush=True)
        if result.failure is None:
            return
        self.failures.append(result)
        frames = re.findall(r'/(intaglio/\S+", line \d+)', result.failure)
        place = f"{frames[-1]}: {result.failure.splitlines()[-1][:40]}" if frames else result.failure
        self.alike[place] += 1
        if self.alike[place] == 1:
            print(f"case {result.number}: {result.failure}\n  reproduce: {self.reproduce.format(number=result.number)}")

    def show(self) -> None:
        """Print the counts, and the places in the code of failures."""
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.counts.items(), key=lambda i: -i[1]))
        total, seconds = sum(self.counts.values()), time.monotonic() - self.begin
        print(f"{self.title}: {total:,} cases in {seconds:.0f} s: {kinds or 'none'}; {len(self.failures)} failures")
        for place, count in self.alike.most_common():
            print(f"  {count:,} x {place.splitlines()[0]}")
