"""`intaglio doctor`: measurement of what this machine can do for int8, and problems of its setup."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from intaglio import config
from intaglio.cli.show import Result, name_value_table, table
from intaglio.errors import BuildError
from intaglio.formatting.number_text import size_text
from intaglio.kernels import ISAS
from intaglio.native import cpu as machine
from intaglio.native import peak_throughput as limits
from intaglio.native.toolchain import NO_COMPILER, find_toolchain, version_of

BUSY = 0.15
"""Share of processor time used by other processes above which measurements mean little."""
CGROUP = Path("/sys/fs/cgroup")


def run() -> dict[str, Any]:
    """Measure the machine and return the result for JSON."""
    found: dict[str, Any] = {
        "cpu": machine.cpu_name(),
        "cores": os.cpu_count() or 1,
        "cores_allowed": len(os.sched_getaffinity(0)),
        "cgroup_cores": cgroup_cores(CGROUP),
        "load_average": list(os.getloadavg()),
        "busy": busy_share(),
        "caches": machine.caches()._asdict(),
        "isas": [
            {"name": isa, "has": isa in machine.isas(), "kernels": isa in ISAS}
            for isa in machine.isas_of_architecture()
        ],
        "compiler": _compiler(),
        "cache": _cache(),
        **_torch(),
    }
    try:
        possible = found["compiler"] and not _too_busy(found)
        found["measured"] = limits.measure(found["cores_allowed"]) if possible else None
    except BuildError as error:
        found["measured"], found["build_error"] = None, str(error)
    return {**found, "expect": expectation(found), "traps": find_traps(found)}


def cgroup_cores(root: Path) -> float | None:
    """Return the number of processors that a container's quota allows, or ``None`` without a quota. Version 2 of
    cgroups is read first, then version 1."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)


def busy_share(seconds: float = 0.5) -> float | None:
    """Return the share of the machine's processor time that is used while this process sleeps, or ``None`` if it is not
    known."""

    def ticks() -> tuple[int, int]:
        values = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(values), values[3] + values[4]

    try:
        total, idle = ticks()
        time.sleep(seconds)
        total_after, idle_after = ticks()
    except (OSError, ValueError, IndexError):
        return None
    return 1 - (idle_after - idle) / max(total_after - total, 1)


def _too_busy(found: Mapping[str, Any]) -> bool:
    """Return whether other programs use so much of the processors that measured rates would mean little."""
    return found["busy"] is not None and found["busy"] > BUSY


def _compiler() -> dict[str, str] | None:
    """Return path and version of the C++ compiler, or ``None`` if it does not run."""
    try:
        toolchain = find_toolchain("doctor")
        lines = version_of(toolchain).splitlines()
    except BuildError:
        return None
    return {"path": toolchain.path, "version": lines[0] if lines else ""}


def _cache() -> dict[str, Any]:
    folder = config.cache_dir()
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()] if folder.is_dir() else []
    return {"folder": str(folder), "bytes": sum(sizes), "limit_bytes": config.cache_limit_bytes()}


def _torch() -> dict[str, Any]:
    import torch

    return {"torch": str(torch.__version__), "torch_threads": torch.get_num_threads()}


def expectation(found: Mapping[str, Any]) -> str:
    """Return one sentence about the speedup of int8 over float32 on this machine."""
    measured = found["measured"]
    if not measured or not measured["int8"] or not measured["fp32"]:
        return "The speed of int8 on this machine was not measured; the problems below say why."
    ratio = measured["int8"]["one_core"] / measured["fp32"]["one_core"]
    best = next(isa["name"] for isa in found["isas"] if isa["has"] and isa["kernels"])
    if best == machine.IsaName.PORTABLE:
        return (
            f"int8 instructions of this CPU do {ratio:.1f} times as many multiply-accumulates per second as float32 "
            "instructions, but intaglio has only portable kernels for it: results are correct, but not fast."
        )
    return (
        f"int8 instructions do {ratio:.1f} times as many multiply-accumulates per second as float32 instructions: at "
        "most that speedup for layers that arithmetic limits, at most 4 for layers that memory bandwidth limits, and "
        "less for small layers."
    )


