"""A short run of the driver that lets system calls fail (`make faults` runs all of it)."""

import json
import os
import subprocess
import sys

import pytest

from fuzz import faults
from support.project_files import ROOT

FEW = {"recipe": "KILL", "ranges": "ENOSPC", "schedules": "EIO", "install": "EACCES"}
PROGRAM = """
import json, sys, tempfile, warnings
from pathlib import Path
from fuzz.faults import attempts_of
from fuzz.faulty_operations import OPERATIONS
warnings.simplefilter("ignore")
found = {}
for name, error in zip(sys.argv[1::2], sys.argv[2::2]):
    with tempfile.TemporaryDirectory() as folder:
        operation = OPERATIONS[name](Path(folder).resolve())
        found[name] = [list(one) for one in attempts_of(operation, error)]
print(json.dumps(found))
"""


pytestmark = pytest.mark.slow(
    reason="a process of its own makes a model; drafts and full caches have quick tests elsewhere"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[list]]:
    """The attempts of some operations with one error each, made in a process with the preloaded library."""
    folder = tmp_path_factory.mktemp("faults")
    environment = {
        **os.environ,
        "LD_PRELOAD": str(faults.shared_library(folder)),
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", PROGRAM, *(word for pair in FEW.items() for word in pair)]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return json.loads(printed.splitlines()[-1])


def test_everything_is_intact_after_a_failing_call(found):
    assert {name: [one for one in attempts if one[2]] for name, attempts in found.items()} == {name: [] for name in FEW}


def test_calls_of_every_kind_fail(found):
    calls = {call.split()[0] for attempts in found.values() for _, call, _ in attempts}
    assert {"open64", "write", "fsync", "rename", "close", "unlink", "mkdir", "kill"} <= calls
