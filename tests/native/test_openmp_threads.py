"""Kernels for quantizing run in the threads that PyTorch's operators run in."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from intaglio.native import native_library
from intaglio.native.statistics import squared_sums

TASKS = Path("/proc/self/task")
COUNTED = """
import os, numpy, torch
from intaglio.native.statistics import squared_sums
torch.set_num_threads(2)
square = torch.rand(1000, 1000)
square @ square
values = numpy.ones(1 << 21, numpy.float32)
before = len(os.listdir("/proc/self/task"))
assert squared_sums(values, values, 2)[0] == 1 << 21
print(len(os.listdir("/proc/self/task")) - before)
"""

needs_openmp = pytest.mark.skipif(
    native_library._openmp_of_torch() is None or not TASKS.exists(), reason="PyTorch is built without GNU OpenMP"
)


@needs_openmp
def test_no_threads_are_started_beside_those_of_pytorch():
    done = subprocess.run([sys.executable, "-c", COUNTED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


@needs_openmp
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_sums_are_the_same_where_openmp_gives_fewer_threads(threads):
    values = np.random.default_rng(0).standard_normal((2, 300_000)).astype(np.float32)
    allowed = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert np.array_equal(squared_sums(*values, threads), squared_sums(*values, 1))
    finally:
        torch.set_num_threads(allowed)


def test_another_openmp_library_is_not_used(monkeypatch):
    monkeypatch.setattr(native_library, "OPENMP", ("no_such_function",))
    assert native_library._openmp_of_torch() is None
