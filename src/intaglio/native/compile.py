"""C++ text -> shared object in the kernel cache: keyed by content, written atomically, bounded in size.

An entry is ``<name>-<key>.so`` with its source ``<name>-<key>.cpp`` beside it. The last bytes of the .so are the
SHA-256 of the rest, which loaders ignore, so a damaged entry is recognised before it is mapped and built again.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from intaglio import config
from intaglio.errors import BuildError
from intaglio.native.machine import ISA_FLAGS

CACHE_FORMAT = "1"
HEADER_FOLDER = Path(__file__).parent
SEAL = b"\nintaglio sha256 "
SEAL_BYTES = len(SEAL) + 64
GRACE_SECONDS = 60
"""Entries built or used this recently are not evicted: their `load` may not have happened yet, here or elsewhere."""
ABANDONED_SECONDS = 3600
ERROR_LINES = 20

# g++ contracts a*b+c into one rounding, even written as intrinsics, unless told not to; AVX-512 flags imply FMA.
COMPILE_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno"),
    *("-fno-exceptions", "-fno-rtti", "-fvisibility=hidden"),
    # g++ 12 takes an address it has split into integers for a null pointer, stops reading the function there, finds
    # that it writes nothing, and drops its calls.
    "-fno-delete-null-pointer-checks",
)
# Only libc is linked and nothing may stay undefined: a call into libstdc++ or libm is an error when building, with
# g++ and clang alike. (libpthread is empty since glibc 2.34.)
LINK_FLAGS = ("-nodefaultlibs", "-Wl,--no-undefined", "-lpthread", "-lc", "-lgcc")

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_locks: dict[Path, threading.Lock] = {}
_loaded: dict[Path, ctypes.CDLL] = {}
os.register_at_fork(after_in_child=_locks.clear)


def build(source: str, *, name: str, isa: str, headers: tuple[str, ...] = (), force: bool = False) -> Path:
    """C++ text -> path of a shared object for instruction set ``isa``; taken from the cache unless ``force``.

    The text may include files of this folder; they are part of the key, and so are the files ``headers`` names.
    Raises `BuildError` when there is no compiler, it rejects the text, or the cache folder cannot be written.
    """
    command = (_compiler(name), *COMPILE_FLAGS, *ISA_FLAGS[isa])
    key = _key(source, command, isa, headers)
    path = config.cache_dir() / "kernels" / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', name)[:80]}-{key[:16]}.so"
    with _locks.setdefault(path, threading.Lock()):
        try:
            if force or not is_intact(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                _compile(source, command, name, path)
                _evict(path.parent)
            _touch(path)
        except OSError as error:
            raise BuildError(
                name, None, f"the kernel cache {path.parent} cannot be used: {error}", remedy=_MOVE_CACHE
            ) from error
    return path


def text_key(source: str, isa: str) -> str:
    """Digest of what a library is compiled from: text, headers, instruction set. The compiler is no part of it."""
    parts = [CACHE_FORMAT, isa, source]
    parts += [part for item in sorted(included(source).items()) for part in item]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def install(content: bytes, *, name: str) -> Path:
    """A library somebody else built -> its path in the cache, under the digest of its bytes.

    `build` never looks there. Raises `BuildError` when the cache folder cannot be written.
    """
    folder = config.cache_dir() / "kernels"
    path = folder / f"trusted-{hashlib.sha256(content).hexdigest()}.so"
    try:
        if not path.is_file() or path.read_bytes() != content:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as scratch:
                draft = Path(scratch, "library.so")
                draft.write_bytes(content)
                os.replace(draft, path)
            _evict(folder)
        _touch(path)
    except OSError as error:
        problem = f"the kernel cache {folder} cannot be used: {error}"
        raise BuildError(name, None, problem, remedy=_MOVE_CACHE) from error
    return path


def load(path: Path) -> ctypes.CDLL:
    """The library at ``path``, one per path and process."""
    if path not in _loaded:
        try:
            _loaded.setdefault(path, ctypes.CDLL(str(path)))
        except OSError as error:
            raise BuildError(
                str(path), None, f"the built library does not load: {error}", remedy=_MOVE_CACHE
            ) from error
    return _loaded[path]


def is_intact(path: Path) -> bool:
    """Whether ``path`` is a complete entry: it exists and its seal fits its bytes."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return content[-SEAL_BYTES:] == _seal(content[:-SEAL_BYTES])


