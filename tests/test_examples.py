"""The scripts in examples/ run as they stand and say what they promise."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import beside

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(find_spec("torchvision") is None, reason="examples/newcomer.py needs torchvision")
def test_a_newcomer_quantizes_saves_loads_and_compares(tmp_path):
    first = Path(beside.__file__).read_text(encoding="utf-8") + "\n\nimport_torchvision()\n"
    (tmp_path / "sitecustomize.py").write_text(first, encoding="utf-8")
    paths = [str(tmp_path), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples/newcomer.py"), "resnet18", "--images", "16", "--size", "64"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "100.0 % of" in run.stdout
    assert "the new process gives the same bits" in run.stdout
