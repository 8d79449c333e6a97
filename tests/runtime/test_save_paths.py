"""Paths that models are saved and exported to: what is replaced, what is refused, and what a killed process leaves."""

import os
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import intaglio
from intaglio import drafts, stages
from intaglio.errors import ArtifactError, IntaglioError
from intaglio.runtime import export_files
from support import nets
from support.file_limits import files_no_larger_than
from support.int8_models import compiled


def model() -> intaglio.QuantizedModel:
    return compiled(nets.ConvBnRelu)[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


SPECIAL: dict[str, Callable[[Path], None]] = {"pipe": os.mkfifo, "socket": bind}
WRITERS: dict[str, Callable[[Path | str], object]] = {
    "save": lambda path: model().save(path),
    "export_c": lambda path: model().export_c(path),
}


# ---- special files


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
def test_save_replaces_only_regular_files(make, tmp_path):
    path = tmp_path / "special"
    make(path)
    before = path.lstat()
    (tmp_path / "link").symlink_to(path)
    for given in (path, tmp_path / "link"):
        with pytest.raises(ArtifactError, match=r"not a regular file\n  remedy: choose a file"):
            model().save(given)
    assert path.lstat().st_mode == before.st_mode
    assert sorted(os.listdir(tmp_path)) == ["link", "special"]


def test_a_file_that_became_a_pipe_while_the_model_was_written_is_kept(tmp_path, monkeypatch):
    path = tmp_path / "m"
    monkeypatch.setattr("intaglio.runtime.saved.savable_model.check_file", lambda given: os.mkfifo(path))
    with pytest.raises(ArtifactError, match="not a regular file"):
        model().save(path)
    assert path.is_fifo()
    assert os.listdir(tmp_path) == ["m"]


def test_load_does_not_wait_for_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArtifactError, match="this is not a regular file"):
        intaglio.load(tmp_path / "pipe")


def test_export_c_replaces_only_regular_files(tmp_path):
    model().export_c(tmp_path / "out")
    (tmp_path / "out" / "main.c").unlink()
    os.mkfifo(tmp_path / "out" / "main.c")
    before = contents(tmp_path / "out")
    with pytest.raises(ArtifactError, match=r"main\.c: cannot be written: .*not a regular file"):
        compiled(nets.Linears)[0].export_c(tmp_path / "out")
    assert (tmp_path / "out" / "main.c").is_fifo()
    assert contents(tmp_path / "out") == before


# ---- paths that cannot be


