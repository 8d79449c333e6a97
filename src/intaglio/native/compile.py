"""Compilation of C++ text to shared objects in a kernel cache, which is keyed by content and bounded in size.

An entry is ``<name>-<key>.so`` with its source ``<name>-<key>.cpp``, or ``<name>-<key>.o``, the object file of a
`TranslationUnit` that several shared objects are linked from. Entries are written atomically. The last bytes of ``.so``
and ``.o`` files are the SHA-256 of the rest, which loaders and linkers ignore, so that a damaged entry is detected
before it is used and is built again.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from intaglio.drafts import draft_folder
from intaglio.errors import BuildError
from intaglio.native.cache_folder import (
    MOVE_CACHE,
    evict,
    keeping_entries,
    make_folder,
    mark_used,
    place_entry,
    read_entry,
    trusted_folder,
)
from intaglio.native.compiler_runs import run_together
from intaglio.native.cpu import ISA_FLAGS
from intaglio.native.split_program import split_program
from intaglio.native.toolchain import Toolchain, find_toolchain
from intaglio.native.units import TranslationUnit, include_option, included, library_units

CACHE_FORMAT = "2"
SEAL = b"\nintaglio sha256 "
SEAL_BYTES = len(SEAL) + 64
BUILD_PREFIX = ".build-"

# The linker drops functions of an object file that are never called.
UNIT_FLAGS = ("-ffunction-sections",)

_locks: dict[Path, threading.Lock] = {}
_loaded: dict[Path, ctypes.CDLL] = {}
os.register_at_fork(after_in_child=_locks.clear)


def build(
    source: str,
    *,
    name: str,
    isa: str,
    headers: tuple[str, ...] = (),
    units: Sequence[TranslationUnit] = (),
    force: bool = False,
) -> Path:
    """Compile C++ text to a shared object for instruction set ``isa`` and return its path.

    An entry of the cache is reused unless ``force`` is set. The text may include files of this folder; they are part of
    the key, and so are the files that ``headers`` names. The shared object is linked with ``units`` and with the parts
    of the library whose headers the text includes. All missing objects are compiled in parallel.

    Raises:
        BuildError: No compiler was found, it rejects the text, or the cache folder cannot be written.
    """
    toolchain = find_toolchain(name)
    path, objects = _entries(source, toolchain, name, isa, headers, units)
    folder = path.parent
    with _locked(*sorted(objects), path), _folder_errors(name, folder):
        if force or not _is_found(path, *objects):
            make_folder(folder)
            _compile(source, toolchain, isa, name, path, objects)
            evict(folder)
    return path


def build_units(units: Sequence[TranslationUnit], *, isa: str, toolchain: Toolchain, folder: Path) -> None:
    """Compile those of some units that a folder of kernels does not have, one after the other.

    Raises:
        BuildError: as for `build`.
    """
    for unit in units:
        entry = _unit_path(unit, toolchain, isa, folder)
        with _locked(entry), _folder_errors(unit.name, folder):
            if _is_found(entry):
                continue
            make_folder(folder)
            with draft_folder(folder, BUILD_PREFIX, mode=0o700) as scratch:
                run_together(_unit_commands({entry: unit}, toolchain, isa, scratch), unit.name, scratch)
                _seal_as(scratch / entry.name, entry)
            evict(folder)


def _is_found(path: Path, *objects: Path) -> bool:
    """Return whether ``path`` is a complete entry, and mark it as used, with the objects that it was linked from."""
    with keeping_entries(path.parent):
        if not is_intact(path):
            return False
        for entry in (path, *objects):
            mark_used(entry)
    return True


@contextlib.contextmanager
def _locked(*paths: Path) -> Iterator[None]:
    """Let other threads of this process that need one of these entries wait for it."""
    with contextlib.ExitStack() as stack:
        for path in paths:
            stack.enter_context(_locks.setdefault(path, threading.Lock()))
        yield


@contextlib.contextmanager
def _folder_errors(name: str, folder: Path) -> Iterator[None]:
    """Raise errors of the file system as `BuildError`."""
    try:
        yield
    except OSError as error:
        problem = f"the kernel cache {folder} cannot be used: {error}"
        raise BuildError(name, None, problem, remedy=MOVE_CACHE) from error


def is_built(source: str, *, name: str, isa: str) -> bool:
    """Return whether the cache has what `build` would return for this text. Without a compiler, whose version is in the
    keys, nothing can be found.
    """
    try:
        path, _ = _entries(source, find_toolchain(name), name, isa)
    except BuildError:
        return False
    return is_intact(path)


def text_key(source: str, isa: str, units: Sequence[TranslationUnit] = ()) -> str:
    """Return the digest of all that a library is compiled from: text, headers, units and instruction set, not the
    compiler.
    """
    parts = [CACHE_FORMAT, isa, _without_comments(source), *(unit.digest for unit in (*units, *library_units(source)))]
    parts += [part for item in sorted(included(source).items()) for part in item]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def install(content: bytes, *, name: str) -> Path:
    """Write a shared object that was built elsewhere into the cache, under the digest of its bytes, and return its
    path.

    `build` never returns such an entry.

    Raises:
        BuildError: The cache folder cannot be written.
    """
    folder = trusted_folder("kernels")
    path = folder / f"trusted-{hashlib.sha256(content).hexdigest()}.so"
    with _folder_errors(name, folder):
        with keeping_entries(folder):
            found = read_entry(path) == content
            if found:
                mark_used(path)
        if not found:
            make_folder(folder)
            with draft_folder(folder, BUILD_PREFIX, mode=0o700) as scratch:
                draft = scratch / "library.so"
                draft.write_bytes(content)
                draft.chmod(0o755)
                place_entry(draft, path)
            evict(folder)
    return path


def load(path: Path) -> ctypes.CDLL:
    """Load the library at ``path``, once per path and process."""
    if path not in _loaded:
        try:
            _loaded.setdefault(path, ctypes.CDLL(str(path)))
        except OSError as error:
            raise BuildError(
                str(path), None, f"the compiled library cannot be loaded: {error}", remedy=MOVE_CACHE
            ) from error
    return _loaded[path]


def read_library(path: Path) -> bytes:
    """Return the bytes of a shared object in the cache. Raise `BuildError` if they cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise BuildError(str(path), None, f"the compiled library cannot be read: {error}", remedy=MOVE_CACHE) from error


