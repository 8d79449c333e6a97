"""The machine, the versions and the state of the source that a figure belongs to: one JSON line per run."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import time
from importlib import metadata
from pathlib import Path

FOLDER = Path(__file__).parent
FLAGS = ("avx2", "avx512f", "avx512bw", "avx512_vnni", "avx512_vbmi", "avx_vnni", "avx512_bf16", "amx_int8", "amx_tile")
PACKAGES = (
    *("torch", "torchvision", "torchao", "onnx", "onnxruntime", "openvino", "nncf", "numpy"),
    *("executorch", "MNN", "ncnn", "tract", "zentorch", "llama_cpp_python", "auto_round_lib", "transformers"),
)
IDLE_SHARE = 0.05
"""Share of the cores that others may use before times mean nothing."""


def cpu() -> dict:
    """Name, cores, instruction sets that matter, caches of one core, as the system tells them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    listed = fields.get("flags", "").split()
    family = [int(fields.get(key, 0)) for key in ("cpu family", "model", "stepping")]
    caches = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        caches[f"L{level} {kind.lower()}"] = size
    known = [flag for flag in FLAGS if flag in listed]
    return {
        "model": fields.get("model name", "?"),
        "family": family,
        "cores": os.cpu_count(),
        "flags": known,
        "caches": caches,
    }


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Short hash; a plus behind it says that the source had changes."""
    try:
        git = ("git", "-C", str(FOLDER))
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
        changes = subprocess.run([*git, "status", "--porcelain", "--", "../src"], capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "?"
    return head.strip() + "+" * bool(changes)


def busy(seconds: float = 1.0) -> float:
    """Share of the machine's processor time that is used now, while this process sleeps."""

    def ticks() -> tuple[int, int]:
        values = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(values), values[3] + values[4]

    total, idle = ticks()
    time.sleep(seconds)
    total_after, idle_after = ticks()
    return 1 - (idle_after - idle) / max(total_after - total, 1)


def idle() -> bool:
    """Whether the machine is; prints what it saw."""
    share = busy()
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    print(f"before: load average {load}; {100 * share:.0f} % of the processors in use")
    return share <= IDLE_SHARE


def still_idle(before: bool) -> bool:
    """Return whether the machine was idle before and is idle now. Print a warning if it is not."""
    quiet = busy() <= IDLE_SHARE and before
    if not quiet:
        print("Others used this machine: figures that are not worth quoting.")
    return quiet


def append(name: str, arguments: argparse.Namespace, results: dict) -> None:
    """One line behind results/{name}.jsonl. Folders of this machine are left out."""
    given = {key: value for key, value in vars(arguments).items() if not isinstance(value, Path)}
    line = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu(),
        "versions": versions(),
        "arguments": given,
        "results": results,
    }
    path = FOLDER / "results" / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
