"""Disk cache of tuned schedules: one small file for each layer and machine, so that concurrent processes do not
conflict."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from intaglio import config
from intaglio.drafts import draft_file
from intaglio.errors import MALFORMED, BuildError
from intaglio.ir import Schedule
from intaglio.kernels import ISAS
from intaglio.native import cpu as machine
from intaglio.native.cache_folder import make_folder, read_entry, trusted_folder
from intaglio.plan import GENERATOR, Geometry, unsupported_reason
from intaglio.runtime.saved.json_codec import checked_integer

ENTRY_BYTES = 4096
"""Disk space of an entry, one block of the file system."""
CACHE_FRACTION = 16
"""Entries together use at most one part in `CACHE_FRACTION` of the cache's limit."""

logger = logging.getLogger("intaglio")


@dataclass(frozen=True)
class ScheduleCache:
    """Schedules by geometry, for one instruction set and number of threads on this machine.

    Problems with files are never errors: entries that cannot be read, or that other users may have written, are timed
    again, and a failure to write is logged as a warning.
    """

    isa: str
    threads: int

    @property
    def folder(self) -> Path:
        """Return the folder with one file per geometry. Raise `BuildError` if others can replace what it contains."""
        return trusted_folder("schedules")

    def key(self, geometry: Geometry) -> str:
        """Return everything that a time depends on, as text."""
        where = machine.cpu_name(), tuple(machine.caches()), self.isa, self.threads
        return f"{geometry} on {where}, generator {GENERATOR}"

    def path(self, geometry: Geometry) -> Path:
        """Return the file of a geometry."""
        return self.folder / f"{hashlib.sha256(self.key(geometry).encode()).hexdigest()[:32]}.json"

    def load(self, geometry: Geometry) -> Schedule | None:
        """Return the stored schedule of this geometry, or ``None``."""
        try:
            path = self.path(geometry)
        except BuildError as error:
            logger.warning("the layer is timed again: %s", error)
            return None
        try:
            if (content := read_entry(path)) is None:
                return None
            entry = json.loads(content)
            schedule = Schedule(**{name: checked_integer(value) for name, value in entry["schedule"].items()})
            problem = (
                unsupported_reason(schedule, ISAS[self.isa])
                if entry["key"] == self.key(geometry)
                else "another layer's"
            )
        except (OSError, *MALFORMED) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            logger.warning("%s does not contain a schedule, so the layer is timed again: %s", path, problem)
            return None
        with contextlib.suppress(OSError):  # marks the entry as recently used
            os.utime(path)
        return schedule

    def store(self, found: Mapping[Geometry, Schedule]) -> None:
        """Write the schedules atomically, one file each."""
        try:
            make_folder(self.folder)
            for geometry, schedule in found.items():
                entry = {"key": self.key(geometry), "schedule": asdict(schedule)}
                with draft_file(self.folder) as (draft, file):
                    file.write(json.dumps(entry, indent=1).encode())
                    file.flush()
                    os.fchmod(file.fileno(), 0o644)  # whatever the umask is: others must not be able to write to it
                    os.replace(draft, self.path(geometry))
            self._evict()
        except (OSError, BuildError) as error:
            logger.warning("schedules cannot be saved in %s: %s", config.cache_dir(), error)

    def _evict(self) -> None:
        """Remove the least recently used entries until the folder is within its share of the cache."""
        used = {}
        for path in self.folder.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                used[path] = path.stat().st_mtime
        excess = len(used) - config.cache_limit_bytes() // CACHE_FRACTION // ENTRY_BYTES
        for path in sorted(used, key=lambda path: used[path])[: max(excess, 0)]:
            path.unlink(missing_ok=True)