def is_intact(path: Path) -> bool:
    """Return whether ``path`` is a complete entry: a trusted file whose seal matches its bytes."""
    return _intact(path) is not None


def _intact(path: Path) -> bytes | None:
    """Return the bytes of a complete entry, or ``None``."""
    content = read_entry(path)
    return content if content is not None and content[-SEAL_BYTES:] == _seal(content[:-SEAL_BYTES]) else None


def _entries(
    source: str,
    toolchain: Toolchain,
    name: str,
    isa: str,
    headers: tuple[str, ...] = (),
    units: Sequence[TranslationUnit] = (),
) -> tuple[Path, dict[Path, TranslationUnit]]:
    """Return the path of a shared object in the cache, and those of the object files that it is linked from."""
    folder = trusted_folder("kernels")
    objects = {_unit_path(unit, toolchain, isa, folder): unit for unit in (*units, *library_units(source))}
    key = _key(source, toolchain, isa, headers, [path.name for path in objects])
    return folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', name)[:80]}-{key[:16]}.so", objects


def _key(source: str, toolchain: Toolchain, isa: str, headers: tuple[str, ...], objects: Sequence[str]) -> str:
    """Return the key of a shared object: the digest of everything that it is built from."""
    texts = included(source, headers)
    parts = [CACHE_FORMAT, isa, *toolchain.key(ISA_FLAGS[isa]), _without_comments(source), *objects]
    parts += [part for name in sorted(texts) for part in (name, texts[name])]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _without_comments(source: str) -> str:
    """Drop comment lines, so that programs that differ only in the scales they mention share a library."""
    return re.sub(r"^ *//.*\n", "", source, flags=re.MULTILINE)


def _unit_path(unit: TranslationUnit, toolchain: Toolchain, isa: str, folder: Path) -> Path:
    """Return the path of a unit's object file in the cache."""
    parts = [CACHE_FORMAT, isa, *toolchain.key(ISA_FLAGS[isa]), *UNIT_FLAGS, unit.digest]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return folder / f"{unit.name}-{key[:16]}.o"


