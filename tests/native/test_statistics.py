"""Counting of values in native code: in children of fork."""

import os
import subprocess
import sys

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
