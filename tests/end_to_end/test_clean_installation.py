"""The wheel and the sdist are built, and installed where nothing of the project is. `make package` runs these tests.

They need a package index. PyTorch is installed for the Pythons in INTAGLIO_TORCH_PYTHONS, by default the one that runs
the tests; in the others everything is run that does not need PyTorch.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from support.project_files import ROOT

pytestmark = pytest.mark.slow(reason="installs packages in environments of their own")

RUNNING = f"3.{sys.version_info.minor}"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""Versions that pyproject.toml claims, as far as they are released."""
WITH_TORCH = os.environ.get("INTAGLIO_TORCH_PYTHONS", RUNNING).split()
TORCH = "torch==2.13.0"
NOT_INSTALLED = {"__pycache__", ".mypy_cache"}

QUANTIZE = """
import sys
import torch
import intaglio
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5), nn.Softmax(-1)).eval()
data = [torch.randn(4, 3, 8, 8) for _ in range(3)]
model = intaglio.quantize(net, data, progress=False)
model.save("net.intaglio", example=data[0])
intaglio.load("net.intaglio").verify()
print(intaglio.__file__, model.artifact.program.isa)
"""

LOAD = """
import torch
import intaglio

model = intaglio.load("net.intaglio", trust=True)
model.verify()
torch.set_num_threads(2)
print(tuple(model(torch.randn(64, 3, 8, 8)).shape))
"""

WITHOUT_TORCH = """
import compileall
import pathlib
import sys
import intaglio
from intaglio.native import cpu
from intaglio.native.compile import build, load
from intaglio.native.native_library import SOURCE

assert compileall.compile_dir(pathlib.Path(intaglio.__file__).parent, quiet=1)
assert load(build(SOURCE, name="runtime", isa=cpu.isas()[0])).intaglio_parallel
assert "torch" not in sys.modules
print(intaglio.__version__)
"""


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Run a command without variables of this process that lead to the project, and return what it prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "INTAGLIO", "CXX"))}
    words = [str(word) for word in command]
    found = subprocess.run(words, cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, timeout=1800)
    assert found.returncode == 0, f"{' '.join(words)}\n{found.stdout}\n{found.stderr}"
    return found.stdout


def interpreter(version: str) -> str | None:
    """Return the program of a Python version, from PATH or from uv."""
    if version == RUNNING:
        return sys.executable
    for command in ([shutil.which(f"python{version}")], [shutil.which("uv"), "python", "find", version]):
        if command[0] is None:
            continue
        words = command if len(command) > 1 else [*command, "-c", "import sys; print(sys.executable)"]
        found = subprocess.run(words, capture_output=True, text=True)
        if found.returncode == 0:
            return found.stdout.strip()
    return None


def environment_of(python: str, folder: Path, *packages: object) -> Path:
    """Make an environment with packages and return its Python."""
    if python == sys.executable:
        venv.create(folder, with_pip=True)
    else:
        run(python, "-m", "venv", folder, cwd=folder.parent)
    made = folder / "bin" / "python"
    pip = (made, "-m", "pip", "-qq", "--disable-pip-version-check", "--no-input", "install")
    run(*pip, *packages, cwd=folder.parent)
    return made


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """Wheel and sdist of the project, built by its backend."""
    folder = tmp_path_factory.mktemp("built")
    tool = environment_of(sys.executable, folder / "tool", "hatchling>=1.27")
    run(tool, "-m", "hatchling", "build", "-d", folder / "dist", cwd=ROOT)
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    run(tool, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "again", cwd=source)
    (again,) = (folder / "again").glob("*.whl")
    assert contents(again) == contents(wheel), "the wheel of the sdist differs from that of the project"
    return wheel, sdist


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_the_package_and_nothing_else(built):
    package = ROOT / "src" / "intaglio"
    files = [path for path in package.rglob("*") if path.is_file() and not NOT_INSTALLED & {*path.parts}]
    expected = {f"intaglio/{path.relative_to(package).as_posix()}" for path in files}
    found = {name for name in contents(built[0]) if ".dist-info/" not in name}
    assert found == expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in contents(built[0]))


def test_the_sdist_holds_what_the_tests_need(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Makefile", "constraints.txt", "pyproject.toml", "tests/conftest.py", "docs/index.md", "LICENSE"} <= names
    assert not {name for name in names if name.startswith((".venv", "build/"))}


@pytest.mark.parametrize("version", PYTHONS)
def test_an_installed_wheel_quantizes_without_a_compiler_of_the_system(version, built, tmp_path):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"Python {version} is not installed")
    if version not in WITH_TORCH:
        pytest.skip(f"PyTorch is not installed for Python {version}: it is not in INTAGLIO_TORCH_PYTHONS")
    made = environment_of(python, tmp_path / "installed", TORCH, f"{built[0]}[cli,compiler]")
    (tmp_path / "empty").mkdir()
    where = {"cwd": tmp_path, "PATH": str(tmp_path / "empty"), "INTAGLIO_CACHE_DIR": str(tmp_path / "cache")}
    assert str(tmp_path / "installed") in run(made, "-c", QUANTIZE, **where)
    intaglio = made.with_name("intaglio")
    assert json.loads(run(intaglio, "verify", "net.intaglio", "--json", **where))["verified"]
    assert "ziglang" in json.loads(run(intaglio, "doctor", "--json", **where))["compiler"]["path"]
    run(made, "-m", "pip", "uninstall", "-qq", "-y", "ziglang", **where)
    where["INTAGLIO_CACHE_DIR"] = str(tmp_path / "other")
    assert run(made, "-c", LOAD, **where).strip() == "(64, 5)"


@pytest.mark.parametrize("version", PYTHONS)
def test_an_installed_wheel_runs_without_pytorch_as_far_as_it_can(version, built, tmp_path):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"Python {version} is not installed")
    made = environment_of(python, tmp_path / "installed", "numpy", "typer>=0.15", "rich")
    run(made, "-m", "pip", "-qq", "install", "--no-deps", built[0], cwd=tmp_path)
    found = run(made, "-c", WITHOUT_TORCH, cwd=tmp_path, INTAGLIO_CACHE_DIR=str(tmp_path / "cache"))
    assert run(made.with_name("intaglio"), "--version", cwd=tmp_path).split() == ["intaglio", found.strip()]
