"""`CompiledModel`: the part of a quantized model that its C export and its `torch.compile` operator use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from intaglio.ir import Graph, ModelInfo, Program, Signature
from intaglio.runtime.artifact import Artifact
from intaglio.runtime.float_islands import HostOperator
from intaglio.runtime.reports.coverage import Coverage


class CompiledModel(Protocol):
    """Interface that `runtime.export_c` and `runtime.custom_op` need, so that they do not import the model's class."""

    artifact: Artifact
    signature: Signature
    graph: Graph
    coverage: Coverage
    model_info: ModelInfo
    islands: nn.ModuleDict
    hosts: dict[str, HostOperator]

    def results(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the output tensors for the input tensors of a call."""

    def program_for(self, isa: str) -> Program:
        """Return the source text and constants of the program for an instruction set."""
