"""Define-by-run: models that are called with numbers of Python and make tensors of them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from intaglio import eager
from intaglio.errors import UnsupportedError
from support.eager_models import warnings_of


class Tree(nn.Module):
    """A recursive network over nested tuples of token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.join, self.out = nn.Embedding(9, 16), nn.Linear(32, 16), nn.Linear(16, 2)

    def node(self, tree: Any) -> Tensor:
        if isinstance(tree, int):
            return self.words(torch.tensor([tree]))
        return torch.tanh(self.join(torch.cat([self.node(part) for part in tree], -1)))

    def forward(self, tree: Any) -> Tensor:
        return self.out(self.node(tree))


class Bag(nn.Module):
    """A linear layer behind the sum of embeddings of a list of token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 16), nn.Linear(16, 2)

    def forward(self, ids: list[int]) -> Tensor:
        return self.out(self.words(torch.as_tensor(ids)).sum(0))


TREES = [((1, 2), 3), (1, (2, (3, 4))), (((1, 2), (3, 4)), 5), ((8, 7), (6, 0))]
LISTS = [[1, 2, 3], [4], [5, 6, 7, 8, 0], [2, 1]]


@pytest.mark.parametrize(("model", "calls"), [(Tree, TREES), (Bag, LISTS)], ids=["tree", "bag"])
def test_tensors_made_of_numbers_are_inputs(model: type[nn.Module], calls: list[Any], caplog) -> None:
    torch.manual_seed(0)
    net = model().eval()
    prepared = eager.prepare(net, (calls[0],))
    for call in calls:
        assert torch.allclose(prepared(call), net(call), atol=1e-6)
    converted = eager.convert(prepared, strict=True)
    for call in calls[::-1]:
        assert (converted(call) - net(call)).abs().max() < 0.05
        assert not torch.equal(converted(call), net(call))
    assert eager.coverage(converted).macs == 1
    assert not warnings_of(caplog)


class Constant(nn.Module):
    """The result depends on a number of Python only."""

    def __init__(self, makes_tensor: bool) -> None:
        super().__init__()
        self.layer, self.makes_tensor = nn.Linear(8, 4), makes_tensor

    def forward(self, count: int) -> Tensor:
        x = torch.tensor([8 * [1.0]] * count) if self.makes_tensor else torch.ones(count, 8)
        return self.layer(x)


def test_a_model_that_reads_no_tensor_is_an_error_with_a_reason() -> None:
    prepared = eager.prepare(Constant(makes_tensor=False).eval(), (3,))
    prepared(3)
    with pytest.raises(UnsupportedError, match="its operators read no tensor that differs between calls") as error:
        eager.convert(prepared)
    assert error.value.remedy == "pass tensors to the model, or make them of numbers with torch.tensor(...) in its code"
    prepared = eager.prepare(Constant(makes_tensor=True).eval(), (3,))
    prepared(3)
    assert eager.coverage(eager.convert(prepared)).macs == 1
