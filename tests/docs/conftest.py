"""The built site, for the slow tests that read it."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.project_files import ROOT


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """Build the site as `make docs` does, once for all workers of pytest-xdist, and return its folder."""
    for package in ("sphinx", "myst_parser", "pydata_sphinx_theme"):
        pytest.importorskip(package, reason=f"the site needs {package}; `make docs` and `make slow` install it")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "site"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            command = ["-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(shared / "doctrees"), "docs", str(folder)]
            done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
            (shared / "site.log").write_text(done.stderr, encoding="utf-8")
    warnings = (shared / "site.log").read_text(encoding="utf-8")
    assert not warnings, warnings
    return folder
