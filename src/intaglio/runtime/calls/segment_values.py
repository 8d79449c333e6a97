"""The external tensors that each segment of a program reads and writes, and calls of programs that are one segment."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from intaglio.errors import INDEX_OUT_OF_RANGE
from intaglio.ir import Graph, HostCall, IslandCall, Program, Signature
from intaglio.runtime.calls.call_plans import CallPlan, ExternalInput, Frame, raise_memory_error
from intaglio.signature import returns_tensor

CPU = torch.device("cpu")
AXES_OF_IMAGES = 4
"""Axes of a result that may have to be copied to another memory format."""


@dataclass(frozen=True)
class SegmentValues:
    """One segment of a program.

    Attributes:
        calls: the islands and host operators that the runtime calls; none in a segment of compiled steps.
        written: the tensors that this segment is the first to write, which must be allocated before.
        read: the tensors of the caller and of islands that this segment is the first to read.
        released: the tensors that no later segment uses and that are not results.
    """

    calls: tuple[IslandCall | HostCall, ...]
    written: tuple[str, ...]
    read: tuple[ExternalInput, ...]
    released: tuple[str, ...]


def segments_of(program: Program, results: Sequence[str], in_bytes: Collection[str]) -> tuple[SegmentValues, ...]:
    """Return the segments of a program in execution order.

    Args:
        program: the program.
        results: names of the results of a call, which are not freed.
        in_bytes: names of inputs that may be given in bytes.
    """
    used = {external.value: external for external in program.externals if external.last_segment >= 0}
    entries = {
        external.value: ExternalInput(index, external, external.value in in_bytes)
        for index, external in enumerate(program.externals)
    }
    last = {name: external.last_segment for name, external in used.items()}
    for call in program.calls:
        if isinstance(call, IslandCall):
            last.update({name: max(last.get(name, 0), call.after_segment) for name in (*call.inputs, *call.outputs)})
    kept = set(results)
    return tuple(
        SegmentValues(
            tuple(call for call in program.calls if call.after_segment == number),
            tuple(name for name, entry in used.items() if entry.is_output and entry.first_segment == number),
            tuple(entries[name] for name, e in used.items() if not e.is_output and e.first_segment == number),
            tuple(name for name, segment in last.items() if segment == number and name not in kept),
        )
        for number in range(program.segments)
    )


class DirectCalls:
    """Runs a program that is a single segment and computes one tensor.

    It does so with few operations in Python: a large model evicts the interpreter from the caches of the core, so that
    Python takes several times longer around its calls than around those of a small model (ResNet-50 on two threads of
    a Zen 5: half of the time that it takes with the operations that any program needs).
    """

    def __init__(
        self, inputs: Sequence[str], segment: SegmentValues, index: Mapping[str, int], dtype: torch.dtype
    ) -> None:
        """Prepare calls.

        Args:
            inputs: Names of the tensors of a call.
            segment: The only segment.
            index: Place of every external tensor in the table that the program reads.
            dtype: Data type of the result.
        """
        self.read = [(entry, inputs.index(entry.value)) for entry in segment.read]
        (self.result,) = segment.written
        self.index, self.dtype = index[self.result], dtype

    def run(self, leaves: Sequence[torch.Tensor], plan: CallPlan, frame: Frame, allowed: int) -> torch.Tensor:
        """Run a call and return its result.

        Args:
            leaves: The tensors of the call, all in memory.
            plan: The plan for their shapes.
            frame: Memory of the call.
            allowed: The largest number of threads.
        """
        sizes, strides = plan.outputs[self.result]
        try:
            if frame.layout is not plan.layout:
                frame.apply_layout(plan.layout)
            result = torch.empty_strided(sizes, strides, dtype=self.dtype, device=CPU)
            frame.external[self.index] = result.data_ptr()
            kept = []  # copies in another layout, until the call ends
            for entry, place in self.read:
                kept.append(entry.prepared(leaves[place]))
                frame.set_input(entry.index, kept[-1])
        except RuntimeError as error:
            raise_memory_error(error)
        plan.artifact.run(frame.run, 0, plan.thread_counts(allowed)[0])
        if frame.out_of_range.value:
            raise IndexError(INDEX_OUT_OF_RANGE)
        return result


def direct_calls(
    signature: Signature,
    graph: Graph,
    segments: Sequence[SegmentValues],
    index: Mapping[str, int],
    written: Mapping[str, torch.dtype],
) -> DirectCalls | None:
    """Return how to call a program directly, or ``None`` if its calls need more than one segment and one result.

    Args:
        signature: Arguments and results of a call.
        graph: The integer graph of the program.
        segments: The segments of the program.
        index: Place of every external tensor in the table that the program reads.
        written: Data type of every external tensor that the program writes.
    """
    if signature.state or signature.updated_inputs or len(segments) != 1 or segments[0].calls:
        return None
    if not returns_tensor(signature):
        return None
    (segment,) = segments
    if segment.written != tuple(graph.outputs) or len(graph.types[graph.outputs[0]].shape) == AXES_OF_IMAGES:
        return None
    return DirectCalls(graph.inputs, segment, index, written[graph.outputs[0]])
