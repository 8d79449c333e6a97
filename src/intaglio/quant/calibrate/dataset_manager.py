"""`DatasetManager`: a data set of any kind as batches of tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from intaglio.argument_checks import check_arguments, value_text
from intaglio.errors import CalibrationError
from intaglio.quant.calibrate.batches import is_function
from intaglio.signature.tensor_checks import PLAIN_TENSORS, TO_DENSE_ON_CPU, memory_problem, unsupported_reason
from intaglio.torch_private import pytree

OWN_METHODS = "define get_next_batch, num_batches, is_empty and reset, or call super().__init__(data)"
ONE_PASS = "pass a list, a DataLoader, or a function that returns an iterator: DatasetManager(lambda: ...)"


class DatasetManager:
    """Batches of a data set, for any number of passes; accepted wherever batches are expected.

    A subclass can read a data set of another library: it defines `get_next_batch`, `num_batches`, `is_empty` and
    `reset`, and need not call the constructor of this class. Its batches may contain NumPy arrays.

    Args:
        data: an array or tensor, or a mapping of them (also a `BatchEncoding`), whose first axis counts samples; a
            Hugging Face data set; a `DataLoader` or another iterable of batches; or a function without arguments that
            returns one.
        batch_size: samples in a batch. Without it an array is one batch, and a Hugging Face data set has batches of 32.
        num_samples: number of samples after which a pass ends, if need be within a batch.
        columns: the columns of a mapping or data set to use; all by default.
    """

    batch_size: Any = None
    num_samples: int | None = None
    columns: Sequence[str] | None = None
    samples = 0
    _open: Callable[[], Iterable[Any]] | None = None
    _length: int | None = None
    _once = _read = _started = False

    @check_arguments
    def __init__(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        num_samples: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("num_samples", num_samples)):
            if value is not None and value < 1:
                raise CalibrationError("data", None, f"{name} = {value}; it must be at least 1")
        self.batch_size, self.num_samples, self.columns = batch_size, num_samples, columns
        self._open = _source(data, batch_size, columns)
        self._length = _length(data, batch_size, columns)
        self._once = isinstance(data, Iterator)
        self._batches: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        """Start a pass at the first batch; raise `CalibrationError` for a second pass over an iterator."""
        self.reset()
        if type(self).get_next_batch is not DatasetManager.get_next_batch:
            return self._batches_of_subclass()
        return self._batches

    def _batches_of_subclass(self) -> Iterator[Any]:
        """Yield the batches of a subclass that defines `get_next_batch`, as tensors."""
        while not self.is_empty():
            try:
                batch = self.get_next_batch()
            except (IndexError, StopIteration):
                return
            yield _tensors(batch, None)

    def __len__(self) -> int:
        """Return the number of batches in a pass; raise `TypeError` if it is not known."""
        count = self.num_batches()
        if count is None:
            raise TypeError(
                "the number of batches is not known, because the data has no length; num_batches() returns None"
            )
        return count

    def reset(self) -> None:
        """Go back to the first batch; raise `CalibrationError` if an iterator has been read before."""
        if self._open is None:
            problem = (
                "the subclass defines only some of the methods and does not call the constructor of DatasetManager"
            )
            raise CalibrationError(type(self).__name__, None, problem, remedy=OWN_METHODS)
        if self._once and self._read:
            raise CalibrationError(
                "data",
                None,
                "the data is an iterator, which can be read only once, and this is a second pass",
                remedy=ONE_PASS,
            )
        self.samples, self._started = 0, True
        self._batches = self._pass(self._open)

    def get_next_batch(self) -> Any:
        """Return the next batch; start a pass if there is none, and raise `IndexError` after the last batch."""
        if not self._started:
            self.reset()
        for batch in self._batches:
            return batch
        raise IndexError("no batch is left; call reset() to start again")

    def is_empty(self) -> bool:
        """Return whether the pass has ended."""
        if not self._started:
            self.reset()
        for batch in self._batches:
            self._batches = itertools.chain([batch], self._batches)
            return False
        return True

    def num_batches(self) -> int | None:
        """Return the number of batches in a pass; ``None`` if it is not known."""
        if self._length is None or self.num_samples is None or self.batch_size is None:
            return self._length
        return int(min(self._length, -(-self.num_samples // self.batch_size)))

    def _pass(self, source: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        """Yield the batches of one pass, cut off after ``num_samples``."""
        items = source()
        if not hasattr(items, "__iter__"):
            problem = f"the function returned {value_text(items)}, which cannot be read as batches"
            raise CalibrationError("data", None, problem, remedy="return an iterable of batches")
        for item in items:
            self._read = True
            batch = _tensors(item, self.columns)
            size = samples_of(batch)
            left = size if self.num_samples is None else min(size, self.num_samples - self.samples)
            self.samples += left
            yield batch if left == size else _first(batch, left, size)
            if self.samples == self.num_samples:
                return


def samples_of(batch: Any) -> int:
    """Return the size of the first axis of the first tensor that has axes; 1 without one."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    return tensors[0].size(0) if tensors else 1  # a nested tensor has no shape


