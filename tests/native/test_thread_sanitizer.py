"""The thread pool under ThreadSanitizer."""

import shutil
import subprocess
from pathlib import Path

import pytest

from intaglio.native.units import HEADER_FOLDER

FOLDER = Path(__file__).parent


def test_the_pool_has_no_data_race(tmp_path):
    """The number of a job's sleeping caller was written while a worker of the job before still read it."""
    assert output_of("pool_calls.cpp", tmp_path) == "0\n"


def test_threads_that_share_steps_compute_every_item_once(tmp_path):
    """A step that one thread runs alone was counted as shared, so threads computed parts twice or not at all."""
    assert output_of("sharing_calls.cpp", tmp_path) == "0 1\n"


def output_of(calls: str, folder: Path) -> str:
    """Return what a program prints that calls the pool, built with ThreadSanitizer; fail if it reports anything."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("this test needs g++")
    program = folder / "calls"
    flags = ["-O1", "-g", "-std=c++17", "-fsanitize=thread", "-pthread", f"-I{HEADER_FOLDER}"]
    sources = [str(FOLDER / calls), str(HEADER_FOLDER / "base" / "pool.cpp")]
    built = subprocess.run([compiler, *flags, *sources, "-o", str(program)], capture_output=True, text=True)
    if "tsan" in built.stderr:
        pytest.skip("the compiler has no ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    run = subprocess.run([str(program)], capture_output=True, text=True)
    if "unexpected memory mapping" in run.stderr:
        pytest.skip("ThreadSanitizer does not run with this kernel's address layout")
    assert (run.returncode, run.stderr) == (0, ""), run.stdout + run.stderr
    return run.stdout
