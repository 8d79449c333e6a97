"""Files that users name: ranges, parameters and recipes are complete or not written; others are read with an error."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from intaglio.errors import ArtifactError, IntaglioError
from intaglio.output_paths import replace_file_by, write_text
from intaglio.quant.calibrate.ranges import Ranges
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.recipes.recipe import Recipe
from support.file_limits import files_no_larger_than

READERS: dict[str, Callable[[Path], object]] = {
    "ranges": Ranges.load,
    "parameters": Parameters.load,
    "recipe": Recipe.load,
}
WRONG = {
    "not UTF-8": b"\xff\xfe{}",
    "not an object": b"[1, 2]",
    "entries that are numbers": b'{"version": 2, "sites": 3, "seen": 4}',
    "a huge number": b'{"version": 2, "batches": 1e999, "sites": {"a": {"bins": [[99999999999999999999, 1]]}}}',
    "deep": b"[" * 100_000,
    "deep TOML": b"x = " + b"[" * 100_000,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
def test_files_with_other_content_are_errors_of_intaglio(read, content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(IntaglioError):
        read(tmp_path / "file")


@pytest.mark.parametrize("name", ["missing", ".", "null\0character"])
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_files_that_cannot_be_read_are_named(read, name, tmp_path):
    with pytest.raises(IntaglioError, match="cannot be read") as raised:
        read(tmp_path / name)
    assert str(tmp_path) in str(raised.value)
    assert "remedy: " in str(raised.value)


def test_a_file_at_the_right_path_is_read(tmp_path):
    Ranges({}).save(tmp_path / "ranges")
    assert Ranges.load(tmp_path / "ranges") == Ranges({})


def test_a_full_disk_keeps_the_text_there_was(tmp_path):
    write_text(tmp_path / "t", "before")
    with files_no_larger_than(4096), pytest.raises(ArtifactError, match=r"cannot be written: File too large\n  remedy"):
        write_text(tmp_path / "t", "x" * 8192)
    assert (tmp_path / "t").read_text() == "before"
    assert os.listdir(tmp_path) == ["t"]


def test_text_that_is_not_utf8_is_refused_before_it_is_written(tmp_path):
    with pytest.raises(ArtifactError, match=r"its text would contain '\\ud800'.*\n  remedy: rename the module"):
        Recipe.of({"a\ud800": None}).save(tmp_path / "r.toml")
    assert os.listdir(tmp_path) == []
    Recipe.of({"a": None}).save(tmp_path / "r.toml")  # the remedy
    assert Recipe.load(tmp_path / "r.toml").entries[0][0] == "a"


def test_devices_are_written_to():
    write_text("/dev/null", "text")
    assert Path("/dev/null").is_char_device()


def test_a_text_keeps_the_permissions_of_the_file_it_replaces(tmp_path):
    write_text(tmp_path / "t", "before")
    (tmp_path / "t").chmod(0o640)
    write_text(tmp_path / "t", "after")
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o640


# ---- files of writers that need a path: ONNX and packages of Inductor


def two_files(draft: Path) -> str:
    draft.write_text("model")
    draft.with_name(f"{draft.name}.data").write_text("weights")
    return draft.name


def test_all_files_of_a_writer_are_moved_together(tmp_path):
    assert replace_file_by(tmp_path / "m.onnx", two_files) == "m.onnx"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "m.onnx": "model",
        "m.onnx.data": "weights",
    }


def test_a_writer_that_fails_changes_nothing(tmp_path):
    (tmp_path / "m.onnx").write_text("before")

    def fail(draft: Path) -> None:
        two_files(draft)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_file_by(tmp_path / "m.onnx", fail)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"m.onnx": "before"}


@pytest.mark.parametrize("name", ["m.onnx", "m.onnx.data"])
def test_only_regular_files_are_replaced(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ArtifactError, match="not a regular file"):
        replace_file_by(tmp_path / "m.onnx", two_files)
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).is_fifo()
