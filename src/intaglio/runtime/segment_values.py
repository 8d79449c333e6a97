"""The external tensors that each segment of a program reads and writes, and those that are freed after it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from intaglio.ir import HostCall, IslandCall, Program
from intaglio.runtime.call_plans import ExternalInput


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
