"""Runs of compilers and linkers: several at once, with errors that show what they print."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from intaglio.errors import BuildError
from intaglio.native.toolchain import NO_COMPILER

ERROR_LINES = 20
FULL_DISK = ("No space left on device", "Disk quota exceeded", "File too large", "File size limit exceeded")
"""Messages of compilers and linkers that cannot write their results."""
LINKER_FAILED = ("ld returned", "linker command failed")
"""Messages of g++ and clang, which compile and link in one command, that the linking has failed."""
BACKGROUND_NICENESS = 10
"""Niceness of compilers in the background: a tenth of the share of other processes."""
_FREE_SPACE = "free some space, or set INTAGLIO_CACHE_DIR to a folder on another disk"


def yield_cores() -> None:
    """Let the compilers that this thread runs from now on leave the cores to the process where both need them.

    Each parallel region of PyTorch waits for its slowest thread, so a float model runs twenty times slower beside two
    compilers of the same priority. Other systems than Linux have no priorities of threads.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            own = threading.get_native_id()
            niceness = max(os.getpriority(os.PRIO_PROCESS, own), BACKGROUND_NICENESS)
            os.setpriority(os.PRIO_PROCESS, own, niceness)


def run_together(commands: Sequence[Sequence[str]], name: str, folder: Path) -> None:
    """Run commands in parallel in a folder; raise `BuildError` with the output of the first that fails.

    If the wait is interrupted, the compilers and their child processes are killed.
    """
    environment, running = {**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"}, list[subprocess.Popen[str]]()
    try:
        for command in commands:
            with _deferred_interrupt():
                running.append(_started(command, name, folder, environment))
                _share_priority(running[-1])
        for process, command in zip(running, commands, strict=True):
            output, _ = process.communicate()
            if process.returncode != 0:
                raise _failure(command, process.returncode, output, name, folder)
    except BaseException:
        for process in running:
            with process:  # closes its pipe, which would be open as long as the exception is kept, and waits
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
        raise


def _started(command: Sequence[str], name: str, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a command in a folder. Raise `BuildError` if it cannot be started, and `OSError` if the folder is gone."""
    try:
        return subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        if not folder.is_dir():
            raise
        remedy = NO_COMPILER if isinstance(error, FileNotFoundError | PermissionError) else None
        raise BuildError(name, None, f"{command[0]} cannot be started: {error}", remedy=remedy) from error


def _failure(command: Sequence[str], status: int, output: str, name: str, folder: Path) -> BuildError:
    """Return the error of a command that failed, with what it has printed, which says whether it was linking."""
    if (full := next((text for text in FULL_DISK if text in output), None)) is not None:
        problem = f"the disk of the kernel cache {folder.parent} is full: {full}"
        return BuildError(name, None, problem, remedy=_FREE_SPACE)
    sources = [part for part in command if part.endswith((".cpp", ".s"))]
    failed = f"fails to compile {sources[0]}" if sources else "fails to link object files"
    if sources and any(text in output for text in LINKER_FAILED):
        failed = f"fails to link {sources[0]}, which it has compiled"
    shown = "\n    ".join(output.splitlines()[:ERROR_LINES])
    return BuildError(name, None, f"{command[0]} {failed} (status {status})\n    {shown}")


def _share_priority(process: subprocess.Popen[str]) -> None:
    """Give a session that this thread has started its own priority, as Linux schedules sessions and not processes.

    Nothing happens on systems that do not group processes by their sessions.
    """
    with contextlib.suppress(OSError):
        niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        Path(f"/proc/{process.pid}/autogroup").write_text(str(niceness))


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block, so that every started process is recorded and can be killed."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        signal.raise_signal(signal.SIGINT)
