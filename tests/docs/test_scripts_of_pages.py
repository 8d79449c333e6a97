"""Blocks of pages that are scripts or C: they run with definitions in front, as the pages describe."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys

import pytest
import torch
from torch import nn

import intaglio
from intaglio import stages
from support.exported_c import commands
from support.nets import randomize
from support.project_files import ROOT

DEFINITIONS = """
import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
loader = DataLoader(torch.randn(48, 3, 8, 8), batch_size=4)
example = next(iter(loader))
"""


def blocks(page: str, language: str) -> list[str]:
    """Return the blocks of a page in a language, without indentation."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.slow(reason="starts four processes; tests of distributed calibration start two")
def test_the_script_for_four_processes_calibrates_as_one_process_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script, reader = blocks("calibration.md", "py")
    (tmp_path / "calibrate.py").write_text(DEFINITIONS + script)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "calibrate.py"]
    found = subprocess.run(launch, cwd=tmp_path, capture_output=True, check=False, timeout=300)
    assert found.returncode == 0, found.stderr.decode()

    namespace: dict = {"stages": stages}
    exec(DEFINITIONS + reader, namespace)
    net, loader, example = (namespace[name] for name in ("net", "loader", "example"))
    prepared = stages.prepare(stages.capture(net, example))
    alone = stages.calibrate(prepared, loader)
    assert stages.Ranges.load("ranges.json").to_json() == alone.to_json()
    assert torch.equal(namespace["model"](example), stages.compile(stages.convert(prepared, alone))(example))


PROGRAM = """
#include <stdio.h>
#include "sequential.h"

static float images[8 * 3 * 32 * 32], scores[8 * 10];

int main(void) {
    FILE* file = fopen("images.bin", "rb");
    if (!file || fread(images, 1, sizeof images, file) != sizeof images) return 1;
    %s
    file = fopen("scores.bin", "wb");
    return fwrite(scores, 1, sizeof scores, file) != sizeof scores || fclose(file);
}
"""


@pytest.mark.slow(reason="compiles an export; tests of exports do, too")
def test_the_examples_in_c_and_python_compute_what_the_model_does(tmp_path, monkeypatch):
    """The calls of the page in a program that reads `images` from a file and writes `scores` to one; the script."""
    layers = nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    net, images = randomize(nn.Sequential(*layers)), torch.randn(8, 3, 32, 32)
    model = intaglio.quantize(net, [images], progress=False)
    model.export_c(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "images.bin").write_bytes(images.numpy().tobytes())
    (calls,) = blocks("deploying.md", "c")
    (tmp_path / "main.c").write_text(PROGRAM % calls)
    subprocess.run(["sh", "-ec", "\n".join(commands(tmp_path))], cwd=tmp_path, check=True)
    subprocess.run([str(tmp_path / "sequential")], cwd=tmp_path, check=True)
    scores = torch.frombuffer(bytearray((tmp_path / "scores.bin").read_bytes()), dtype=torch.float32).reshape(8, 10)
    assert torch.equal(scores, model(images))

    (script,) = blocks("deploying.md", "py")
    (tmp_path / "network.py").write_text(script.replace("net_c", "."))
    namespace = runpy.run_path(str(tmp_path / "network.py"), {"images": images.numpy()})
    assert torch.equal(torch.from_numpy(namespace["scores"]), model(images))
