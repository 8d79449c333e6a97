"""Plans are found by the kinds of tensors of a call, whatever the call before was."""

import pytest
import torch
from torch import Tensor, nn

import intaglio
from intaglio.errors import InputError
from intaglio.runtime import QuantizedModel
from support.nets import randomize


@pytest.fixture(scope="module")
def model() -> QuantizedModel:
    net = randomize(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))).eval()
    return intaglio.quantize(net, [images(4)], dynamic_shapes=({0: torch.export.Dim("n", max=8)},), progress=False)


def images(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


OTHERS = {
    "integers": lambda x: x.int(),
    "doubles": lambda x: x.double(),
    "sparse": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
    "other size": lambda x: x[..., :7],
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[1]]),
    "no tensor": lambda x: x.numpy(),
    "none": lambda x: None,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", OTHERS)
def test_other_tensors_are_refused_after_a_call_with_the_right_ones(model, kind):
    x = images(2)
    expected = model(x)
    with pytest.raises(InputError):
        model(OTHERS[kind](x))
    assert torch.equal(model(x), expected)


def test_calls_of_alternating_shapes_have_the_results_of_calls_alone(model):
    calls = [images(count, seed) for seed in range(3) for count in (1, 3, 2)]
    alone = [torch.cat([model(one[None]) for one in x]) for x in calls]
    assert all(torch.equal(model(x), expected) for x, expected in zip(calls, alone, strict=True))


def test_a_plan_that_is_the_most_recent_is_kept(model):
    model._plans.clear()
    limit, model.max_plans = model.max_plans, 2
    try:
        plans = [model._plan_for([images(count)]) for count in (1, 2, 2, 1, 3)]
    finally:
        model.max_plans = limit
    assert plans[0] is plans[3]
    assert list(model._plans.values()) == [plans[0], plans[4]]
