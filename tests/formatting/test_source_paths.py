import sys
from pathlib import Path

import pytest

from intaglio.formatting.source_paths import short_source_path


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A project in the home folder, with an environment of its own inside."""
    working, library = tmp_path / "home/project", tmp_path / "home/project/.venv/lib/site-packages"
    library.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(working)
    monkeypatch.setattr(sys, "path", [str(library), str(working)])
    return tmp_path


@pytest.mark.parametrize(
    ("file", "short"),
    [
        ("home/project/models/net.py", "models/net.py"),
        ("home/project/.venv/lib/site-packages/timm/models/vit.py", "timm/models/vit.py"),
        ("home/other/net.py", "~/other/net.py"),
    ],
)
def test_folders_of_the_machine_are_left_out(folders, file, short):
    assert short_source_path(str(folders / file)) == short


@pytest.mark.parametrize("file", ["/srv/net.py", "net.py", "<string>", "<ipython-input-1>"])
def test_other_paths_are_kept(folders, file):
    assert short_source_path(file) == file


def test_a_deleted_working_directory_leaves_the_path(folders):
    Path.cwd().joinpath("gone").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir("gone")
        Path.cwd().rmdir()
        assert short_source_path("/srv/net.py") == "/srv/net.py"
