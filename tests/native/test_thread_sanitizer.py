"""The thread pool under ThreadSanitizer."""

import shutil
import subprocess
from pathlib import Path

import pytest

from intaglio.native.units import HEADER_FOLDER

CALLS = Path(__file__).with_name("pool_calls.cpp")


def test_the_pool_has_no_data_race(tmp_path):
    """The number of a job's sleeping caller was written while a worker of the job before still read it."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("this test needs g++")
    program = tmp_path / "pool_calls"
    flags = ["-O1", "-g", "-std=c++17", "-fsanitize=thread", "-pthread", f"-I{HEADER_FOLDER}"]
    sources = [str(CALLS), str(HEADER_FOLDER / "base" / "pool.cpp")]
    built = subprocess.run([compiler, *flags, *sources, "-o", str(program)], capture_output=True, text=True)
    if "tsan" in built.stderr:
        pytest.skip("the compiler has no ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    run = subprocess.run([str(program)], capture_output=True, text=True)
    if "unexpected memory mapping" in run.stderr:
        pytest.skip("ThreadSanitizer does not run with this kernel's address layout")
    assert (run.stderr, run.stdout) == ("", "0\n")
    assert run.returncode == 0