@pytest.mark.parametrize(
    "path",
    ["", "null\0character", "n" * 300, "n" * 300 + "/m", "lone \ud800"],
    ids=["empty", "NUL", "long", "in long", "lone"],
)
def test_paths_that_cannot_exist_are_errors_of_intaglio(path, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for write in WRITERS.values():
        with pytest.raises(ArtifactError, match=r"(?s)cannot be written: .*remedy: choose a"):
            write(path)
    with pytest.raises(ArtifactError, match=r"(?s)cannot be read: .*remedy: check the path"):
        intaglio.load(path)
    assert [str(entry) for entry in tmp_path.rglob("*")] == [str(tmp_path / "here")]


def test_the_longest_name_of_a_file_can_be_saved(tmp_path):
    path = tmp_path / ("n" * 255)
    model().save(path)
    assert os.listdir(tmp_path) == [path.name]


def test_save_refuses_a_loop_of_symbolic_links(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ArtifactError, match="Too many levels of symbolic links"):
        model().save(tmp_path / "loop")
    assert (tmp_path / "loop").is_symlink()


def test_files_in_the_home_folder_are_saved_and_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    model().save("~/model.intaglio")
    intaglio.load("~/model.intaglio")
    intaglio.Recipe.of({}).save("~/recipe.toml")
    intaglio.Recipe.load("~/recipe.toml")
    assert {"model.intaglio", "recipe.toml"} <= set(os.listdir(tmp_path))


def read_write(path: Path) -> list[Callable[[], object]]:
    """Calls of text files, each of which must end."""
    recipe, ranges = intaglio.Recipe.of({}), stages.Ranges({})
    parameters = stages.Parameters({})
    reads = [intaglio.Recipe.load, stages.Ranges.load, stages.Parameters.load]
    writes = [recipe.save, ranges.save, parameters.save]
    return [partial(call, path) for call in (*reads, *writes)] + [lambda: stages.Ranges.merge_files([path])]


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
def test_text_files_are_regular_files(make, tmp_path):
    make(path := tmp_path / "special")
    kind = path.stat().st_mode
    for call in read_write(path):
        with pytest.raises(IntaglioError, match=r"not a regular file|No such device"):
            call()
    assert path.stat().st_mode == kind


def test_recipes_are_read_from_and_written_to_pipes_without_a_name():
    source, target = os.pipe()
    intaglio.Recipe.of({"fc": {"bits": 7}}).save(f"/dev/fd/{target}")
    os.close(target)
    assert intaglio.Recipe.load(f"/dev/fd/{source}") == intaglio.Recipe.of({"fc": {"bits": 7}})
    os.close(source)


def test_export_c_expands_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    model().export_c("~/out/deep")
    assert (tmp_path / "home" / "out" / "deep" / "weights.bin").is_file()
    assert sorted(os.listdir(tmp_path)) == ["home"]


# ---- exports are complete or not there


def test_a_full_disk_leaves_an_export_as_it_was(tmp_path):
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
    model().export_c(tmp_path / "old")
    (tmp_path / "old" / "notes.txt").write_text("mine")
    before = contents(tmp_path / "old")
    for folder in ("old", "new/out"):
        with (
            files_no_larger_than(4096),
            pytest.raises(ArtifactError, match=r"File too large\n  remedy"),
        ):
            compiled(nets.Linears)[0].export_c(tmp_path / folder)
    assert contents(tmp_path / "old") == before
    assert os.listdir(tmp_path / "new") == []


def test_an_export_into_a_folder_keeps_the_other_files(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    compiled(nets.Linears)[0].export_c(tmp_path / "out")
    model().export_c(tmp_path / "out")
    model().export_c(tmp_path / "fresh")
    new = contents(tmp_path / "fresh")
    assert new.items() <= contents(tmp_path / "out").items()
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert not [name for name in os.listdir(tmp_path / "out") if name.startswith(".")]


def test_an_export_takes_the_place_of_an_existing_folder_in_one_step(tmp_path):
    out = tmp_path / "out"
    compiled(nets.Linears)[0].export_c(out)
    (out / "mine").mkdir(mode=0o750)
    (out / "mine" / "notes.txt").write_text("mine")
    (out / "mine" / "link").symlink_to("notes.txt")
    out.chmod(0o710)
    before = out.stat()
    model().export_c(out)
    after = out.stat()
    assert after.st_ino != before.st_ino
    assert after.st_mode == before.st_mode
    assert (out / "mine").stat().st_mode & 0o777 == 0o750
    assert os.readlink(out / "mine" / "link") == "notes.txt"
    assert (out / "mine" / "link").read_text() == "mine"
    assert os.listdir(tmp_path) == ["out"]


def test_files_that_another_process_creates_during_an_export_are_kept(tmp_path, monkeypatch):
    out = tmp_path / "out"
    compiled(nets.Linears)[0].export_c(out)

    def exchange(first: Path, second: Path) -> bool:
        (out / "late.txt").write_text("mine")
        (out / "late").mkdir()
        (out / "late" / "inner.txt").write_text("mine")
        return drafts.exchange_folders(first, second)

    monkeypatch.setattr(export_files, "exchange_folders", exchange)
    model().export_c(out)
    assert (out / "late.txt").read_text() == (out / "late" / "inner.txt").read_text() == "mine"
    assert os.listdir(tmp_path) == ["out"]


def test_an_export_into_the_working_directory_of_a_process_keeps_the_folder(tmp_path, monkeypatch):
    out = tmp_path / "out"
    compiled(nets.Linears)[0].export_c(out)
    before = out.stat().st_ino
    monkeypatch.chdir(out)
    model().export_c(".")
    assert out.stat().st_ino == before
    model().export_c(tmp_path / "fresh")
    assert contents(tmp_path / "fresh").items() <= contents(out).items()


def test_an_export_into_a_folder_with_a_pipe_keeps_both(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    os.mkfifo(out / "pipe")
    model().export_c(out)
    assert stat.S_ISFIFO((out / "pipe").stat().st_mode)
    assert (out / "weights.bin").is_file()


@pytest.mark.parametrize("number", [0, 3, 9])
def test_an_export_that_cannot_be_moved_into_a_folder_restores_its_files(number, tmp_path, monkeypatch):
    compiled(nets.Linears)[0].export_c(tmp_path / "out")
    (tmp_path / "out" / "main.c").unlink()
    before, replaced, replace = contents(tmp_path / "out"), [], os.replace

    def fail_once(source: Path, target: Path) -> None:
        replaced.append(target)
        if len(replaced) == number + 1:
            raise OSError(5, os.strerror(5))
        replace(source, target)

    monkeypatch.setattr(export_files, "exchange_folders", lambda first, second: False)
    monkeypatch.setattr(os, "replace", fail_once)
    with pytest.raises(ArtifactError, match="cannot be written: Input/output error"):
        model().export_c(tmp_path / "out")
    assert contents(tmp_path / "out") == before
    model().export_c(tmp_path / "out")


def test_a_new_folder_of_an_export_has_the_usual_permissions(tmp_path):
    model().export_c(tmp_path / "out")
    (tmp_path / "usual").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_an_interrupted_export_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(path: Path, content: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(export_files, "_write_through", interrupt)
    with pytest.raises(KeyboardInterrupt):
        model().export_c(tmp_path / "a" / "b")
    assert os.listdir(tmp_path) == []


# ---- drafts of killed processes


def killed_while_writing(folder: Path) -> None:
    """Run a process that writes a draft file and a draft folder, and kill it while it does."""
    code = """
        import os, pathlib, signal, sys
        from intaglio.drafts import draft_file, draft_folder
        folder = pathlib.Path(sys.argv[1])
        with draft_file(folder), draft_folder(folder) as inner:
            (inner / "part").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    source = Path(drafts.__file__).parents[1]
    arguments = [sys.executable, "-c", textwrap.dedent(code), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    assert subprocess.run(arguments, env=environment).returncode == -9


def test_drafts_of_killed_processes_are_removed_by_the_next_save(tmp_path):
    killed_while_writing(tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    with drafts.draft_file(tmp_path) as (running, _):
        model().save(tmp_path / "m")
        assert sorted(os.listdir(tmp_path)) == sorted(["m", running.name])
    assert os.listdir(tmp_path) == ["m"]


def test_a_draft_that_was_removed_before_it_was_locked_is_made_again(tmp_path, monkeypatch):
    locked, removed = drafts._locked, []

    def remove_first(handle: int) -> bool:
        if not removed:
            removed.append(os.listdir(tmp_path)[0])
            drafts.remove_abandoned(tmp_path)
            assert os.listdir(tmp_path) == []
        return locked(handle)

    monkeypatch.setattr(drafts, "_locked", remove_first)
    model().save(tmp_path / "m")
    assert torch.equal(intaglio.load(tmp_path / "m")(torch.zeros(1, 3, 12, 12)), model()(torch.zeros(1, 3, 12, 12)))
    assert os.listdir(tmp_path) == ["m"]