def _compile(
    source: str, toolchain: Toolchain, isa: str, name: str, path: Path, objects: dict[Path, TranslationUnit]
) -> None:
    """Write the entry ``path`` and those of ``objects`` that are missing.

    Temporary files, including those of the compiler, are in a folder that is deleted before the function returns. So
    are the object files that are linked, because other processes may evict those of the cache meanwhile.
    """
    text = path.with_suffix(".cpp")
    with draft_folder(path.parent, BUILD_PREFIX, mode=0o700) as scratch:
        missing = {entry: unit for entry, unit in objects.items() if not _copied(entry, scratch)}
        draft = scratch / "kernel.cpp"
        draft.write_text(source, encoding="utf-8")
        draft.chmod(0o644)  # whatever the umask is: others must not be able to write to it
        place_entry(draft, text)
        made, programs = scratch / "kernel.so", [text]
        parts = _program_parts(source, text, scratch)
        if missing or len(parts) > 1 or not toolchain.links_sources:
            programs = [scratch / f"{part.stem}.o" for part in parts]
            compile_one = _compile_command(toolchain, isa)
            commands = [[*compile_one, str(a), "-o", str(b)] for a, b in zip(parts, programs, strict=True)]
            commands += _unit_commands(missing, toolchain, isa, scratch)
            run_together(commands, name, scratch)
        linked = [*programs, *(scratch / entry.name for entry in objects)]
        link = [*toolchain.link_command(ISA_FLAGS[isa])] + [include_option()] * toolchain.links_sources
        run_together([[*link, *map(str, linked), "-o", str(made), *toolchain.libraries]], name, scratch)
        for entry in missing:
            _seal_as(scratch / entry.name, entry)
        _seal_as(made, path)


def _copied(entry: Path, folder: Path) -> bool:
    """Copy an entry into a folder and mark it as used. Return whether it is complete; nothing is written otherwise."""
    if (content := _intact(entry)) is None:
        return False
    (folder / entry.name).write_bytes(content)
    mark_used(entry)
    return True


def _program_parts(source: str, text: Path, scratch: Path) -> list[Path]:
    """Return the files to compile for a program: its text, or parts of it that are written into a folder."""
    texts = split_program(source, len(os.sched_getaffinity(0)))
    if len(texts) == 1:
        return [text]
    parts = [scratch / f"{text.stem}_{index}.cpp" for index in range(len(texts))]
    for part, content in zip(parts, texts, strict=True):
        part.write_text(content, encoding="utf-8")
    return parts


def _compile_command(toolchain: Toolchain, isa: str) -> list[str]:
    """Return the beginning of a command that compiles a C++ file to an object file."""
    return [*toolchain.compile_command(ISA_FLAGS[isa]), include_option()]


def _unit_commands(
    missing: dict[Path, TranslationUnit], toolchain: Toolchain, isa: str, scratch: Path
) -> list[list[str]]:
    """Write the texts of ``missing`` units into a folder and return the commands that compile them there.

    One command assembles all assembly texts.
    """
    assembly, found, compile_one = [], [], _compile_command(toolchain, isa)
    for entry, unit in missing.items():
        text = scratch / f"{entry.stem}{unit.suffix}"
        text.write_text(unit.text(), encoding="utf-8")
        if unit.suffix == ".s":
            assembly += [str(text)]
        else:
            found.append([*compile_one, *UNIT_FLAGS, str(text), "-o", str(scratch / entry.name)])
    return [*([[*toolchain.frontend, "-c", *assembly]] * bool(assembly)), *found]


def _seal_as(made: Path, path: Path) -> None:
    """Append the seal to a file and move it to its path in the cache."""
    with made.open("r+b") as file:
        seal = _seal(file.read())
        file.write(seal)
    made.chmod(0o755)  # whatever the umask is: others must not be able to write to it
    place_entry(made, path)


def _seal(content: bytes) -> bytes:
    """Return the seal of an entry: a marker and the SHA-256 of its content."""
    return SEAL + hashlib.sha256(content).hexdigest().encode()
