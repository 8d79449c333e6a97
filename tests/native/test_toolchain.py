"""Which compiler is used, and that every compiler makes programs with the same bits."""

import importlib.machinery
import importlib.util
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from intaglio import config, stages
from intaglio.errors import BuildError
from intaglio.native import native_library, toolchain
from intaglio.native.compile import build, load
from support import nets
from support.int8_models import assert_same, compiled

ANSWER = 'extern "C" __attribute__((visibility("default"))) int answer() { return 41; }\n'


def program(path: Path, text: str = "exit 1") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def no_package(monkeypatch):
    """The Python package ziglang is not installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The only folder in PATH."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


def install_package(monkeypatch, home: Path, text: str = "exit 1") -> Path:
    """Make a package ziglang with headers in a folder, and return its program."""
    for name in ("include", "libc/include/generic-glibc", "libc/include/any-linux-any"):
        (home / "lib" / name).mkdir(parents=True)
    for name in ("x86-linux-gnu", "x86_64-linux-any", "aarch64-linux-gnu", "aarch64-linux-any"):
        (home / "lib" / "libc" / "include" / name).mkdir()
    spec = importlib.machinery.ModuleSpec("ziglang", None, is_package=True)
    spec.submodule_search_locations = [str(home)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    return program(home / "zig", text)


def test_compilers_are_found_in_a_fixed_order(folder, monkeypatch, tmp_path):
    zig = install_package(monkeypatch, tmp_path / "ziglang")
    assert config.compiler() == str(zig)
    for name in ("g++-9", "clang++-19", "clang++-19-extra", "clang++", "c++", "g++"):
        made = program(folder / name)
        if name != "clang++-19-extra":
            assert config.compiler() == str(made)
    monkeypatch.setenv("CXX", str(folder / "clang++"))
    assert config.compiler() == str(folder / "clang++")


@pytest.mark.parametrize(("chosen", "path"), [("./g++", os.defpath), (None, ".")], ids=["CXX", "PATH"])
def test_a_compiler_may_be_named_from_the_working_folder(chosen, path, fresh_cache, monkeypatch, tmp_path):
    gxx = shutil.which("g++", path=os.defpath)
    program(tmp_path / "g++", f'PATH={os.defpath} exec {gxx} "$@"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", chosen or "")
    monkeypatch.setenv("PATH", path)
    assert config.compiler() == str(tmp_path / "g++")
    assert load(build(ANSWER, name="relative", isa="portable")).answer() == 41


def test_without_any_compiler_the_error_offers_both_remedies(folder, no_package):
    with pytest.raises(BuildError) as caught:
        build(ANSWER, name="conv1", isa="portable")
    assert "no C++ compiler is found" in caught.value.problem
    assert "apt install g++" in caught.value.remedy
    assert "pip install 'intaglio[compiler]'" in caught.value.remedy


def test_quantizing_without_a_compiler_fails_before_the_work(folder, no_package):
    with pytest.raises(BuildError, match="quantize: no C\\+\\+ compiler is found"):
        native_library.build_ahead()


def test_the_package_compiles_and_links_without_its_driver(folder, fresh_cache, monkeypatch, tmp_path):
    """A program in the place of zig compiles with g++, and records how it is called."""
    gxx, log = shutil.which("g++", path=os.defpath), tmp_path / "log"
    compile_it = f'exec {gxx} -O1 -fPIC -c "$source" -o "$result"'
    text = f"""echo "$@" >> {log}
