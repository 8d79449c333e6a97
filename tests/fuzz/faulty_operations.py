"""The operations whose system calls the driver `faults` lets fail, each with what must hold afterwards."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from unittest import mock

import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.backends.onnx import onnx_export
from intaglio.errors import IntaglioError
from intaglio.native.compile import build, install, load
from intaglio.native.units import TranslationUnit
from intaglio.output_paths import replace_file_by
from intaglio.plan import Geometry, geometries, plan_graph
from intaglio.quant.calibrate.ranges import Ranges
from intaglio.quant.recipes.recipe import Recipe
from intaglio.tune.schedule_cache import ScheduleCache
from support import nets

Files = dict[str, bytes]
DRAFT = re.compile(r"(^|/)\.(intaglio|build)-[0-9a-f]+\.tmp")
"""Temporary files and folders of intaglio."""


class MismatchError(AssertionError):
    """An attempt has left something that must not be."""


@cache
def converted(width: int = 5) -> tuple[stages.Reference, Ranges]:
    """Return a reference and the ranges that it was converted with."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nets.randomize(nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3)))
    batch = torch.randn(4, 6)
    prepared = stages.prepare(stages.capture(net, batch))
    ranges = stages.calibrate(prepared, [batch])
    return stages.convert(prepared, ranges), ranges


@cache
def model(width: int = 5) -> intaglio.QuantizedModel:
    """Return a compiled model."""
    return stages.compile(converted(width)[0])


