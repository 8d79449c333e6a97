"""The compiled programs in a file: a library for each instruction set, and the thread pool that they run on.

They are native code, which `intaglio.load` only uses with ``trust=True``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from intaglio.errors import BuildError
from intaglio.ir import Program, Schedule
from intaglio.native.compile import read_library
from intaglio.native.cpu import ISA_FLAGS
from intaglio.native.native_library import RuntimeLibrary, runtime_library
from intaglio.runtime.artifact import build_program, program_key
from intaglio.runtime.saved.attribute_codec import as_text
from intaglio.runtime.saved.json_codec import checked_identifier, checked_integer
from intaglio.runtime.saved.members import Member

RUNTIME_MEMBER = "runtime.so"


@dataclass(frozen=True)
class Library:
    """A shared library for one instruction set, and what planning needs to print the text it was compiled from.

    Attributes:
        content: bytes of the library.
        key: digest of the text.
        schedules: schedules of the text by output value.
        caches: bytes of the first- and second-level caches that the text was planned for; ``None`` in files of 0.1.
    """

    content: bytes = field(repr=False)
    key: str
    schedules: Mapping[str, Schedule]
    caches: tuple[int, int] | None = None


def library_of(program: Program, content: bytes) -> Library:
    """Return the library of a program from the bytes of its shared library."""
    return Library(content, program_key(program), program.notes.get("schedules", {}), program.notes.get("caches"))


def build_library(program: Program) -> Library:
    """Compile a program, or find it in the cache, without loading it. This machine need not support the instruction
    set."""
    return library_of(program, read_library(build_program(program)))


def runtime_for(libraries: Collection[str]) -> RuntimeLibrary | None:
    """Return the thread pool for libraries of these instruction sets: the one for the least of them, which every
    machine that runs one of the libraries can run. Return ``None`` if there are none, or it cannot be built."""
    if not libraries:
        return None
    try:
        return runtime_library([isa for isa in ISA_FLAGS if isa in libraries][-1])
    except BuildError:  # the file can then be loaded where there is a compiler
        return None


def library_entries(libraries: Mapping[str, Library], runtime: RuntimeLibrary | None) -> dict[str, Any]:
    """Return the entries of the manifest that describe compiled programs."""
    entries: dict[str, Any] = {
        "isa": list(libraries),
        "libraries": {isa: _library_entry(library) for isa, library in libraries.items()},
    }
    return entries if runtime is None else {**entries, "runtime": {"isa": runtime.isa, "key": runtime.key}}


def library_members(libraries: Mapping[str, Library], runtime: RuntimeLibrary | None) -> dict[str, bytes]:
    """Return the members of a file that hold compiled programs."""
    members = {f"program-{isa}.so": library.content for isa, library in libraries.items()}
    return members if runtime is None else {**members, RUNTIME_MEMBER: runtime.content}


def take_libraries(
    manifest: Mapping[str, Any], members: dict[str, Member]
) -> tuple[dict[str, Library], RuntimeLibrary | None]:
    """Return the compiled programs of a file, whose members are removed. Raise `ValueError` if a member is missing."""
    libraries = {
        isa: _library(take_member(members, f"program-{isa}.so").read(), entry)
        for isa, entry in manifest["libraries"].items()
    }
    entry = manifest.get("runtime")
    if entry is None:
        return libraries, None
    content = take_member(members, RUNTIME_MEMBER).read()
    return libraries, RuntimeLibrary(content, as_text(entry["isa"]), as_text(entry["key"]))


def take_member(members: dict[str, Member], name: str) -> Member:
    """Remove a member and return it. Raise `ValueError` if it is missing."""
    if name not in members:
        raise ValueError(f"'{name}' is missing")
    return members.pop(name)


def schedule_entries(schedules: Mapping[str, Schedule]) -> Any:
    """Return schedules by output value for JSON."""
    return {name: asdict(schedule) for name, schedule in schedules.items()}


def schedules_of(entries: Any) -> dict[str, Schedule]:
    """Return the schedules that `schedule_entries` wrote."""
    return {
        as_text(name): Schedule(**{checked_identifier(key): checked_integer(value) for key, value in fields.items()})
        for name, fields in entries.items()
    }


def _library_entry(library: Library) -> Any:
    entry = {"key": library.key, "schedules": schedule_entries(library.schedules)}
    return entry if library.caches is None else {**entry, "caches": list(library.caches)}


def _library(content: bytes, entry: Any) -> Library:
    caches = None
    if "caches" in entry:
        first, second = map(checked_integer, entry["caches"])
        caches = first, second
    return Library(content, as_text(entry["key"]), schedules_of(entry["schedules"]), caches)
