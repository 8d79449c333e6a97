"""Collective operations of several processes, with exact results.

Sums are of integers, so their result does not depend on the order or on how the work is divided. Work is done inside
`Group.run_on_all_ranks`, which reports failures to all ranks, so that no rank waits for one that has failed.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from intaglio.argument_checks import check_arguments
from intaglio.errors import CalibrationError
from intaglio.native.statistics import HALF_BINS, SKETCH
from intaglio.quant.calibrate.batches import batches
from intaglio.quant.calibrate.tensor_statistics import Statistics, widen
from intaglio.torch_private import default_store

T = TypeVar("T")
Array = NDArray[Any]


class Group:
    """A group of one process, and the base of larger groups.

    All processes of a group call the same methods in the same order, and get the same results.
    """

    rank, size = 0, 1

    @staticmethod
    def current() -> Group:
        """Return the processes of torch.distributed if it is initialized, and this process alone otherwise."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return ProcessGroup()
        return Group()

    def gather(self, item: T) -> list[T]:
        """Return the items of all ranks in the order of ranks; for small items."""
        return [item]

    def total(self, array: Array) -> Array:
        """Return the sum over ranks of an int64 array, or of a float64 array of integers below 2^53.

        The result is exact in any order of the ranks.
        """
        if array.dtype not in (np.int64, np.float64):
            raise TypeError(f"sums over ranks need int64 or float64, not {array.dtype}")
        return self._combined(array, "SUM")

    def lowest(self, array: Array) -> Array:
        """Return the elementwise minimum over ranks."""
        return self._combined(array, "MIN")

    def highest(self, array: Array) -> Array:
        """Return the elementwise maximum over ranks."""
        return self._combined(array, "MAX")

    def run_on_all_ranks(self, work: Callable[[], T]) -> T:
        """Return the result of `work` on this rank, after all ranks have finished theirs.

        If one rank raises, all do: that rank its own error, all others a `CalibrationError` that names it.
        """
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            if self.size == 1:
                raise
            failure = error
        try:
            told = self.gather(failure and f"{type(failure).__name__}: {failure}")
        except CalibrationError as error:
            raise failure or error from None
        if failure is not None:
            raise failure
        for rank, report in enumerate(told):
            if report is not None:
                raise CalibrationError(f"rank {rank}", None, f"failed, so all ranks stopped: {report}")
        return result

    def agree(self, names: Iterable[str], what: str) -> None:
        """Raise `CalibrationError` on every rank unless all ranks have the same names."""
        own = sorted(names)
        digests = self.gather(hashlib.sha256("\n".join(own).encode()).hexdigest())
        if len(set(digests)) == 1:
            return
        of_first, *others = self.gather(own)
        rank, theirs = next((rank, theirs) for rank, theirs in enumerate(others, 1) if theirs != of_first)
        odd = sorted(set(of_first) ^ set(theirs))
        raise CalibrationError(
            f"rank {rank}",
            None,
            f"its {what} differ from those of rank 0: only one of them has {', '.join(odd[:5])}",
            remedy="prepare the same model with the same recipe on every rank",
        )

    def _combined(self, array: Array, how: str) -> Array:
        function = {"SUM": np.add, "MIN": np.minimum, "MAX": np.maximum}[how]
        return reduce(function, self.gather(array))


FAILURES = "intaglio/failures/"
"""Beginning of the keys in the store of a process group under which ranks count failed exchanges."""
REPORT_SECONDS = 5.0
"""Time in which all ranks that run find out that an exchange failed."""


class ProcessGroup(Group):
    """All processes of torch.distributed, with a backend that accepts CPU tensors (gloo)."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather(self, item: T) -> list[T]:
        """Return this object of every process, in the order of ranks."""
        found: list[Any] = [None] * self.size
        self._exchange(lambda: dist.all_gather_object(found, item))
        return found

    def _combined(self, array: Array, how: str) -> Array:
        shared = torch.from_numpy(np.array(array))
        self._exchange(lambda: dist.all_reduce(shared, getattr(dist.ReduceOp, how)))
        return shared.numpy()

    def _exchange(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as error:
            silent = self._silent_ranks()
            where = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}" if silent else f"rank {self.rank}"
            problem = f"no answer any more, which rank {self.rank} waited for" if silent else "an exchange failed"
            raise CalibrationError(
                where,
                None,
                f"{problem}: {error}",
                remedy="check whether a rank ended; init_process_group('gloo', timeout=...) sets how long to wait",
            ) from error

    def _silent_ranks(self) -> list[int]:
        """Return the ranks that do not report within `REPORT_SECONDS` that an exchange failed for them too.

        Empty if all do, or if the store of the process group has ended with one of them.
        """
        try:
            store = default_store()
            failures = store.add(f"{FAILURES}{self.rank}", 1)
            others = {rank for rank in range(self.size) if rank != self.rank}
            until = time.monotonic() + REPORT_SECONDS
            while others and time.monotonic() < until:
                others = {rank for rank in others if store.add(f"{FAILURES}{rank}", 0) < failures}
                time.sleep(0.05)
        except RuntimeError:
            return []
        return sorted(others)


@dataclass(frozen=True)
class RankBatches:
    """The batches of one rank, when all ranks have the same data: indices ``rank``, ``rank + size`` and so on."""

    data: Any
    rank: int
    size: int

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(batches(self.data), self.rank, None, self.size)


@check_arguments
def share(data: Any, group: Group | None = None) -> RankBatches:
    """Return the batches of this rank, so that each batch is used by exactly one rank of the group.

    All ranks together use each sample once, so calibration gives the same bits as with one process. In contrast,
    `torch.utils.data.DistributedSampler` repeats samples to make the shares equally long. Every rank reads all of the
    data.

    Args:
        data: an iterable of batches.
        group: the processes; `Group.current` by default.
    """
    group = group or Group.current()
    return RankBatches(data, group.rank, group.size)


def merge_statistics(group: Group, statistics: Mapping[str, Statistics]) -> dict[str, Statistics]:
    """Return the statistics over the data of all ranks; the sites must be the same on each rank.

    It takes two collective operations for any number of sites.
    """
    names = sorted(statistics)
    told = group.gather({name: statistics[name].without_counts().to_dict() for name in names})
    read = [{name: Statistics.from_dict(one[name], complete=False) for name in names} for one in told]
    merged = {name: reduce(Statistics.merge, (one[name] for one in read)) for name in names}
    flat = []
    for name in names:
        flat += [widen(statistics[name].bins, merged[name].exponent - statistics[name].exponent)]
        flat += [statistics[name].sketch]
    counts = group.total(np.concatenate([np.zeros(0, np.int64), *flat])).reshape(len(names), 2 * HALF_BINS + SKETCH)
    for name, row in zip(names, counts, strict=True):
        merged[name].bins, merged[name].sketch = row[: 2 * HALF_BINS].copy(), row[2 * HALF_BINS :].copy()
    return merged
