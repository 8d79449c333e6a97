"""Every system call of saving, loading, compiling and exporting fails once, and everything is intact afterwards.

    python -m fuzz.faults                                all operations (make faults)
    python -m fuzz.faults --operation save --errors ENOSPC --call 7

For each operation, the n-th call that concerns its folder fails with an error, or the process is killed at it, for
n = 1, 2, ... until the operation succeeds. Then the file that was there is as it was, or the new one is complete; no
other file is left (after a kill, or if removing it is what fails: none once the operation runs again); the error is an
`IntaglioError` that names the path; and the next attempt succeeds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fuzz.faulty_operations import OPERATIONS, MismatchError, Operation

SOURCE = Path(__file__).parents[1] / "support" / "failing_calls.c"
KILL = "KILL"
ERRORS = ("ENOSPC", "EIO", "EACCES", "EINTR", KILL)
MOST_CALLS = 2000


class Outcome(NamedTuple):
    """An attempt with one failing call: its number, what it was, and what is wrong (or ``None``)."""

    number: int
    call: str
    wrong: str | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operation", choices=tuple(OPERATIONS), help="this one only")
    parser.add_argument("--errors", nargs="+", choices=ERRORS, default=ERRORS)
    parser.add_argument("--call", type=int, help="let only this call fail")
    arguments = parser.parse_args()
    run_with_failing_calls()
    warnings.simplefilter("ignore")
    logging.disable()
    names = [arguments.operation] if arguments.operation else list(OPERATIONS)
    begin, failures, attempts = time.monotonic(), 0, 0
    for name in names:
        for error in arguments.errors:
            with tempfile.TemporaryDirectory() as folder:
                found = list(attempts_of(OPERATIONS[name](Path(folder).resolve()), error, arguments.call))
            attempts += len(found)
            kinds = ", ".join(f"{n} {call}" for call, n in Counter(one.call.split()[0] for one in found).items())
            wrong = [one for one in found if one.wrong is not None]
            failures += len(wrong)
            print(f"{name}, {error}: {len(found)} calls ({kinds}), {len(wrong)} failures", flush=True)
            for one in wrong:
                again = f"PYTHONPATH=src:tests python -m fuzz.faults --operation {name} --errors {error}"
                print(f"  call {one.number}, {one.call}: {one.wrong}\n    reproduce: {again} --call {one.number}")
    print(f"failing calls: {attempts} attempts in {time.monotonic() - begin:.0f} s; {failures} failures")
    sys.exit(failures > 0)


# ---- the preloaded library --------------------------------------------------------------------------------------


def run_with_failing_calls() -> None:
    """Start this program again with the library preloaded, unless it is."""
    if "failing_calls" in os.environ.get("LD_PRELOAD", ""):
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "LD_PRELOAD": str(shared_library(Path(folder)))}
        sys.exit(subprocess.run([sys.executable, "-m", "fuzz.faults", *sys.argv[1:]], env=environment).returncode)


def shared_library(folder: Path) -> Path:
    """Compile the library."""
    path = folder / "failing_calls.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", SOURCE, "-o", path, "-ldl"], check=True)
    return path


@contextlib.contextmanager
def failing(folder: Path, number: int, error: int) -> Iterator[None]:
    """Let call ``number`` on files of a folder fail with ``error``, or kill this process at it if ``error`` is 0."""
    library = ctypes.CDLL(None)
    library.faults_begin(os.fsencode(folder), ctypes.c_long(number), error)
    try:
        yield
    finally:
        library.faults_end()


def failed_call() -> str:
    """Return name and file of the call that failed last, or an empty text."""
    library = ctypes.CDLL(None)
    library.faults_last.restype = ctypes.c_char_p
    return library.faults_last().decode(errors="replace")


# ---- attempts ---------------------------------------------------------------------------------------------------


def attempts_of(
    operation: Operation, error: str, only: int | None = None, largest: int = MOST_CALLS
) -> Iterator[Outcome]:
    """Let the first, second, ... call of an operation fail, until none is left to fail."""
    for number in range(1, largest + 1) if only is None else (only,):
        operation.prepare()
        attempt = _killed if error == KILL else _failed
        call, wrong = attempt(operation, number, 0 if error == KILL else getattr(errno, error))
        if not call and wrong is None:
            return
        yield Outcome(number, call or "nothing", wrong)


def _failed(operation: Operation, number: int, error: int) -> tuple[str, str | None]:
    """Return the call that failed, and what is wrong afterwards."""
    raised: BaseException | None = None
    with failing(operation.folder, number, error):
        try:
            operation.run()
        except BaseException as caught:
            raised = caught
    call = failed_call()
    return call, _wrong(operation, raised, with_drafts=is_removal(call))


def is_removal(call: str) -> bool:
    """Return whether a call is one of those that remove a draft, which stays until the next attempt if it fails."""
    name, _, path = call.partition(" ")
    on_folder = ".tmp" in path and name in ("open64", "openat64", "fstat64", "close")
    return name in ("unlink", "unlinkat", "rmdir") or on_folder


def _killed(operation: Operation, number: int, error: int) -> tuple[str, str | None]:
    """Run an attempt in a child process that is killed. Return where, and what is wrong afterwards."""
    child = os.fork()
    if child == 0:
        with failing(operation.folder, number, error), contextlib.suppress(BaseException):
            operation.run()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) == 0:
        return "", None
    return "kill", _wrong(operation, None, with_drafts=True)


def _wrong(operation: Operation, raised: BaseException | None, with_drafts: bool) -> str | None:
    """Return what is wrong after an attempt, or ``None``."""
    try:
        operation.check_error(raised)
        operation.check_files(with_drafts)
        operation.run_again()
        operation.check_files(False)
        operation.check_done()
    except MismatchError as wrong:
        return str(wrong)
    except Exception as error:
        return f"the next attempt raises {type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    main()
