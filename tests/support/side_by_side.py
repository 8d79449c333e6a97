"""Several small models in one, so that one capture and one program serve all of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn


class SideBySide(nn.Module):
    """Models by name, each on its own inputs; its result has their names.

    Models that are given the same tensor object share an input. ``inputs``: the tensors to call it with.
    """

    def __init__(self, models: Mapping[str, tuple[nn.Module, Sequence[Tensor]]]) -> None:
        super().__init__()
        self.models = nn.ModuleList(model for model, _ in models.values())
        self.inputs = list({id(x): x for _, given in models.values() for x in given}.values())
        places = {id(x): place for place, x in enumerate(self.inputs)}
        self.reads = {name: [places[id(x)] for x in given] for name, (_, given) in models.items()}

    def forward(self, *inputs: Tensor) -> dict[str, Any]:
        reads = zip(self.reads.items(), self.models, strict=True)
        return {name: model(*[inputs[place] for place in places]) for (name, places), model in reads}
