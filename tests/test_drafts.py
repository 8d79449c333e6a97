"""Drafts that another process takes for abandoned before they are locked are created again."""

import errno
import os
import shutil

import pytest

from intaglio import drafts


def test_a_folder_that_is_removed_before_it_is_opened_is_created_again(tmp_path, monkeypatch):
    opened = os.open
    removed = []

    def remove_first(path, *flags, **options):
        if not removed:
            removed.append(path)
            shutil.rmtree(path)
        return opened(path, *flags, **options)

    monkeypatch.setattr(drafts.os, "open", remove_first)
    with drafts.draft_folder(tmp_path) as folder:
        assert folder.is_dir()
        assert removed != [folder]
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_opened_is_removed(tmp_path, monkeypatch):
    opened, failures = os.open, [OSError(errno.EMFILE, "Too many open files")]

    def fail_first(path, *flags, **options):
        if failures:
            raise failures.pop()
        return opened(path, *flags, **options)

    monkeypatch.setattr(drafts.os, "open", fail_first)
    with pytest.raises(OSError, match="Too many"), drafts.draft_folder(tmp_path):
        pass
    assert not list(tmp_path.iterdir())