class Operation:
    """An operation on files of a folder. Subclasses say what it does and what holds when it is done."""

    names_path = True
    """An error must name the folder or a file in it."""
    may_fail = True
    """The operation may raise an error."""

    def __init__(self, folder: Path) -> None:
        self.root, self.folder = folder, folder / "folder"
        self.before: Files = {}
        self.after: Files = {}

    def prepare(self) -> None:
        """Make the folder as it is before an attempt."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700)
        self.set_up()
        self.before = contents(self.folder)

    def set_up(self) -> None:
        """Write what is there before."""

    def run(self) -> None:
        """Do what is to be tested."""
        raise NotImplementedError

    def run_again(self) -> None:
        """Do it once more, after which no draft may be left."""
        self.run()

    def check_error(self, raised: BaseException | None) -> None:
        """Check the error of an attempt."""
        if raised is None:
            return
        if not isinstance(raised, IntaglioError) or not self.may_fail:
            raise MismatchError(f"raises {type(raised).__name__}: {raised}") from raised
        if self.names_path and str(self.folder) not in str(raised):
            raise MismatchError(f"the error does not name the path: {raised}")

    def check_files(self, with_drafts: bool) -> None:
        """Check that the folder is as it was before or as it is afterwards, possibly with drafts."""
        found = contents(self.folder)
        if with_drafts:
            found = {name: content for name, content in found.items() if not DRAFT.search(name)}
        if found != self.before and not self.is_complete(found):
            changed = sorted(name for name in {*found, *self.before} if found.get(name) != self.before.get(name))
            raise MismatchError(f"files are neither as before nor complete: {', '.join(changed)}")

    def is_complete(self, found: Mapping[str, bytes]) -> bool:
        """Return whether the files are those of an attempt that succeeds."""
        if not self.after:
            with_new = Path(self.root, "new")
            own, self.folder = self.folder, with_new
            try:
                self.prepare()
                self.run()
                self.after = contents(with_new)
            finally:
                self.folder = own
                shutil.rmtree(with_new)
                self.before = {}
        return dict(found) == self.after

    def check_done(self) -> None:
        """Check the files after the next attempt."""
        if not self.is_complete(contents(self.folder)):
            raise MismatchError(f"the next attempt gives other files: {sorted(contents(self.folder))}")


def contents(folder: Path) -> Files:
    """Return the bytes of every file, and an empty text for every other entry, by path."""
    return {
        str(path.relative_to(folder)) + "/" * path.is_dir(): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


# ---- files that users name --------------------------------------------------------------------------------------


class Write(Operation):
    """Replaces a file by a new one."""

    def __init__(self, folder: Path, write: Callable[[Path], object], old: Callable[[Path], object] | None) -> None:
        super().__init__(folder)
        self.write, self.old = write, old

    def set_up(self) -> None:
        if self.old is not None:
            self.old(self.folder / "file")

    def run(self) -> None:
        self.write(self.folder / "file")


def _save(path: Path) -> None:
    model().save(path, library=False)


def _save_other(path: Path) -> None:
    model(7).save(path, library=False)


def _export(path: Path) -> None:
    model().export_c(path, isa="portable")


def _export_other(path: Path) -> None:
    model(7).export_c(path, isa="portable")
    (path / "notes.txt").write_text("mine")


def _onnx(path: Path) -> None:
    replace_file_by(path, _onnx_writer())


@cache
def _onnx_writer() -> Callable[[Path], object]:
    """Return what `compile(..., "onnx")` writes with, without exporting again for every attempt."""
    found = []
    with mock.patch.object(onnx_export, "replace_file_by", lambda path, write: found.append(write)):
        stages.compile(converted()[0], "onnx", path="/tmp/m.onnx")
    return found[0]


def _recipe(path: Path) -> None:
    Recipe.of({"0": {"bits": 7}}).with_parameters(converted()[0].parameters).save(path)


def _text(path: Path) -> None:
    path.write_text("before")


class Load(Operation):
    """Loads a file whose program is in the kernel cache."""

    def set_up(self) -> None:
        _save(self.folder / "file")

    def run(self) -> None:
        loaded, x = intaglio.load(self.folder / "file"), torch.ones(2, 6)
        if not torch.equal(loaded(x), model()(x)):
            raise MismatchError("the loaded model gives other bits")

    def check_done(self) -> None:
        """Nothing is written."""


class ReadRanges(Operation):
    """Reads ranges."""

    def set_up(self) -> None:
        converted()[1].save(self.folder / "file")

    def run(self) -> None:
        if Ranges.load(self.folder / "file") != converted()[1]:
            raise MismatchError("other ranges are read")

    def check_done(self) -> None:
        """Nothing is written."""


# ---- caches -----------------------------------------------------------------------------------------------------


class Compile(Operation):
    """Compiles a program and an object file that it is linked with, into an empty kernel cache."""

    source = (
        'extern "C" int one();\nextern "C" __attribute__((visibility("default"))) int two() { return 1 + one(); }\n'
    )
    unit = TranslationUnit("one", "digest", ".cpp", lambda: 'extern "C" int one() { return 1; }\n')

    def run(self, more: str = "") -> None:
        with mock.patch.dict(os.environ, {"INTAGLIO_CACHE_DIR": str(self.folder)}):
            path = build(self.source + more, name="k", isa="portable", units=(self.unit,))
            if load(path).two() != 2:
                raise MismatchError("the program computes something else")

    def run_again(self) -> None:
        """Find the program or compile it, and compile another one, which removes drafts of killed processes."""
        self.run()
        self.run("int another;")

    def is_complete(self, found: Mapping[str, bytes]) -> bool:
        """Return whether there are entries only, which the next attempt checks."""
        return all(name == "kernels/" or name.endswith((".so", ".o", ".cpp")) for name in found)

    def check_done(self) -> None:
        names = {Path(name).suffix for name in contents(self.folder)}
        if names != {"", ".so", ".o", ".cpp"}:
            raise MismatchError(f"the cache has {sorted(contents(self.folder))}")


class Install(Operation):
    """Writes the library of a trusted file into the kernel cache."""

    def run(self) -> None:
        with mock.patch.dict(os.environ, {"INTAGLIO_CACHE_DIR": str(self.folder)}):
            install(b"content", name="k")

    def is_complete(self, found: Mapping[str, bytes]) -> bool:
        """Return whether there is no entry, or the complete one."""
        entries = {name: content for name, content in found.items() if not name.endswith("/")}
        return all(Path(name).suffix == ".so" and content == b"content" for name, content in entries.items())


class StoreSchedule(Operation):
    """Writes a schedule into its cache and reads it. Failures are never errors."""

    may_fail = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        plan = plan_graph(stages.requantize(converted()[0]).graph)
        self.geometries: list[Geometry] = list(geometries(plan, {"n": 4}).values())
        self.cache = ScheduleCache("portable", 1)
        self.schedule = stages.plan(stages.requantize(converted()[0]), "portable").plan.schedules

    def run(self) -> None:
        schedule = next(iter(self.schedule.values()))
        with mock.patch.dict(os.environ, {"INTAGLIO_CACHE_DIR": str(self.folder)}):
            self.cache.store(dict.fromkeys(self.geometries, schedule))
            if any(self.cache.load(geometry) not in (None, schedule) for geometry in self.geometries):
                raise MismatchError("another schedule is read")

    def is_complete(self, found: Mapping[str, bytes]) -> bool:
        """Return whether there are complete entries only."""
        return all(
            name == "schedules/" or (name.endswith(".json") and content.endswith(b"}"))
            for name, content in found.items()
        )


OPERATIONS: dict[str, Callable[[Path], Operation]] = {
    "save": lambda folder: Write(folder, _save, _save_other),
    "save library": lambda folder: Write(folder, lambda path: model().save(path), None),
    "save new": lambda folder: Write(folder, _save, None),
    "load": Load,
    "compile": Compile,
    "install": Install,
    "export": lambda folder: Write(folder, _export, _export_other),
    "export new": lambda folder: Write(folder, _export, None),
    "onnx": lambda folder: Write(folder, _onnx, _text),
    "recipe": lambda folder: Write(folder, _recipe, _text),
    "ranges": lambda folder: Write(folder, lambda path: converted()[1].save(path), _text),
    "read ranges": ReadRanges,
    "schedules": StoreSchedule,
}
