"""Processes that use the same entries of the cache at once. It is a program, so that they begin without PyTorch:

    python cache_users.py [[["build 0", "evict"], ["evict", "build 0"]], ...]

Each round has a list of actions for each process. All entries are old when it begins. The program prints what failed.
"""

import ctypes
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier

from intaglio.native import cache_folder, program_cache
from intaglio.native.compile import build, build_units, install
from intaglio.native.toolchain import find_toolchain
from intaglio.native.units import TranslationUnit

UNITS = [TranslationUnit(f"part{n}", f"digest {n}", ".cpp", lambda n=n: f"// {n}") for n in range(2)]
FOLDERS = [cache_folder.trusted_folder(name) for name in ("kernels", program_cache.FOLDER)]
CONSTANTS = bytes(program_cache.SMALLEST_ENTRY)
SECONDS = 60


def build_and_load(number: str, force: bool = False) -> None:
    path = build(f"// {number}", name="shared", isa="portable", units=UNITS, force=force)
    assert ctypes.CDLL(str(path)).answer() == 41


def build_parts() -> None:
    build_units(UNITS, isa="portable", toolchain=find_toolchain("parts"), folder=FOLDERS[0])


def install_and_read() -> None:
    assert install(b"content", name="installed").read_bytes() == b"content"


def store_and_read() -> None:
    program_cache.write("key", memoryview(CONSTANTS), b"record")
    program_cache.write_text("key", "a" * 64)
    found = program_cache.read("key", lambda size: memoryview(bytearray(size)))
    assert found in (None, (CONSTANTS, b"record"))
    assert program_cache.known_text("key") in ("", "a" * 64)


def evict_all() -> None:
    for folder in FOLDERS:
        cache_folder.make_folder(folder)
        cache_folder.evict(folder, 0)


ACTIONS = {
    "build 0": lambda: build_and_load("0"),
    "build 1": lambda: build_and_load("1"),
    "build again": lambda: build_and_load("0", force=True),
    "units": build_parts,
    "install": install_and_read,
    "store": store_and_read,
    "evict": evict_all,
}


def make_old() -> None:
    then = time.time() - 2 * cache_folder.GRACE_SECONDS
    for folder in FOLDERS:
        for file in folder.glob("*"):
            os.utime(file, (then, then))


def use(rounds: Sequence[Sequence[str]], barrier: Barrier) -> None:
    """Do the actions of one process, each round between two meetings of all processes."""
    for actions in rounds:
        barrier.wait(SECONDS)
        for action in actions:
            try:
                ACTIONS[action]()
            except Exception:
                print(action, traceback.format_exc(), flush=True)
        barrier.wait(SECONDS)


def main(rounds: Sequence[Sequence[Sequence[str]]]) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(len(rounds[0]) + 1)
    users = [context.Process(target=use, args=(own, barrier)) for own in zip(*rounds, strict=True)]
    for user in users:
        user.start()
    for _ in rounds:
        make_old()
        barrier.wait(SECONDS)
        barrier.wait(SECONDS)
    for user in users:
        user.join()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
