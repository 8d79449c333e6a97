"""`Checkpoint`: the quantized weights and the other tensors of a checkpoint, read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from intaglio.argument_checks import check_fields_except
from intaglio.quant.imported_weights.quantized_weight import QuantizedWeight

Read = TypeVar("Read")


class LazyMapping(Mapping[str, Read], Generic[Read]):
    """A mapping that reads a value whenever it is asked for it, and keeps none."""

    def __init__(self, readers: Mapping[str, Callable[[], Read]]) -> None:
        self._readers = dict(readers)

    def __getitem__(self, name: str) -> Read:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def __contains__(self, name: object) -> bool:
        return name in self._readers


@check_fields_except("weights", "tensors")  # a check of their values would read all of them
@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint that another tool quantized. Its values are read from the files whenever they are asked for.

    Attributes:
        path: the folder or file.
        format: name of the format, such as "compressed-tensors pack-quantized".
        weights: quantized weights by module path.
        tensors: all other tensors, float32, by name.
        metadata: contents of config.json, or the metadata of a GGUF file.
        notes: what is not used, for reports.
    """

    path: str
    format: str
    weights: Mapping[str, QuantizedWeight] = field(repr=False)
    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    metadata: Mapping[str, Any] = field(repr=False)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layers:
    """The quantized layers that a format finds among the tensors of a folder.

    Attributes:
        weights: functions that read the quantized weights, by module path.
        used: names of the tensors that they read.
        notes: what is not used.
    """

    weights: Mapping[str, Callable[[], QuantizedWeight]]
    used: frozenset[str]
    notes: tuple[str, ...] = ()
