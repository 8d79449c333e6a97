"""Memory of an engine, measured in a process of its own that builds or loads the engine and calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from intaglio.cli import targets
from intaglio.cli.engines import ENGINES, INT8, Calibration, FileEngine, Run, eager_engine
from intaglio.cli.targets import Call
from intaglio.errors import IntaglioError

MEMORY_CALLS = 5
"""Number of calls after which the memory is read."""
SPECIFICATION, INPUTS, RESULT = "memory.json", "inputs.pt", "result.json"
"""Files in the folder of an engine: what to measure, the call with the inputs for calibration, and what was found."""


@dataclass(frozen=True)
class EngineProcess:
    """A process that runs one engine.

    Attributes:
        engine: name of the engine.
        source: MODULE:NAME of the float model, or the saved file of the int8 model; engines with a file of their own
            do not need it.
        threads: number of threads.
        isa: instruction set of the int8 model.
        folder: folder of the engine's file, for exchange with the process.
    """

    engine: str
    source: str
    threads: int
    isa: str
    folder: str

    def memory(self, call: Call, calibration: Calibration) -> Mapping[str, float]:
        """Start the process, and return its resident memory before it has the engine (``start``), after some calls
        (``resident``), and at its highest (``peak``), in megabytes.

        Raises:
            IntaglioError: the process failed.
        """
        folder = Path(self.folder)
        (folder / SPECIFICATION).write_text(json.dumps(asdict(self)))
        torch.save((call, calibration), folder / INPUTS)
        # Modules of the user are found where this process finds them.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "INTAGLIO_PROGRESS": "0"}
        command = [sys.executable, "-m", __name__, str(folder)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"its process ended with status {done.returncode}"]
            raise IntaglioError(self.engine, None, said[-1])
        found: Mapping[str, float] = json.loads((folder / RESULT).read_text())
        return found


def main(folder: Path) -> None:
    """Run the engine that a folder describes, and write what its process needs."""
    process = EngineProcess(**json.loads((folder / SPECIFICATION).read_text()))
    call, calibration = torch.load(folder / INPUTS, weights_only=False)  # written by the process that started this one
    torch.set_num_threads(process.threads)
    start = megabytes("VmRSS")
    run = _engine(process, call, calibration)
    for _ in range(MEMORY_CALLS):
        run(call)
    found = {"start": start, "resident": megabytes("VmRSS"), "peak": megabytes("VmHWM")}
    (folder / RESULT).write_text(json.dumps(found))


def _engine(process: EngineProcess, call: Call, calibration: Calibration) -> Run:
    """Return the engine of a process."""
    if process.engine == INT8:
        import intaglio

        return eager_engine(intaglio.load(process.source, isa=process.isa))
    engine = ENGINES[process.engine]
    if isinstance(engine, FileEngine):
        return engine.opened(Path(process.folder), process.threads)
    model = targets.float_model(process.source).eval()
    return engine(model, call, process.threads, calibration, Path(process.folder))


def megabytes(field: str) -> float:
    """Return a field of this process's status in MB: ``VmRSS`` is its resident memory, ``VmHWM`` the peak of it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024 / 1e6


def memory_line(engines: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what the memory of engines is of, or "" if none was measured."""
    starts = [found["memory_mb"]["start"] for found in engines.values() if "memory_mb" in found]
    if not starts:
        return ""
    return (
        f"Memory is that of one process for each engine, of which {max(starts):.0f} MB are Python, PyTorch and inputs."
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