def find_traps(found: Mapping[str, Any]) -> list[str]:
    """Return the reasons why int8 models are slow or impossible on this machine."""
    allowed, quota = found["cores_allowed"], found["cgroup_cores"]
    usable = min(allowed, quota or allowed)
    result = []
    if found["compiler"] is None:
        result.append(f"there is no C++ compiler, so no program can be built: {NO_COMPILER}")
    if "build_error" in found:
        result.append(f"the program that measures the machine could not be built: {found['build_error']}")
    if allowed < found["cores"]:
        result.append(f"this process may use {allowed} of {found['cores']} cores (taskset, a scheduler or a container)")
    if quota is not None and quota < allowed:
        result.append(
            f"the container's CPU quota is {quota:g} cores of the {allowed} that it sees: the system pauses threads "
            "that exceed it"
        )
    if found["torch_threads"] > usable:
        remedy = f"torch.set_num_threads({int(usable) or 1})"
        result.append(f"PyTorch uses {found['torch_threads']} threads on {usable:g} cores: call {remedy}")
    if _too_busy(found):
        result.append(
            f"other programs use {100 * found['busy']:.0f} % of the processors, so no rates were measured: run this "
            "command again when the machine is idle"
        )
    if not any(isa["has"] and isa["kernels"] and isa["name"] != machine.IsaName.PORTABLE for isa in found["isas"]):
        result.append("there are only portable kernels for this CPU: results are correct, but not fast")
    if found["cache"]["bytes"] > 0.9 * found["cache"]["limit_bytes"]:
        result.append(
            "the kernel cache is nearly full, so old programs are deleted and compiled again: raise INTAGLIO_CACHE_MB"
        )
    return result


def render(result: Result) -> Iterator[RenderableType]:
    """Yield the printed parts of a result."""
    compiler, cache = result["compiler"], result["cache"]
    limit = f", CPU quota {result['cgroup_cores']:g}" if result["cgroup_cores"] else ""
    level = [size_text(result["caches"][name]) for name in ("l1", "l2", "l3")]
    yield name_value_table(
        (
            ("CPU", result["cpu"]),
            ("cores", f"{result['cores']}; this process may use {result['cores_allowed']}{limit}"),
            ("caches", ", ".join(f"L{index} {size}" for index, size in enumerate(level, 1))),
            ("load average", ", ".join(f"{value:.2f}" for value in result["load_average"])),
            ("compiler", f"{compiler['path']}: {compiler['version']}" if compiler else "none"),
            ("kernel cache", f"{cache['folder']}: {size_text(cache['bytes'])} of {size_text(cache['limit_bytes'])}"),
            ("PyTorch", f"{result['torch']}, {result['torch_threads']} threads"),
        )
    )
    yes = {True: "yes", False: "no"}
    rows = [(isa["name"], yes[isa["has"]], yes[isa["kernels"]]) for isa in result["isas"]]
    yield table(("instruction set", "CPU has it", "intaglio has kernels"), rows, text=3)
    if measured := result["measured"]:
        yield table(
            ("peak rate", "instruction", "one core alone", "each core, all busy", "unit"), _rates(measured), text=2
        )
    yield result["expect"]
    for trap in result["traps"]:
        yield f"problem: {trap}"
    if not result["traps"]:
        yield "No problems were found."


def _rates(measured: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    units = {"int8": "G MAC/s", "fp32": "G MAC/s", "memory": "GB/s read"}
    for name, unit in units.items():
        if rate := measured[name]:
            yield name, rate["with"], f"{rate['one_core']:.1f}", f"{rate['each_of_all']:.1f}", unit