for word in "$@"; do case $word in *.cpp) source=$word;; --version) exit;; *.o|*.so) result=$word;; esac; done
export PATH={os.defpath}
case $1 in clang) {compile_it};; ld.lld) exec {gxx} -shared -nostdlib $(dirname "$result")/*.o -o "$result";; esac"""
    install_package(monkeypatch, tmp_path / "ziglang", text)
    assert load(build(ANSWER, name="packaged", isa="avx2")).answer() == 41
    *_, compiling, linking = log.read_text().splitlines()
    assert compiling.startswith("clang --target=")
    assert "-mavx2" in compiling
    assert "-nostdinc -DINTAGLIO_SHARED_LIBC" in compiling
    assert "-shared" not in compiling
    assert linking.startswith("ld.lld -shared --no-undefined")
    assert "libc" in linking


def test_the_linker_of_the_package_is_in_the_key(folder, fresh_cache, monkeypatch, tmp_path):
    """A program in the place of zig that makes empty files, and prints another version of its linker each time."""
    text = """case "$*" in "ld.lld "*--version) exec /bin/date +%N;; *--version) exit;; esac
for word in "$@"; do case $word in *.o|*.so) result=$word;; esac; done
echo > $result"""
    install_package(monkeypatch, tmp_path / "ziglang", text)
    paths = set()
    for _ in range(2):
        toolchain.linker_version_of.cache_clear()
        paths.add(build(ANSWER, name="packaged", isa="portable"))
    monkeypatch.setattr(toolchain, "LLD_FLAGS", (*toolchain.LLD_FLAGS, "--gc-sections"))
    toolchain._zig_toolchain.cache_clear()
    paths.add(build(ANSWER, name="packaged", isa="portable"))
    assert len(paths) == 3


def test_errors_say_whether_compiling_or_linking_failed(folder, fresh_cache, monkeypatch, tmp_path):
    """Of a program in the place of zig, which links in a command of its own."""
    text = 'case "$*" in *--version) exit;; "$FAILS "*) exit 1;; esac'
    install_package(monkeypatch, tmp_path / "ziglang", text)
    monkeypatch.setenv("FAILS", "clang")
    with pytest.raises(BuildError, match=r"zig fails to compile .*packaged-.*\.cpp \(status 1\)"):
        build(ANSWER, name="packaged", isa="portable")
    monkeypatch.setenv("FAILS", "ld.lld")
    with pytest.raises(BuildError, match=r"zig fails to link object files \(status 1\)"):
        build(ANSWER, name="packaged", isa="portable")


def test_a_zig_without_headers_names_the_package(folder, fresh_cache, monkeypatch):
    monkeypatch.setenv("CXX", str(program(folder / "zig")))
    with pytest.raises(BuildError, match="no C headers") as caught:
        build(ANSWER, name="bare", isa="portable")
    assert "pip install 'intaglio[compiler]'" in caught.value.remedy


def installed(name: str) -> str | None:
    """Return the path of a compiler other than g++ on this machine."""
    if name == "ziglang":
        found = importlib.util.find_spec(name)
        return found and os.path.join(found.submodule_search_locations[0], "zig")
    return os.environ.get("CLANGXX") or shutil.which(name)


class Rows(nn.Module):
    """Float loops, lookup tables and a transpose."""

    shape = (16, 24)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(24, 24), nn.LayerNorm(24), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.gelu(self.norm(torch.softmax(self.first(x), -1)))
        return self.last(torch.tanh(y.transpose(1, 2)))


@pytest.mark.slow(reason="compiles the library with other compilers")
@pytest.mark.parametrize("isa", ["amx_int8", "avx512vnni", "avxvnni", "avx2", "portable"])
@pytest.mark.parametrize("name", ["clang++", "ziglang"])
def test_every_compiler_gives_the_same_bits(name, isa, monkeypatch, tmp_path_factory):
    path = installed(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    if isa not in native_library.machine.isas():
        pytest.skip(f"this machine does not run {isa}")
    expected = {net: compiled(net) for net in (nets.Residual, nets.Grouped, Rows)}
    monkeypatch.setenv("CXX", path)
    monkeypatch.setenv("INTAGLIO_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    assert toolchain.version_of(toolchain.find_toolchain("test"))
    assert native_library.open_library(isa).intaglio_parallel
    for net, (model, lowered) in expected.items():
        x = nets.example(net(), 3)
        assert_same(stages.compile(lowered, isa=isa)(x), model(x))
