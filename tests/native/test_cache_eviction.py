"""Entries that other threads and processes evict from the kernel cache do not vanish from under a build."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from intaglio import config
from intaglio.native import cache_folder, program_cache
from intaglio.native import compile as compiler
from intaglio.native.compile import build, build_units, install, load
from intaglio.native.toolchain import find_toolchain
from intaglio.native.units import TranslationUnit

EXPORT = 'extern "C" __attribute__((visibility("default"))) '
OLD_SECONDS = 2 * cache_folder.GRACE_SECONDS


def part(number: int) -> TranslationUnit:
    return TranslationUnit(
        f"part{number}", f"digest {number}", ".cpp", lambda: f'extern "C" int part() {{ return {number}; }}'
    )


def program(number: int) -> str:
    return f'extern "C" int part();\n{EXPORT}int answer() {{ return part() + {number}; }}\n'


def make_old(folder: Path) -> None:
    """Let all entries look as if they were last used before the time in which entries are not evicted."""
    then = time.time() - OLD_SECONDS
    for file in folder.iterdir():
        os.utime(file, (then, then))


def evict_during_lookup(folder: Path, monkeypatch: pytest.MonkeyPatch) -> threading.Thread:
    """Let another thread evict all old entries just before an entry that was found is marked as used."""
    other, mark = threading.Thread(target=cache_folder.evict, args=(folder, 0)), os.utime

    def late(*arguments: object) -> None:
        if other.ident is None:
            other.start()
            other.join(0.2)  # it waits for the end of the lookup
        mark(*arguments)

    monkeypatch.setattr(os, "utime", late)
    return other


def test_an_object_file_that_another_process_evicts_during_compilation_is_linked(fresh_cache, monkeypatch):
    folder = build(program(1), name="a", isa="portable", units=[part(1)]).parent
    make_old(folder)
    folders: list[Path] = []
    write = compiler.split_program

    def evicting(*arguments: object) -> list[str]:
        cache_folder.evict(folder, 0)
        folders.append(folder)
        for entry in folder.glob("part1-*.o"):
            entry.unlink()  # also one that was used just now, if the compiler takes long
        return write(*arguments)

    monkeypatch.setattr(compiler, "split_program", evicting)
    assert load(build(program(2), name="b", isa="portable", units=[part(1)])).answer() == 3
    assert folders


def test_a_program_that_is_found_is_not_evicted_before_it_is_marked_as_used(fresh_cache, monkeypatch):
    path = build(program(1), name="a", isa="portable", units=[part(1)])
    make_old(path.parent)
    other = evict_during_lookup(path.parent, monkeypatch)
    assert build(program(1), name="a", isa="portable", units=[part(1)]) == path
    other.join()
    assert path.exists()


def test_an_installed_library_that_is_found_is_not_evicted_before_it_is_marked_as_used(fresh_cache, monkeypatch):
    path = install(b"content", name="k")
    make_old(path.parent)
    other = evict_during_lookup(path.parent, monkeypatch)
    assert install(b"content", name="k") == path
    other.join()
    assert path.exists()


def test_an_entry_that_is_written_again_during_an_eviction_is_kept(fresh_cache, monkeypatch):
    path = build(program(1), name="a", isa="portable", units=[part(1)])
    make_old(path.parent)
    again = {"name": "a", "isa": "portable", "units": [part(1)], "force": True}
    other, list_entries = threading.Thread(target=build, args=(program(1),), kwargs=again), cache_folder._entries

    def late(folder: Path) -> list[object]:
        found = list_entries(folder)
        if other.ident is None:
            other.start()
            other.join(0.5)  # it waits for the end of the eviction
        return found

    monkeypatch.setattr(cache_folder, "_entries", late)
    cache_folder.evict(path.parent, 0)
    other.join()
    assert load(path).answer() == 2


def test_units_that_are_built_alone_are_marked_as_used_and_evict_others(fresh_cache, monkeypatch):
    monkeypatch.setattr(config, "cache_limit_bytes", lambda: 0)
    place = {"isa": "portable", "toolchain": find_toolchain("units"), "folder": fresh_cache / "kernels"}
    build_units([part(1), part(2)], **place)
    assert names(fresh_cache) == ["part1", "part2"]
    make_old(fresh_cache / "kernels")
    build_units([part(1)], **place)  # a hit
    build_units([part(3)], **place)
    assert names(fresh_cache) == ["part1", "part3"]


def names(cache: Path) -> list[str]:
    return sorted(file.name.rpartition("-")[0] for file in (cache / "kernels").iterdir())


def test_digests_of_texts_are_evicted_when_the_cache_is_full(fresh_cache, monkeypatch):
    for number in range(4):
        program_cache.write_text(f"key {number}", "a" * 64)
    (size,) = {file.stat().st_size for file in (fresh_cache / program_cache.FOLDER).iterdir()}
    make_old(fresh_cache / program_cache.FOLDER)
    assert program_cache.known_text("key 1")  # a hit: now the most recently used
    monkeypatch.setattr(config, "programs_limit_bytes", lambda: 3 * size)
    program_cache.write_text("new", "b" * 64)
    known = [program_cache.known_text(key) for key in (*(f"key {number}" for number in range(4)), "new")]
    assert known[1] == "a" * 64
    assert known[4] == "b" * 64
    assert sum(map(bool, known)) == 3


def test_a_cache_without_space_stores_no_digest_of_a_text(fresh_cache, monkeypatch):
    monkeypatch.setenv("INTAGLIO_CACHE_MB", "0")
    program_cache.write_text("key", "a" * 64)
    assert not (fresh_cache / program_cache.FOLDER).exists()


def test_a_file_that_is_no_entry_is_neither_counted_nor_removed(tmp_path):
    (tmp_path / "notes.txt").write_bytes(bytes(1000))
    (tmp_path / "a-1.so").write_bytes(bytes(100))
    make_old(tmp_path)
    cache_folder.evict(tmp_path, 100)
    assert len(list(tmp_path.iterdir())) == 2


def test_eviction_works_in_a_folder_that_cannot_be_locked(tmp_path, monkeypatch):
    def no_locks(*arguments: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(cache_folder.fcntl, "flock", no_locks)
    (tmp_path / "a-1.so").write_bytes(bytes(100))
    make_old(tmp_path)
    with cache_folder.keeping_entries(tmp_path), cache_folder.keeping_entries(tmp_path / "missing"):
        pass
    cache_folder.evict(tmp_path, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_lock_of_a_folder(tmp_path):
    with cache_folder.keeping_entries(tmp_path):
        reading, writing = os.pipe()
        if not (child := os.fork()):
            signal.alarm(60)
            os.close(writing)
            os.read(reading, 1)  # until the parent has evicted, or has ended
            os._exit(0)
    os.close(reading)
    try:
        cache_folder.evict(tmp_path, 0)
    finally:
        os.close(writing)
        status = os.waitpid(child, 0)[1]
    assert status == 0
