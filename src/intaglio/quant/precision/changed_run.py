"""Run a graph with changed values of some nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from intaglio.quant.calibrate.float_run import ChannelsLastRun

Changes = Mapping[fx.Node, Callable[[torch.Tensor], torch.Tensor]]
"""Node -> what happens to its value."""


class ChangedRun(ChannelsLastRun):
    """Runs a graph with changed values of some nodes, and keeps those of others."""

    def __init__(self, module: fx.GraphModule, kept: Sequence[fx.Node], changes: Changes) -> None:
        super().__init__(module)
        self.kept, self.changes, self.values = kept, changes, dict[fx.Node, Any]()

    def results(self, leaves: Sequence[torch.Tensor]) -> list[Any]:
        """Return the kept values of a call."""
        self.run(*leaves)
        return [self.values[node] for node in self.kept]

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and change its value."""
        value = super().run_node(n)
        if n in self.changes and isinstance(value, torch.Tensor):
            value = self.changes[n](value)
        if n in self.kept:
            self.values[n] = value
        return value
