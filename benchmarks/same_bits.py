"""Compare the bits that two versions of intaglio give.

    python benchmarks/same_bits.py record OLD.json                with one version installed
    python benchmarks/same_bits.py record NEW.json --only bert    with another; some cases only
    python benchmarks/same_bits.py compare OLD.json NEW.json      a table of differences; exit code 1 if there is one

Recorded are results of some fifty small networks through every door (instruction sets, the interpreter, the reference
model, files, exported C, Inductor, ONNX, training, define-by-run, search), their integer graphs and parameters, and the
packed constants and the machine code of every microkernel of instruction sets that this processor may lack. Both
recordings must come from one machine and the same versions of PyTorch and ONNX Runtime. Nothing is timed.
"""

from __future__ import annotations

import argparse
import difflib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record", help="run the cases and write what they give")
    recorder.add_argument("file", type=Path)
    recorder.add_argument("--only", nargs="+", metavar="NAME", help="cases to run (default: all)")
    recorder.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    recorder.add_argument("--flip", action="store_true", help="negate one weight of every network: `compare` must fail")
    comparer = commands.add_parser("compare", help="compare two recordings")
    comparer.add_argument("old", type=Path)
    comparer.add_argument("new", type=Path)
    comparer.add_argument("--rename", nargs=2, action="append", default=[], metavar=("PATTERN", "NAME"),
                          help="kernels that are named otherwise in the new recording: a regular expression and what "
                          "replaces it, as in re.sub")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(arguments.file, arguments.only, arguments.jobs, arguments.flip)
    else:
        sys.exit(compare(*(json.loads(path.read_text()) for path in (arguments.old, arguments.new)), arguments.rename))


def record(path: Path, only: list[str] | None, jobs: int, flip: bool) -> None:
    """Run the cases, each in a process of its own, with caches that are empty at first, and write what they give."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= ONE_THREAD
        os.environ |= {"INTAGLIO_CACHE_DIR": f"{folder}/native", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch"}
        import torch
        from bits import doors
        from bits.cases import CASES

        torch.set_num_threads(1)
        if unknown := set(only or ()) - set(CASES):
            raise SystemExit(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
        doors.warm_up()
        names, found = [name for name in CASES if not only or name in only], {}
        with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
            for name, results, seconds in pool.imap_unordered(partial(doors.record, flip=flip), names):
                found[name] = results
                failed = [key for key, value in results.items() if str(value).startswith("FAILED")]
                print(f"{name}: {len(results)} entries in {seconds:.0f} s of CPU {' '.join(failed)}", flush=True)
    path.write_text(json.dumps({name: found[name] for name in names}, indent=1))
    print(f"{len(names)} cases, {sum(map(len, found.values()))} entries, {time.perf_counter() - begin:.0f} s")


def compare(old: dict[str, Any], new: dict[str, Any], renames: list[list[str]]) -> int:
    """Print what differs between two recordings; return the exit code."""
    from rich.console import Console
    from rich.table import Table

    differences, compared = [], 0
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name, {}), new.get(name, {})
        for key in dict.fromkeys([*before, *after]):
            a, b = before.get(key, "(missing)"), after.get(key, "(missing)")
            if isinstance(a, dict) and isinstance(b, dict):  # kernels: of all cases together, below
                continue
            compared += 1
            if a != b or str(a).startswith("FAILED"):
                differences.append((name, key, *_first_difference(str(a), str(b))))
    for key in sorted({key for case in (*old.values(), *new.values()) for key in case if key.endswith("kernels")}):
        before, after = _kernels(old, key, renames), _kernels(new, key, [])
        compared += len(before)
        for name, digests in before.items():
            if missing := digests - after.get(name, set()):
                came = sorted(after.get(name, ["(missing)"]))
                differences.append((key, name, ", ".join(sorted(missing)), ", ".join(came)))
    table = Table("case", "entry", "old", "new", title=f"{len(differences)} of {compared} entries differ")
    for row in differences:
        table.add_row(*[cell if len(cell) < 200 else cell[:200] + "…" for cell in row])
    Console(width=160).print(table, markup=False) if differences else print(f"{compared} entries are equal")
    return bool(differences)


def _kernels(recording: dict[str, Any], key: str, renames: list[list[str]]) -> dict[str, set[str]]:
    """Return the digests of kernels of all cases by name: a program may hold more kernels than it used to, or fewer."""
    found: dict[str, set[str]] = {}
    for case in recording.values():
        for name, digest in case.get(key, {}).items():
            for pattern, other in renames:
                name = re.sub(pattern, other, name)
            found.setdefault(name, set()).add(digest)
    return found


def _first_difference(old: str, new: str) -> tuple[str, str]:
    """Return the first lines that differ, and how many more there are."""
    if "\n" not in old + new:
        return old, new
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0))[2:]
    gone = [line[1:] for line in lines if line.startswith("-")]
    came = [line[1:] for line in lines if line.startswith("+")]
    return f"{next(iter(gone), '')} ({len(gone)} lines)", f"{next(iter(came), '')} ({len(came)} lines)"


if __name__ == "__main__":
    main()
