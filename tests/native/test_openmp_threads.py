"""Kernels for quantizing run in the threads that PyTorch's operators run in."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

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


LIMITED = """
import numpy
from intaglio.native.statistics import squared_sums
values = numpy.random.default_rng(0).standard_normal((2, 300_000)).astype(numpy.float32)
print(*(value.hex() for value in squared_sums(*values, 7).tolist()))
"""


@needs_openmp
@pytest.mark.parametrize("limit", ["1", "2", "3"])
def test_sums_are_the_same_where_openmp_gives_fewer_threads(limit):
    environment = {**os.environ, "OMP_THREAD_LIMIT": limit}
    command = [sys.executable, "-c", f"import torch\n{LIMITED}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    values = np.random.default_rng(0).standard_normal((2, 300_000)).astype(np.float32)
    assert done.stdout.split() == [value.hex() for value in squared_sums(*values, 1).tolist()]


def test_another_openmp_library_is_not_used(monkeypatch):
    monkeypatch.setattr(native_library, "OPENMP", ("no_such_function",))
    assert native_library._openmp_of_torch() is None
