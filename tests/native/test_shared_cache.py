"""Several processes that build, load and evict the same entries of the cache at once never fail."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intaglio.native.compile import build
from support import cache_users

ROUNDS, USERS = 5, 3
ACTIONS = st.lists(st.sampled_from(sorted(cache_users.ACTIONS)), min_size=1, max_size=3)
EXPORT = 'extern "C" __attribute__((visibility("default"))) '
COMPILER = """#!/bin/sh
case "$*" in *--version) exit;; esac
for word in "$@"; do
    test "$last" = -o && result=$word
    case $word in *.o|*.cpp) test "$last" = -o || test -f "$word" || {{ echo "there is no $word"; exit 1; }};; esac
    last=$word
done
exec cp {library} "$result"
"""


@pytest.fixture(scope="module")
def copies(tmp_path_factory) -> Path:
    """A program in the place of the compiler, which is done in a millisecond: it copies the same library each time, if
    the files exist that it should compile or link."""
    folder = tmp_path_factory.mktemp("compiler")
    built = build(f"{EXPORT}int answer() {{ return 41; }}\n", name="answer", isa="portable")
    shutil.copy(built, folder / "answer.so")
    (folder / "compiler").write_text(COMPILER.format(library=folder / "answer.so"))
    (folder / "compiler").chmod(0o755)
    return folder / "compiler"


@settings(max_examples=5)
@given(st.lists(st.lists(ACTIONS, min_size=USERS, max_size=USERS), min_size=ROUNDS, max_size=ROUNDS))
def test_processes_that_share_entries_never_fail(copies, rounds):
    with tempfile.TemporaryDirectory() as folder:
        paths = os.pathsep.join(sys.path)
        environment = {**os.environ, "PYTHONPATH": paths, "CXX": str(copies), "INTAGLIO_CACHE_DIR": folder}
        command = [sys.executable, cache_users.__file__, json.dumps(rounds)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        left = [path.name for path in Path(folder).glob("*/.*")]
    assert (ended.stdout, ended.stderr, ended.returncode, left) == ("", "", 0, [])
