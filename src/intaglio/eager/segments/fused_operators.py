"""Find which recorded operators are fused, and report them by the names in the model."""

from __future__ import annotations

from intaglio.eager.recording.events import Event
from intaglio.eager.recording.torch_functions import plain_name
from intaglio.eager.segments.segment import Segment
from intaglio.fxgraph.node_info import info
from intaglio.quant.annotate.regions import Region


def regions_with_events(segment: Segment) -> list[tuple[Region, tuple[Event, ...]]]:
    """Return the regions of a segment, each with its operators. The segment must not be refused.

    An operator belongs to the node that was made from it and to the node that holds its result. A batch norm that was
    folded into a convolution is therefore found with the convolution. Operators that capture removes, such as dropout,
    belong to no region.
    """
    assert segment.prepared is not None
    captured = computing_operators(segment)
    made_by = {number: event.index for event in segment.events for number in event.outputs if event.index in captured}
    at: dict[str, set[int]] = {}
    for number, name in segment.node_names.items():
        if number in made_by:
            at.setdefault(name, set()).add(made_by[number])
    found = []
    for region in segment.prepared.annotations.regions:
        own = {index for node in region.computed for index in at.get(node.name, ())}
        own |= {event for node in region.computed if (event := info(node).event) is not None}
        found.append((region, tuple(segment.events[index] for index in sorted(own))))
    return found


def computing_operators(segment: Segment) -> set[int]:
    """Return the indices of operators that have a node in the graph. All others only pass on their inputs."""
    return {event for node in segment.captured.module.graph.nodes if (event := info(node).event) is not None}


def fused_groups(segment: Segment) -> list[tuple[str, ...]]:
    """Return the groups of operators that are fused with others, in execution order, named by `display_name`."""
    if segment.prepared is None:
        return []
    return [tuple(map(display_name, events)) for _, events in regions_with_events(segment) if len(events) > 1]


def display_name(event: Event) -> str:
    """Return the name of an operator in the model.

    It is `layer1.0.conv1` for a module and `layer1.0::add` for a function that a module calls.
    """
    return event.path if event.function is None else f"{event.path}::{plain_name(event.function)}"
