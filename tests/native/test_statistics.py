"""Counting of values in native code: in children of fork, and of more values than 32 bits count."""

import ctypes
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

from intaglio.native import statistics

PIECE, PIECES = 1 << 26, (1 << 8) + 1
"""Bytes of memory that arrays consist of several times, and the number of times for more than 2**32 float32 values."""
FORKED = """
import os, signal, threading
import numpy as np
from intaglio.native import native_library, statistics

assert native_library.runtime_if_built() is not None
values, stop = np.ones(64, np.float32), threading.Event()

def count_until_stopped():
    while not stop.is_set():
        statistics.count(values)

busy = [threading.Thread(target=count_until_stopped) for _ in range(2)]
for thread in busy:
    thread.start()
ended = []
for _ in range(20):
    if not (child := os.fork()):
        signal.alarm(60)
        os._exit(statistics.count(values).count != 64)
    ended.append(os.waitpid(child, 0)[1])
    if ended[-1]:
        break
stop.set()
print(ended == [0] * 20)
"""


def printed(text: str) -> str:
    """Return what a new Python process prints when it runs this source code."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text], capture_output=True, text=True, check=True, env=environment
    ).stdout


def test_a_child_of_fork_counts_while_threads_of_its_parent_were_counting():
    assert printed(FORKED).split() == ["True"]


@pytest.mark.slow(reason="counts four billion values")
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no files in memory")
def test_more_values_of_a_bin_than_32_bits_count_are_counted():
    values = repeated(np.ones(PIECE // 4, np.float32))
    found = statistics.count(values)
    assert values.size > 1 << 32
    assert (found.bins.sum(), found.sketch.sum()) == (values.size, values.size)
    assert found.total == values.size << 149


def repeated(piece: np.ndarray) -> np.ndarray:
    """Return an array that has the values of `piece` several times, in one place of the memory."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype, libc.mmap.argtypes = (
        ctypes.c_void_p,
        (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long),
    )
    place, fixed = mmap.mmap(-1, PIECE * PIECES, prot=mmap.PROT_READ), 0x10
    whole = np.frombuffer(place, np.float32)
    file = os.memfd_create("piece")
    os.write(file, piece.tobytes())
    for index in range(PIECES):
        address = whole.ctypes.data + index * PIECE
        assert libc.mmap(address, PIECE, mmap.PROT_READ, mmap.MAP_SHARED | fixed, file, 0) == address
    os.close(file)
    return whole
