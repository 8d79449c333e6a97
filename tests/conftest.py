"""Fixtures and options all tests share: golden texts, fixed seeds, a private cache, Hypothesis profiles."""

import contextlib
import ctypes
import difflib
import gc
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from intaglio.native import native_library
from intaglio.native.cpu import isas
from support.export_memo import ExportMemo
from support.first_collection import FirstCollection

GOLDEN = Path(__file__).parent / "golden"
DIFF_LINES = 40
PROGRAMS = ExportMemo()

if "PYTEST_XDIST_WORKER" in os.environ:
    # One core a worker and process started by it: threads of several that wait by spinning take it from each other.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tracing allocates so many small objects that Python's collector takes a quarter of a test's time: what is imported is
# left out of it, and it runs less often.
gc.freeze()
gc.set_threshold(50_000, 20, 100)

# pytest would add its handlers to each of torch's forty loggers, several times a test, and collect every record of
# torch's own trace, with its graphs as text: a tenth of the time of an export.
for name, logger in logging.root.manager.loggerDict.items():
    if name.startswith("torch") and isinstance(logger, logging.Logger) and not logger.propagate:
        logger.addHandler = logger.removeHandler = lambda handler: None
logging.getLogger("torch.__trace").handlers.clear()

# torch.manual_seed records a stack trace for every kind of device that is not there, and keeps it.
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():
        device.manual_seed_all = lambda seed: None

settings.register_profile("default", deadline=None, max_examples=20, print_blob=True)
settings.register_profile("thorough", deadline=None, max_examples=300, print_blob=True)
settings.load_profile(os.environ.get("INTAGLIO_HYPOTHESIS", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden from what the tests produce")
    parser.addoption("--case", action="append", default=[], help="only tests of 'backend 12', or of 'backend'")


def pytest_configure(config: pytest.Config) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if (hooks := FirstCollection.of(worker, Path(__file__).parent)) is not None:
        config.pluginmanager.register(hooks)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests of properties, and keep those of the cases or documents that ``--case`` names."""
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("examples")
    if wanted := config.getoption("--case"):
        kept = [item for item in items if any(_is_case(case, wanted) for case in _cases_of(item))]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def _cases_of(item: pytest.Item) -> list[str]:
    return [case for marker in item.iter_markers("case") for case in marker.args]


def _is_case(case: str, wanted: list[str]) -> bool:
    return any(case == name or case.rpartition(" ")[0] == name for name in wanted)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def as_many_threads_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models run on one thread, whatever PyTorch is told; in tests they share their steps like large ones."""
    from intaglio.runtime.calls import threads

    monkeypatch.setattr(
        threads, "thread_counts", lambda program, symbols, allowed, delay: (allowed,) * program.segments
    )


@pytest.fixture(autouse=True)
def traced_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of one structure are traced by torch.export once a process; in tests of tracing, each time."""
    from intaglio.tracing import trace

    if "tracing" not in request.path.parts:
        monkeypatch.setattr(trace, "export", PROGRAMS)


@pytest.fixture
def operators_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.onnx reads the source of its operators once a process, not for every export."""
    from support import onnx_registry

    monkeypatch.setattr(onnx_registry.ONNXRegistry, "from_torchlib", staticmethod(onnx_registry.registry_of_torchlib))


@pytest.fixture
def untimed_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that a search chooses is not timed beside the float model, which captures the float model again."""
    from intaglio.mixed_precision import search_start

    monkeypatch.setattr(search_start, "measure_speed", lambda *arguments: None)


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is intaglio's cache during the test."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("INTAGLIO_CACHE_DIR", str(folder))
    return folder


USED_LATELY = 3600
"""Seconds since a kernel was used that this run of the tests may use again. Old caches hold thousands of others."""


@pytest.fixture
def fresh_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is intaglio's cache during the test and holds no program, but kernels that were used lately."""
    from intaglio import config

    compiled, folder = config.cache_dir() / "kernels", tmp_path / "cache"
    (folder / "kernels").mkdir(parents=True)
    for unit in compiled.glob("*.o"):
        with contextlib.suppress(FileNotFoundError):  # other tests may evict it
            if time.time() - unit.stat().st_mtime < USED_LATELY:
                shutil.copy2(unit, folder / "kernels")  # links are not trusted
    monkeypatch.setenv("INTAGLIO_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(params=isas(), scope="module")
def runtime_library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The native functions, compiled for each instruction set of the processor."""
    return native_library.open_library(request.param)


@pytest.fixture
def counting_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that adds a line to the returned file each time it makes a shared object."""
    log, compiler = tmp_path / "compiled", tmp_path / "counting"
    log.touch()
    text = f'case " $* " in *" -shared "*) echo compiled >> {log};; esac\nexec {shutil.which("g++")} "$@"'
    compiler.write_text(f"#!/bin/sh\n{text}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return log


@pytest.fixture
def without_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without AVX-512, for tests above the kernels: g++ takes ten times as long for some of its programs,
    those of weight-only layers (`linear_f32`) in particular."""
    from intaglio.native import cpu

    found = tuple(isa for isa in cpu.isas() if not isa.startswith("avx512"))
    monkeypatch.setattr(cpu, "isas", lambda: found)


@pytest.fixture
def many_threads() -> Iterator[Callable[[int], None]]:
    """``torch.set_num_threads``, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`golden(text)` compares with tests/golden/<module>/<test>.txt, `golden(text, name)` with <name>.txt beside it."""
    folder = GOLDEN / request.path.stem
    update = request.config.getoption("--update-golden")
    used = set()

    def compare(text: str, name: str | None = None) -> None:
        path = folder / (re.sub(r"[^\w.-]+", "_", name or request.node.name).strip("_") + ".txt")
        assert path not in used, f"two texts of one test for {path.name}: give each a name"
        used.add(path)
        text = text.rstrip("\n") + "\n"
        if update:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        else:
            check_golden(text, path)

    return compare


def check_golden(text: str, path: Path) -> None:
    """Fail with a short diff, and how to accept it, when `path` does not hold `text`."""
    remedy = "to accept it: pytest --update-golden"
    shown = path.relative_to(GOLDEN.parents[1])
    if not path.exists():
        pytest.fail(f"{shown} does not exist; {remedy}", pytrace=False)
    expected = path.read_text(encoding="utf-8")
    if text == expected:
        return
    before, after = expected.splitlines(), text.splitlines()
    diff = list(difflib.unified_diff(before, after, str(shown), "this run", lineterm="", n=2))
    if len(diff) > DIFF_LINES:
        diff[DIFF_LINES:] = [f"… {len(diff) - DIFF_LINES} more lines"]
    pytest.fail("\n".join([*diff, remedy]), pytrace=False)
