"""Recorded operators of one module of a prepared or converted model, their tensors, and how each is executed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from intaglio.argument_checks import check_arguments
from intaglio.eager.recording.events import Event, RecordedTensor, leaves
from intaglio.eager.segments.fused_operators import computing_operators, display_name, regions_with_events
from intaglio.eager.segments.segment import Segment
from intaglio.ir import DType
from intaglio.quant.annotate.sites import Site
from intaglio.quant.recipes.choices import Role

TORCH_QUANTIZED_DTYPES = {DType.U8: torch.quint8, DType.S8: torch.qint8}
"""PyTorch's quantized data types for our integer data types."""


@dataclass(frozen=True)
class QTensorInfo:
    """A tensor that an operator reads or returns.

    Attributes:
        id: Number of the tensor, unique in the model.
        inf_dtype: Data type of the tensor when the converted model runs.
    """

    id: int
    inf_dtype: torch.dtype


@dataclass(frozen=True)
class SeenOpInfo:
    """One operator, listed once for each time it was recorded.

    Attributes:
        type: Name of the function, or of the class of the leaf module.
        path: Path of the leaf module, or empty for a function.
        input_tensor_infos: Tensors that the operator reads.
        output_tensor_infos: Tensors that the operator makes.
        before: Tensors that the converted model quantizes or dequantizes for the operator.
        instead: Quantized region that replaces the operator, or "in float" or "passed through".
        after: Results that the converted model dequantizes for its caller.
    """

    type: str
    path: str
    input_tensor_infos: tuple[QTensorInfo, ...]
    output_tensor_infos: tuple[QTensorInfo, ...]
    before: str
    instead: str
    after: str

    @check_arguments
    def lines(self, index: int, converted: bool) -> list[str]:
        """Return the lines that `AutoQuantizationState` prints for this operator."""
        found = [f"{index}: (type): {self.type}" + (f" ({self.path})" if self.path else "")]
        for name in ("input_tensor_infos", "output_tensor_infos"):
            infos = [f"     {info}," for info in getattr(self, name)]
            found += [f"   ({name}): [", *infos, "   ],"]
        if converted:
            found += [f"   ({name}): {getattr(self, name)}" for name in ("before", "instead", "after")]
        return found


class SeenRecording:
    """One recording in the form that `AutoQuantizationState` shows.

    Attributes:
        id_offset: Offset added to the value numbers of the recording, so that tensor ids are unique in the model.
    """

    def __init__(self, segment: Segment, first: int, model: torch.nn.Module) -> None:
        self.segment, self.id_offset, self.model = segment, first, model
        self.sites: dict[int, Site] = {}
        self.instead: dict[int, str] = {}
        self.quantized_dtypes: dict[int, torch.dtype] = {}
        self.computing_operators: set[int] = {event.index for event in segment.events}
        if segment.prepared is not None:
            self._annotated()

    def _annotated(self) -> None:
        assert self.segment.prepared is not None
        annotations = self.segment.prepared.annotations
        self.computing_operators = computing_operators(self.segment)
        roots = {region.root.name for region in annotations.regions}
        for region, events in regions_with_events(self.segment):
            names = ", ".join(map(display_name, events))
            self.instead.update({event.index: f"{region.name} in int8 of {names}" for event in events})
        for number, name in self.segment.node_names.items():
            site = annotations.by_value.get((name, Role.ACTIVATION))
            if site is not None:
                self.sites[number] = site
                if name in roots:
                    self.quantized_dtypes[number] = TORCH_QUANTIZED_DTYPES.get(site.dtype, torch.float32)

    def infos(self, path: str) -> Iterator[SeenOpInfo]:
        """Yield the operators of the module at `path`."""
        results = {leaf.index for leaf in leaves(self.segment.recording.results[1]) if isinstance(leaf, RecordedTensor)}
        for event in self.segment.events:
            if owner_path(event) == path:
                yield self._info(event, results)

    def _info(self, event: Event, results: set[int]) -> SeenOpInfo:
        read, made = event.inputs, [leaf.index for leaf in leaves(event.result) if isinstance(leaf, RecordedTensor)]
        default = "in float" if event.index in self.computing_operators else "passed through"
        inside = default == "passed through" or event.index in self.instead
        quantized = [n for n in dict.fromkeys(read) if inside and n in self.sites and n not in self.quantized_dtypes]
        real = [n for n in dict.fromkeys(read) if not inside and n in self.quantized_dtypes]
        before = [f"quantize {self.id_offset + n}" for n in quantized] + [
            f"dequantize {self.id_offset + n}" for n in real
        ]
        after = [f"dequantize {self.id_offset + n}" for n in made if n in results and n in self.quantized_dtypes]
        kind = type(self.model.get_submodule(event.path)).__name__ if event.function is None else event.name
        return SeenOpInfo(
            kind,
            event.path if event.function is None else "",
            self._tensors(read),
            self._tensors(made),
            ", ".join(before) or "nothing",
            self.instead.get(event.index, default),
            ", ".join(after) or "nothing",
        )

    def _tensors(self, numbers: list[int]) -> tuple[QTensorInfo, ...]:
        types = {**self.segment.recording.types, **self.quantized_dtypes}
        return tuple(QTensorInfo(self.id_offset + number, types[number]) for number in numbers)

    def observed(self, path: str) -> dict[int, Site]:
        """Return the site of each tensor that the module's operators make or are the first to read, by tensor id."""
        known: set[int] = set()
        found = {}
        for event in self.segment.events:
            fresh = [number for number in (*event.inputs, *event.outputs) if number not in known]
            known.update(fresh)
            if owner_path(event) == path:
                found.update({self.id_offset + n: self.sites[n] for n in fresh if n in self.sites})
        return found


def owner_path(event: Event) -> str:
    """Return the path of the module whose code runs the operator."""
    return event.path if event.function is not None else event.path.rpartition(".")[0]
