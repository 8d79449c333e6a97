"""`Pool`: calls of a model side by side, each in a stream with its own threads."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from intaglio.argument_checks import check_arguments, check_arguments_except
from intaglio.errors import InputError
from intaglio.formatting.html_text import element, html_table

LATENCY_SHARE = 0.99
"""Share of the calls that take at most the latency that a pool reports."""


@dataclass(frozen=True)
class PoolSpeed:
    """Measured speed of a number of streams.

    Attributes:
        streams: number of calls at the same time.
        threads: threads of each.
        calls_per_second: calls of all streams together.
        latency_ms: milliseconds that 99 of 100 calls take at most.
    """

    streams: int
    threads: int
    calls_per_second: float
    latency_ms: float

    def __str__(self) -> str:
        each = f"{self.streams} x {self.threads} threads"
        return f"{each}: {self.calls_per_second:.1f} calls a second, 99 % within {self.latency_ms:.2f} ms"


class Pool:
    """Runs independent calls of a model side by side.

    Each stream runs one call at a time with its own threads, and all streams read the same weights. On a machine with
    several cores, several streams of few threads finish more calls a second than one stream that uses all cores, and
    each call takes longer. Results are those of the model, in the same bits. Calls of a model that updates its buffers
    depend on each other, so a pool is not for them.

    A pool is a context manager: at the end of the block it waits for the calls that were submitted.

    Attributes:
        streams: number of calls at the same time.
        threads: threads of each.
        measured: what `fastest` measured for each number of streams; empty for other pools.

    Examples:
        >>> with intaglio.Pool(model, streams=2) as pool:
        ...     results = list(pool.map(batches))
    """

    @check_arguments_except("model")
    def __init__(self, model: nn.Module, *, streams: int | None = None, threads: int | None = None) -> None:
        """Start the streams.

        Args:
            model: the model, which is called by several threads at the same time.
            streams: number of calls at the same time (default: as many as the cores allow with ``threads`` each).
            threads: threads of each call (default: the cores divided by ``streams``, or 1 without ``streams``).

        Raises:
            InputError: a number is less than 1.
        """
        for name, value in (("streams", streams), ("threads", threads)):
            if value is not None and value < 1:
                problem = f"{name}={value}, but a pool needs at least 1"
                raise InputError("Pool", None, problem, remedy=f"pass {name}=1, or leave it out")
        cores = len(os.sched_getaffinity(0))
        if streams is None:
            streams = max(cores // (threads or 1), 1)
        self.streams, self.threads = streams, threads or max(cores // streams, 1)
        self.measured: tuple[PoolSpeed, ...] = ()
        self._model = model
        self._executor = ThreadPoolExecutor(self.streams, thread_name_prefix="intaglio-stream")
        self._start_streams()

    @classmethod
    @check_arguments_except("model", "call")
    def fastest(cls, model: nn.Module, call: Any, *, latency_ms: float | None = None, seconds: float = 1.0) -> Self:
        """Return the pool that finishes the most calls a second on this machine, which is measured.

        Args:
            model: the model.
            call: one call, as for `submit`.
            latency_ms: the longest time that 99 of 100 calls may take, in milliseconds (default: any). If no number of
                streams keeps to it, the one with the shortest calls is chosen.
            seconds: how long each number of streams is measured.

        Raises:
            InputError: a time is not positive.

        Examples:
            >>> pool = intaglio.Pool.fastest(model, x, latency_ms=20)
            >>> print(pool.measured[0])
        """
        for name, value in (("latency_ms", latency_ms), ("seconds", seconds)):
            if value is not None and not value > 0:
                problem = f"{name}={value}, but a time is positive"
                raise InputError("Pool.fastest", None, problem, remedy=f"pass a positive {name}, or leave it out")
        cores = len(os.sched_getaffinity(0))
        found = []
        for streams in (count for count in range(1, cores + 1) if cores % count == 0):
            with cls(model, streams=streams) as pool:
                found.append(pool._speed(call, seconds))
        allowed = [speed for speed in found if latency_ms is None or speed.latency_ms <= latency_ms]
        best = max(allowed, key=lambda speed: speed.calls_per_second, default=None)
        best = best or min(found, key=lambda speed: speed.latency_ms)
        pool = cls(model, streams=best.streams, threads=best.threads)
        pool.measured = (best, *(speed for speed in found if speed is not best))
        return pool

    @check_arguments
    def submit(self, call: Any) -> Future[Any]:
        """Start a call in the next free stream.

        Args:
            call: the arguments of the call: a tuple, a mapping from names to arguments, or the only argument.

        Returns:
            A future, whose ``result()`` waits for the call and returns its result or raises its error.
        """
        return self._executor.submit(self._call, call)

    @check_arguments
    def map(self, calls: Iterable[Any]) -> Iterator[Any]:
        """Yield the result of each call in their order.

        Calls are taken from the iterable when a stream is about to be free, so it may be endless. If a call fails, its
        error is raised in its place, and calls that have not started are dropped.

        Args:
            calls: the calls, each as for `submit`.
        """
        waiting: deque[Future[Any]] = deque()
        try:
            for call in calls:
                waiting.append(self.submit(call))
                if len(waiting) > 2 * self.streams:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """Wait for the calls that were submitted, and end the streams."""
        self._executor.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(cancel_futures=error is not None)

    def __repr__(self) -> str:
        return f"Pool({type(self._model).__name__}, streams={self.streams}, threads={self.threads})"

    def _repr_html_(self) -> str:
        """Return the pool, and what was measured for each number of streams, for notebooks."""
        rows = [
            (speed.streams, speed.threads, f"{speed.calls_per_second:.1f}", f"{speed.latency_ms:.2f}")
            for speed in self.measured
        ]
        columns = ("streams", "threads of each", "calls per second", "99 % within ms")
        return element("p", repr(self)) + (
            html_table(columns, rows, "The first row was chosen", text=0) if rows else ""
        )

    def _start_streams(self) -> None:
        """Start all threads of the executor and set how many threads PyTorch and the model use in each."""
        all_there, before = threading.Barrier(self.streams), torch.get_num_threads()

        def begin() -> None:
            all_there.wait()
            torch.get_num_threads()  # PyTorch sets the number of a thread when it first asks for it
            torch.set_num_threads(self.threads)

        for future in [self._executor.submit(begin) for _ in range(self.streams)]:
            future.result()
        torch.set_num_threads(before)  # the number for new threads, which the streams have set too

    def _call(self, call: Any) -> Any:
        with torch.no_grad():
            if isinstance(call, tuple):
                return self._model(*call)
            return self._model(**call) if isinstance(call, Mapping) else self._model(call)

    def _speed(self, call: Any, seconds: float) -> PoolSpeed:
        """Measure calls that follow each other in every stream."""
        self._each_stream(lambda: self._call(call))  # plans the call and allocates its memory
        latencies = self._each_stream(lambda: self._repeated(call, seconds))
        rate = sum(len(own) / sum(own) for own in latencies)
        longest = sorted(np.concatenate(latencies))
        return PoolSpeed(self.streams, self.threads, rate, 1e3 * float(longest[_rank(len(longest))]))

    def _repeated(self, call: Any, seconds: float) -> list[float]:
        """Call the model until the time is over, and return the seconds of each call."""
        found, now = list[float](), time.perf_counter()
        end = now + seconds
        while not found or now < end:
            begin, _ = now, self._call(call)
            now = time.perf_counter()
            found.append(now - begin)
        return found

    def _each_stream(self, function: Callable[[], Any]) -> list[Any]:
        """Run a function in every stream at the same time, and return what it returns."""
        all_there = threading.Barrier(self.streams)

        def run() -> Any:
            all_there.wait()
            return function()

        return [future.result() for future in [self._executor.submit(run) for _ in range(self.streams)]]


def _rank(count: int) -> int:
    """Return the index of the element of a sorted list that `LATENCY_SHARE` of its elements do not exceed."""
    return min(math.ceil(LATENCY_SHARE * count), count) - 1
