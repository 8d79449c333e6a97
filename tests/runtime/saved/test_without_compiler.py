"""A file with compiled programs runs where there is no compiler, if it is trusted."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import intaglio
from intaglio.native import cpu as machine
from intaglio.native import native_library
from intaglio.native.compile import text_key
from support import nets
from support.int8_models import compiled
from support.project_files import ROOT

LOAD = """
import os, sys, torch, intaglio
os.environ["INTAGLIO_CACHE_DIR"] = sys.argv[2] + "/untrusted"
try:
    intaglio.load(sys.argv[1]).verify()
except intaglio.errors.IntaglioError as error:
    print(error)
os.environ["INTAGLIO_CACHE_DIR"] = sys.argv[2] + "/trusted"
model = intaglio.load(sys.argv[1], trust=True)
model.verify()
torch.set_num_threads(3)
model(*[torch.randn(64, *tensor.shape[1:]) for tensor in model.example.tensors])
model.save(sys.argv[1] + ".again")
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("files") / "residual.intaglio"
    compiled(nets.Residual)[0].save(path, example=nets.example(nets.Residual()))
    return path


@pytest.fixture(scope="module")
def caches(tmp_path_factory) -> Path:
    """The folder with the cache of a process that does not trust the file, and the one of a process that does."""
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="module")
def ended(file, caches) -> subprocess.CompletedProcess[str]:
    """The process that loads the file without a compiler: untrusted, then trusted with another cache."""
    environment = {**os.environ, "CXX": "/nowhere/g++", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", LOAD, str(file), str(caches)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def manifest_of(path: Path) -> dict:
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("manifest.json"))


def test_a_trusted_file_runs_and_is_saved_again_without_a_compiler(file, caches, ended):
    assert ended.returncode == 0, ended.stderr
    names = sorted(path.name for path in (caches / "trusted" / "kernels").iterdir())
    assert [name.split("-")[0] for name in names] == ["trusted", "trusted"]
    assert file.with_name("residual.intaglio.again").read_bytes() == file.read_bytes()


def test_an_untrusted_file_needs_a_compiler_and_the_error_names_trust(caches, ended):
    assert "pip install 'intaglio[compiler]'" in ended.stdout
    assert "load(path, trust=True)" in ended.stdout
    assert not list((caches / "untrusted").rglob("trusted-*"))


def test_a_file_holds_the_thread_pool_for_its_least_instruction_set(file, tmp_path):
    key = text_key(native_library.SOURCE, machine.isas()[0])
    assert manifest_of(file)["runtime"] == {"isa": machine.isas()[0], "key": key}
    model = intaglio.stages.compile(compiled(nets.Linears)[1], isa=(machine.isas()[0], "portable"))
    model.save(tmp_path / "both")
    assert manifest_of(tmp_path / "both")["runtime"]["isa"] == "portable"
    model.save(tmp_path / "none", library=False)
    assert "runtime" not in manifest_of(tmp_path / "none")


def test_a_program_planned_for_other_caches_is_still_used(file, fresh_programs, monkeypatch):
    monkeypatch.setattr(machine, "caches", lambda: machine.Caches(16 << 10, 64 << 10, 1 << 20))
    model = intaglio.load(file, trust=True)
    assert model.artifact.path.name.startswith("trusted-")
    model.verify()


def test_a_thread_pool_of_another_text_is_not_used(monkeypatch):
    monkeypatch.setattr(native_library, "_trusted", [])
    native_library.use_trusted(native_library.RuntimeLibrary(b"\x7fELF", machine.isas()[0], "0" * 64))
    native_library.use_trusted(native_library.RuntimeLibrary(b"\x7fELF", "sse9", "0" * 64))
    assert native_library.runtime_library(machine.isas()[0]).content != b"\x7fELF"