_MOVE_CACHE = "set INTAGLIO_CACHE_DIR to a folder that can be written and allows execution"
_NO_COMPILER = "install g++ (Debian, Ubuntu: apt install g++), or set CXX to the path of a C++ compiler"


def _compiler(name: str) -> str:
    found = config.compiler()
    if found is None:
        chosen = os.environ.get("CXX")
        problem = f"CXX is {chosen!r}, which is not a program" if chosen else "no C++ compiler (CXX, g++, c++)"
        raise BuildError(name, None, problem, remedy=_NO_COMPILER)
    return found


@cache
def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(compiler, None, f"CXX does not run: {error}", remedy=_NO_COMPILER) from error


def _key(source: str, command: tuple[str, ...], isa: str, headers: tuple[str, ...]) -> str:
    texts = included(source, headers)
    parts = [CACHE_FORMAT, isa, *command, *LINK_FLAGS, _version(command[0]), source]
    parts += [part for name in sorted(texts) for part in (name, texts[name])]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def included(source: str, headers: tuple[str, ...] = ()) -> dict[str, str]:
    """Name -> text of every file of this folder that ``source`` includes, directly or not, and of ``headers``."""
    texts: dict[str, str] = {}
    waiting = [*headers, *_INCLUDE.findall(source)]
    while waiting:
        name = waiting.pop()
        if name not in texts and (HEADER_FOLDER / name).is_file():
            texts[name] = (HEADER_FOLDER / name).read_text(encoding="utf-8")
            waiting += _INCLUDE.findall(texts[name])
    return texts


def _compile(source: str, command: tuple[str, ...], name: str, path: Path) -> None:
    """Make the entry ``path``; temporary files, the compiler's too, are in a folder that does not outlive the call."""
    text = path.with_suffix(".cpp")
    with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent) as scratch:
        draft = Path(scratch, "kernel.cpp")
        draft.write_text(source, encoding="utf-8")
        os.replace(draft, text)
        made = Path(scratch, "kernel.so")
        arguments = [*command, f"-I{HEADER_FOLDER}", str(text), "-o", str(made), *LINK_FLAGS]
        status, output = _run(arguments, {**os.environ, "TMPDIR": scratch, "LC_ALL": "C"})
        if status != 0:
            shown = "\n    ".join(output.splitlines()[:ERROR_LINES])
            raise BuildError(name, None, f"{command[0]} rejects {text} (status {status})\n    {shown}")
        with made.open("r+b") as file:
            seal = _seal(file.read())
            file.write(seal)
        os.replace(made, path)


def _run(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Exit status and output; whatever interrupts the wait also ends the compiler and its children."""
    process = None
    try:
        with _deferred_interrupt():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                env=environment,
                start_new_session=True,
            )
        output, _ = process.communicate()
    except BaseException:
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise
    return process.returncode, output


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Ctrl-C waits for the end of the block: a process that has started is then known to who must end it."""
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


def _seal(content: bytes) -> bytes:
    return SEAL + hashlib.sha256(content).hexdigest().encode()


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):  # a cache that is only readable still serves
        os.utime(path)


def _evict(folder: Path) -> None:
    """Remove the least recently used entries until the folder is within the limit; and what crashes left behind."""
    now = time.time()
    sizes: dict[str, int] = defaultdict(int)
    used: dict[str, float] = defaultdict(float)
    for file in os.scandir(folder):
        try:
            info = file.stat()
        except FileNotFoundError:
            continue
        if file.is_dir():
            if now - info.st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(file.path, ignore_errors=True)
            continue
        stem = Path(file.name).stem
        sizes[stem] += info.st_size
        used[stem] = max(used[stem], info.st_mtime)
    excess = sum(sizes.values()) - config.cache_limit_bytes()
    for stem in sorted(used, key=lambda stem: used[stem]):
        if excess <= 0 or now - used[stem] < GRACE_SECONDS:
            return
        (folder / f"{stem}.so").unlink(missing_ok=True)
        (folder / f"{stem}.cpp").unlink(missing_ok=True)
        excess -= sizes[stem]
