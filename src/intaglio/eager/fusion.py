"""Which operators of a recording become one: found on the graph, told in the model's terms."""

from __future__ import annotations

from intaglio.eager.chain import Chain
from intaglio.eager.events import Event
from intaglio.eager.kinds import plain_name
from intaglio.quant.annotate.regions import Region


def regions_of(chain: Chain) -> list[tuple[Region, tuple[Event, ...]]]:
    """Regions of a chain that is not refused, each with the operators that are in it, folded ones too.

    An operator belongs to the node that was made of it, and to the node that holds its result: so a batch norm is
    found that the convolution before it took in. Those that capture drops, as dropout, belong to none.
    """
    assert chain.prepared is not None
    captured = computing(chain)
    made_by = {number: event.index for event in chain.events for number in event.outputs if event.index in captured}
    at: dict[str, set[int]] = {}
    for number, name in chain.places.items():
        if number in made_by:
            at.setdefault(name, set()).add(made_by[number])
    found = []
    for region in chain.prepared.annotations.regions:
        own = {index for node in region.nodes for index in at.get(node.name, ())}
        own |= {node.meta["event"] for node in region.nodes if "event" in node.meta}
        found.append((region, tuple(chain.events[index] for index in sorted(own))))
    return found


def computing(chain: Chain) -> set[int]:
    """Indices of the operators that the graph has nodes of; others hand on what they are given."""
    return {node.meta["event"] for node in chain.captured.module.graph.nodes if "event" in node.meta}


def fused(chain: Chain) -> list[tuple[str, ...]]:
    """Operators that become one with others, in the order they run, as `spelled`."""
    if chain.prepared is None:
        return []
    return [tuple(map(spelled, events)) for _, events in regions_of(chain) if len(events) > 1]


def spelled(event: Event) -> str:
    """``layer1.0.conv1`` of a module, ``layer1.0::add`` of a function that the module's code calls."""
    return event.path if event.function is None else f"{event.path}::{plain_name(event.function)}"