def _first(batch: Any, count: int, size: int) -> Any:
    """Return the first samples of a batch."""

    def cut(leaf: Any) -> Any:
        return leaf[:count] if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.size(0) == size else leaf

    return pytree.tree_map(cut, batch)


def _source(data: Any, batch_size: int | None, columns: Sequence[str] | None) -> Callable[[], Iterable[Any]]:
    """Return a function that starts a pass over the data."""
    if isinstance(data, (np.ndarray, torch.Tensor)) or is_mapping(data):
        tensors = _tensors(data, columns)
        for leaf in pytree.tree_leaves(tensors):
            _check_dense(leaf)
        size = samples_of(tensors)
        step = batch_size or max(size, 1)
        return lambda: (_slice(tensors, start, start + step, size) for start in range(0, size, step))
    if is_rows(data):
        return lambda: data.iter(batch_size=batch_size or DEFAULT_BATCH)
    if is_function(data):
        return data
    if isinstance(data, type) or not hasattr(data, "__iter__"):
        kind = value_text(data) if isinstance(data, type) else f"a {type(data).__name__}"
        raise CalibrationError(
            "data",
            None,
            f"{kind} cannot be read as batches",
            remedy="pass an array, a tensor, an iterable of batches, a data set, or a function that returns one",
        )
    if batch_size is not None:
        raise CalibrationError(
            "data",
            None,
            f"batch_size = {batch_size} is given, but the data already comes in batches",
            remedy="leave batch_size out, or pass one array or tensor",
        )
    return lambda: data


def _check_dense(leaf: Any) -> None:
    """Raise `CalibrationError` for a tensor of which no rows can be taken."""
    if not isinstance(leaf, torch.Tensor):
        return
    if (problem := unsupported_reason(leaf)) is not None:
        raise CalibrationError("data", None, problem, remedy=TO_DENSE_ON_CPU)
    if (problem := memory_problem(leaf)) is not None:
        raise CalibrationError("data", None, problem, remedy=PLAIN_TENSORS)


DEFAULT_BATCH = 32
"""Batch size of a Hugging Face data set by default."""


def _slice(tensors: Any, start: int, stop: int, size: int) -> Any:
    def cut(leaf: Any) -> Any:
        return leaf[start:stop] if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.size(0) == size else leaf

    return pytree.tree_map(cut, tensors)


def _length(data: Any, batch_size: int | None, columns: Sequence[str] | None) -> int | None:
    """Return the number of batches in the data, if it is known."""
    if isinstance(data, (np.ndarray, torch.Tensor)) or is_mapping(data):
        size = samples_of(_tensors(data, columns))
        return -(-size // (batch_size or max(size, 1)))
    try:
        size = len(data)
    except TypeError:
        return None
    return -(-size // (batch_size or DEFAULT_BATCH)) if is_rows(data) else size


def is_mapping(item: Any) -> bool:
    """Return whether an item is a mapping, or behaves like one, as the outputs of tokenizers do."""
    return isinstance(item, Mapping) or (hasattr(item, "keys") and hasattr(item, "__getitem__"))


def is_rows(data: Any) -> bool:
    """Return whether data is a Hugging Face data set, which has named columns and an iterator over batches."""
    return hasattr(data, "column_names") and callable(getattr(data, "iter", None))


def _tensors(item: Any, columns: Sequence[str] | None) -> Any:
    """Convert arrays and lists of numbers to tensors, and mappings to dictionaries of the columns."""
    if is_mapping(item):
        keys = list(item.keys()) if columns is None else columns
        if missing := [key for key in keys if key not in item]:
            problem = f"the data has no column {', '.join(missing)}"
            raise CalibrationError("data", None, problem, remedy=f"choose columns from {', '.join(item.keys())}")
        return {key: _tensor(item[key], f"column {key}") for key in keys}
    if isinstance(item, (tuple, list)):
        return tuple(_tensors(part, None) for part in item)
    return _tensor(item, "a batch")


def _tensor(value: Any, where: str) -> Any:
    """Return a tensor for an array or list; numbers, strings and ``None`` stay as they are."""
    if isinstance(value, torch.Tensor) or value is None or isinstance(value, (int, float, str)):
        return value
    try:
        return torch.from_numpy(np.ascontiguousarray(value))
    except (TypeError, ValueError) as error:
        raise CalibrationError(
            "data",
            None,
            f"{where} is not an array of numbers: {error}",
            remedy="choose other columns=[...], or convert and pad the data before",
        ) from error
