"""The kernel cache loads only what its own user or root has written, and says so when it does not."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from intaglio import drafts
from intaglio.errors import BuildError
from intaglio.native import cache_folder, compiler_runs, native_library
from intaglio.native import compile as compiler
from intaglio.native.compile import build, install, is_intact, load

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
OTHER = 65534


def source(number: int) -> str:
    return f'extern "C" __attribute__((visibility("default"))) int answer() {{ return {number}; }}\n'


def link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "link": (link, "symbolic link"),
    "pipe": (pipe, "not a regular file"),
    "writable by the group": (lambda path: path.chmod(0o775), "lets others write"),
    "writable by all": (lambda path: path.chmod(0o757), "lets others write"),
}


@pytest.mark.parametrize(("change", "said"), CHANGES.values(), ids=CHANGES)
def test_an_entry_that_others_may_have_written_is_built_again(change, said, fresh_cache, counting_compiler, caplog):
    path = build(source(1), name="k", isa="portable")
    change(path)
    assert not is_intact(path)
    assert load(build(source(1), name="k", isa="portable")).answer() == 1
    assert len(counting_compiler.read_text().split()) == 2
    assert is_intact(path)
    assert str(path) in caplog.text
    assert said in caplog.text


@ROOT
def test_an_entry_of_another_user_is_built_again(fresh_cache, counting_compiler, caplog):
    path = build(source(2), name="k", isa="portable")
    os.chown(path, OTHER, OTHER)
    assert build(source(2), name="k", isa="portable") == path
    assert path.stat().st_uid == 0
    assert len(counting_compiler.read_text().split()) == 2
    assert f"belongs to user {OTHER}" in caplog.text


@pytest.mark.parametrize(("change", "said"), CHANGES.values(), ids=CHANGES)
def test_an_installed_library_that_others_may_have_written_is_written_again(change, said, fresh_cache, caplog):
    path = install(b"content", name="k")
    change(path)
    assert install(b"content", name="k") == path
    assert path.is_file()
    assert not path.is_symlink()
    assert not path.stat().st_mode & cache_folder.WRITABLE_BY_OTHERS
    assert said in caplog.text


def test_folders_and_files_are_writable_for_their_user_only_whatever_the_umask_is(tmp_path, monkeypatch):
    monkeypatch.setenv("INTAGLIO_CACHE_DIR", str(tmp_path / "a" / "b"))
    made: list[int] = []
    run = compiler.run_together

    def record(commands: object, name: str, folder: Path) -> None:
        made.append(stat.S_IMODE(folder.stat().st_mode))
        run(commands, name, folder)

    monkeypatch.setattr(compiler, "run_together", record)
    before = os.umask(0)
    try:
        paths = [build(source(3), name="k", isa="portable"), install(b"content", name="k")]
    finally:
        os.umask(before)
    assert set(made) == {0o700}
    paths += paths[0].parent.glob("*.cpp")
    folders = [tmp_path / "a" / "b", tmp_path / "a" / "b" / "kernels"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o755 if os.geteuid() == 0 else 0o700}
    assert not any(path.stat().st_mode & cache_folder.WRITABLE_BY_OTHERS for path in paths)


def test_a_relative_cache_folder_is_one_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable, value, folder in [
        ("INTAGLIO_CACHE_DIR", "cache", "cache"),
        ("INTAGLIO_CACHE_DIR", "~/kernels", "home/kernels"),
        ("XDG_CACHE_HOME", "xdg", "xdg/intaglio"),
    ]:
        monkeypatch.delenv("INTAGLIO_CACHE_DIR", raising=False)
        monkeypatch.setenv(variable, value)
        path = build(source(3), name="k", isa="portable")
        assert path.is_relative_to(tmp_path / folder)
        assert load(path).answer() == 3


# ---- folders of several users


def test_users_of_a_shared_folder_have_folders_of_their_own(fresh_cache):
    fresh_cache.chmod(0o1777)
    path = build(source(4), name="k", isa="portable")
    assert path.parent == fresh_cache / f"u{os.geteuid()}" / "kernels"
    assert load(path).answer() == 4


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_shared_folder_in_which_others_can_replace_files_is_refused(mode, fresh_cache):
    fresh_cache.chmod(mode)
    with pytest.raises(
        BuildError, match=r"others can replace what this folder contains[\s\S]*remedy: run chmod go-w"
    ) as e:
        build(source(5), name="k", isa="portable")
    assert e.value.where == str(fresh_cache)
    assert os.listdir(fresh_cache) == []
    fresh_cache.chmod(mode & ~0o022)  # the remedy
    assert load(build(source(5), name="k", isa="portable")).answer() == 5


@pytest.mark.parametrize("change", [lambda p: p.chmod(0o777), link], ids=["writable by all", "link"])
def test_a_folder_that_others_prepared_is_refused(change, fresh_cache):
    build(source(6), name="k", isa="portable")
    change(fresh_cache / "kernels")
    with pytest.raises(BuildError, match=r"kernels of this folder are not used[\s\S]*remedy: remove it") as raised:
        build(source(6), name="k", isa="portable")
    assert raised.value.where == str(fresh_cache / "kernels")


@ROOT
@pytest.mark.parametrize("name", ["", "kernels", "u0"])
def test_a_folder_of_another_user_is_refused(name, fresh_cache):
    if name == "u0":
        fresh_cache.chmod(0o1777)
    (fresh_cache / name).mkdir(exist_ok=True, mode=0o755)
    os.chown(fresh_cache / name, OTHER, OTHER)
    with pytest.raises(BuildError, match=f"belongs to user {OTHER}"):
        build(source(7), name="k", isa="portable")


# ---- other damage


def test_a_library_without_functions_is_an_error_of_intaglio(fresh_cache, monkeypatch):
    planted = build(source(8), name="planted", isa="portable")
    monkeypatch.setattr(compiler, "build", lambda *arguments, **options: planted)
    with pytest.raises(BuildError, match=r"has no function intaglio_parallel[\s\S]*remedy: delete the file") as raised:
        native_library.open_library("portable")
    assert raised.value.where == str(planted)


@pytest.mark.parametrize("said", compiler_runs.FULL_DISK)
def test_a_full_disk_is_not_an_error_of_the_text(said, fresh_cache, tmp_path, monkeypatch):
    script = tmp_path / "compiler"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\necho "as: cannot write k.o: {said}"\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(BuildError, match=rf"the disk of the kernel cache .* is full: {said}\n  remedy: free") as raised:
        build(source(9), name="k", isa="portable")
    assert str(fresh_cache / "kernels") in str(raised.value)


def test_scratch_folders_of_killed_processes_are_removed_by_the_next_build(fresh_cache):
    folder = build(source(10), name="k", isa="portable").parent
    with drafts.draft_folder(folder, compiler.BUILD_PREFIX) as running:
        (folder / ".build-0123.tmp").mkdir()
        build(source(11), name="k", isa="portable")
        assert [path.name for path in folder.glob(".build-*")] == [running.name]


def test_a_folder_in_place_of_an_entry_is_named(fresh_cache):
    path = build(source(12), name="k", isa="portable")
    path.unlink()
    path.mkdir()
    with pytest.raises(BuildError, match=r"cannot be used: .*Is a directory.*k-[\s\S]*remedy: set INTAGLIO_CACHE_DIR"):
        build(source(12), name="k", isa="portable")


@pytest.mark.parametrize("end", ["exit 1", "kill -9 $$", "exit 0"])
@pytest.mark.parametrize("written", ["half", ""])
def test_a_compiler_that_fails_or_is_killed_leaves_a_cache_that_works(end, written, fresh_cache, tmp_path, monkeypatch):
    script = tmp_path / "compiler"
    write = f'for word; do test "$last" = -o && echo {written} > "$word"; last="$word"; done\n' if written else ""
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec g++ --version\n{write}{end}\n')
    script.chmod(0o755)
    with monkeypatch.context() as context:
        context.setenv("CXX", str(script))
        with pytest.raises(BuildError) as raised:
            load(build(source(13), name="k", isa="portable"))
    assert raised.value.remedy or "fails to compile" in str(raised.value)
    assert not list((fresh_cache / "kernels").glob(".build-*"))
    assert load(build(source(13), name="k", isa="portable")).answer() == 13
