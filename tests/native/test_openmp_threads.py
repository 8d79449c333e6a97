"""Kernels for quantizing and programs run in the threads that PyTorch's operators run in."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from intaglio.native import native_library
from intaglio.native.statistics import squared_sums
from support.slow_params import slow_params_except

TASKS = Path("/proc/self/task")
BEGIN = """
import os, numpy, torch
from intaglio.native.statistics import squared_sums
torch.set_num_threads(2)
square = torch.rand(1000, 1000)
"""
COUNTED = """
square @ square
values = numpy.ones(1 << 21, numpy.float32)
before = len(os.listdir("/proc/self/task"))
assert squared_sums(values, values, 2)[0] == 1 << 21
print(len(os.listdir("/proc/self/task")) - before)
"""
PROGRAM = """
import intaglio
from torch import nn
torch.manual_seed(0)
network = nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(2)]).eval()
"""
FORKED = """
with torch.no_grad():
    model = intaglio.quantize(network, [square], recipe="int8_dynamic", progress=False)
    expected = model(square)
    square @ square
    model(square)
    if (child := os.fork()) == 0:
        found = model(square)
        (square @ square).sin()
        values = numpy.ones(1 << 21, numpy.float32)
        equal = torch.equal(found, expected) and squared_sums(values, values, 2)[0] == 1 << 21
        os._exit(0 if equal and torch.equal(model(square), expected) else 1)
    _, status = os.waitpid(child, 0)
    print(status, torch.equal(model(square), expected))
"""

needs_openmp = pytest.mark.skipif(
    not native_library.shares_threads() or not TASKS.exists(), reason="PyTorch is built without GNU OpenMP"
)


def printed(text: str, **environment: str) -> str:
    """Return what a new Python process prints when it runs this source code."""
    command, environment = [sys.executable, "-c", text], {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment).stdout


@cache
def words_of_a_process() -> list[str]:
    """Return what a process prints that counts threads first and has a child then."""
    return printed(BEGIN + COUNTED + PROGRAM + FORKED).split()


@pytest.mark.slow(reason="a process imports PyTorch and compiles a program")
@needs_openmp
def test_no_threads_are_started_beside_those_of_pytorch():
    assert words_of_a_process()[0] == "0"


@pytest.mark.slow(reason="a process imports PyTorch and compiles a program")
@needs_openmp
def test_a_child_of_fork_runs_operators_of_pytorch_programs_and_kernels():
    assert words_of_a_process()[1:] == ["0", "True"]


LIMITED = """
import numpy, torch
from intaglio.native.statistics import squared_sums
torch.set_num_threads(7)
values = numpy.random.default_rng(0).standard_normal((2, 300_000)).astype(numpy.float32)
print(*(value.hex() for value in squared_sums(*values, 7).tolist()))
"""


@pytest.mark.slow(reason="a process imports PyTorch")
@needs_openmp
@pytest.mark.parametrize(
    "limit", slow_params_except("2", of=("1", "2", "3"), reason="a process for each; the sum is made the same way")
)
def test_sums_are_the_same_where_openmp_gives_fewer_threads(limit):
    values = np.random.default_rng(0).standard_normal((2, 300_000)).astype(np.float32)
    found = printed(LIMITED, OMP_THREAD_LIMIT=limit)
    assert found.split() == [value.hex() for value in squared_sums(*values, 1).tolist()]


ISLANDS, SHARED = "intaglio_parallel_between_islands", "intaglio_parallel_shared"
NOTHING, END_TEAM = ctypes.CDLL(None).abs, ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)


@dataclass
class Call:
    """A call of a function that runs programs.

    Attributes:
        name: name of the function.
        empty: how often it runs an empty body first.
        operator: PyTorch computes something on two threads right before.
        pause: seconds to wait before the call.
        team_ended: the threads of PyTorch were ended before, so that the operator starts others.
    """

    name: str = "intaglio_parallel_program"
    empty: int = 0
    operator: bool = False
    pause: float = 0.0
    team_ended: bool = False


class Caller(threading.Thread):
    """Makes calls in a thread of its own, with two threads of PyTorch.

    Attributes:
        found: for each call, the other threads that took part in it.
    """

    def __init__(self, *calls: Call) -> None:
        super().__init__()
        self.calls, self.found = calls, []
        self.start()
        self.join()

    def run(self) -> None:
        torch.set_num_threads(2)
        values = torch.rand(1 << 18)
        for call in self.calls:
            function, used = getattr(native_library.runtime(), call.name), set()

            def body(context, thread, threads, used=used) -> None:
                used.add(threading.get_native_id())
                time.sleep(0.001)

            for _ in range(call.empty):
                function(ctypes.cast(NOTHING, native_library.BODY), None, 2)
            if call.team_ended:
                END_TEAM(native_library._openmp_of_torch()[-1])(1)
            if call.operator:
                values.sin()
            time.sleep(call.pause)
            function(native_library.BODY(body), None, 2)
            self.found.append(used - {threading.get_native_id()})


def holds(check: Callable[[], bool]) -> bool:
    """Return whether a check succeeds in one of 20 attempts, because other processes delay calls on the same cores."""
    for _ in range(20):
        time.sleep(1.1)  # longer than a call of another thread counts
        if check():
            return True
    return False


@needs_openmp
def test_programs_run_in_the_threads_of_pytorch_when_it_is_not_known_whether_these_run():
    """The first call of a thread uses the pool; the second finds out which threads PyTorch has."""

    def check() -> bool:
        first, team = Caller(Call(), Call()).found
        return first != team

    assert holds(check)


@needs_openmp
@pytest.mark.slow(reason="needs an idle machine")
def test_programs_run_in_the_threads_of_pytorch_while_these_run():
    def check() -> bool:
        first, team, behind, later = Caller(Call(), Call(), Call(operator=True), Call(pause=0.3)).found
        return first == later != team == behind

    assert holds(check)


@needs_openmp
def test_threads_that_pytorch_started_anew_are_used():
    def check() -> bool:
        pool, _, _, anew = Caller(Call(SHARED), Call(), Call(), Call(team_ended=True, operator=True)).found
        return anew != pool

    assert holds(check)


@needs_openmp
@pytest.mark.slow(reason="needs an idle machine")
def test_many_short_programs_leave_the_threads_of_pytorch_until_two_long_ones():
    def check() -> bool:
        long = Call(empty=1, operator=True)
        pool, team, short, one_long, two_long = Caller(Call(), Call(), Call(empty=200), long, long).found
        return pool == short == one_long != team == two_long

    assert holds(check)


@needs_openmp
@pytest.mark.slow(reason="needs an idle machine")
def test_programs_between_islands_stay_in_the_threads_of_pytorch():
    def check() -> bool:
        pool, team, many = Caller(Call(ISLANDS), Call(ISLANDS), Call(ISLANDS, empty=200, operator=True)).found
        return pool != team == many

    assert holds(check)


@needs_openmp
@pytest.mark.slow(reason="needs an idle machine")
def test_calls_of_several_threads_leave_the_threads_of_pytorch():
    """Each thread has a team of its own, which would share cores with that of the last caller."""

    def check() -> bool:
        pool, team = Caller(Call(), Call()).found
        return pool != team and Caller(Call(), Call(operator=True), Call(ISLANDS, operator=True)).found == [pool] * 3

    assert holds(check)


def test_another_openmp_library_is_not_used(monkeypatch):
    monkeypatch.setattr(native_library, "OPENMP", ("no_such_function",))
    native_library._openmp_of_torch.cache_clear()
    try:
        assert native_library._openmp_of_torch() is None
    finally:
        native_library._openmp_of_torch.cache_clear()
