"""Which operators of a recording become one: found on the graph, told in the model's terms."""

from __future__ import annotations

from intaglio.eager.recording.events import Event
from intaglio.eager.recording.torch_functions import plain_name
from intaglio.eager.segments.segment import Segment
from intaglio.fxgraph.node_info import info
from intaglio.quant.annotate.regions import Region


def regions_of(segment: Segment) -> list[tuple[Region, tuple[Event, ...]]]:
    """Regions of a segment that is not refused, each with the operators that are in it, folded ones too.

    An operator belongs to the node that was made of it, and to the node that holds its result: so a batch norm is
    found that the convolution before it took in. Those that capture drops, as dropout, belong to none.
    """
    assert segment.prepared is not None
    captured = computing(segment)
    made_by = {number: event.index for event in segment.events for number in event.outputs if event.index in captured}
    at: dict[str, set[int]] = {}
    for number, name in segment.places.items():
        if number in made_by:
            at.setdefault(name, set()).add(made_by[number])
    found = []
    for region in segment.prepared.annotations.regions:
        own = {index for node in region.nodes for index in at.get(node.name, ())}
        own |= {event for node in region.nodes if (event := info(node).event) is not None}
        found.append((region, tuple(segment.events[index] for index in sorted(own))))
    return found


def computing(segment: Segment) -> set[int]:
    """Indices of the operators that the graph has nodes of; others hand on what they are given."""
    return {event for node in segment.captured.module.graph.nodes if (event := info(node).event) is not None}


def fused(segment: Segment) -> list[tuple[str, ...]]:
    """Operators that become one with others, in the order they run, as `spelled`."""
    if segment.prepared is None:
        return []
    return [tuple(map(spelled, events)) for _, events in regions_of(segment) if len(events) > 1]


def spelled(event: Event) -> str:
    """``layer1.0.conv1`` of a module, ``layer1.0::add`` of a function that the module's code calls."""
    return event.path if event.function is None else f"{event.path}::{plain_name(event.function)}"
