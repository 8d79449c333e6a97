"""Aliases in front of readers that quantize a value with other parameters than its other readers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import fx

from intaglio.fxgraph.node_info import info, origin, set_info, tensor_type
from intaglio.ir import Origin

Place: TypeAlias = "fx.Node | tuple[fx.Node, fx.Node]"
"""A value, or an edge: a value and the node that reads it."""


def is_reader_alias(node: fx.Node) -> bool:
    """Return whether a node is an alias in front of a reader with its own parameters."""
    return info(node).separates_reader


def insert_aliases(module: fx.GraphModule, leaders: Mapping[Place, Place]) -> dict[Place, fx.Node]:
    """Insert an alias for each edge whose parameters differ from those of its value; return edge -> alias."""
    found: dict[Place, fx.Node] = {}
    made: dict[tuple[fx.Node, Place], fx.Node] = {}
    main: dict[fx.Node, Place] = {place: leader for place, leader in leaders.items() if isinstance(place, fx.Node)}
    for place, leader in leaders.items():
        if not isinstance(place, tuple) or main.setdefault(place[0], leader) == leader:
            continue
        value, reader = place
        before = next(
            (node for node in reader.all_input_nodes if is_reader_alias(node) and node.args[0] is value), None
        )
        if before is not None:
            made[value, leader] = before
        if (value, leader) not in made:
            with module.graph.inserting_after(value):
                alias = module.graph.call_function(torch.ops.aten.alias.default, (value,))
            where = origin(value)
            alias_origin = Origin(where.path, "aten.alias.default", where.source)
            set_info(alias, type=tensor_type(value), separates_reader=True, origin=alias_origin)
            made[value, leader] = alias
        found[place] = made[value, leader]
        reader.replace_input_with(value, found[place])
    return found
