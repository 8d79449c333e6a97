"""The error of one quantized group: the same as that of a reference that quantizes nothing else."""

import pytest
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.mixed_precision.group_errors import ExactRun, ResultErrors, model_error, sample_calls
from intaglio.mixed_precision.precision_groups import groups_of
from intaglio.tune import ReferencePool
from support import nets
from support.layered import LAYERED_INPUT, LAYERS, layered_network

NEAREST = intaglio.Recipe.of({"*": {"rounding": "nearest", "equalize": 0.0}})


def pool_of(model: nn.Module, x: torch.Tensor) -> ReferencePool:
    captured = stages.capture(model, x)
    prepared = stages.prepare(captured, stages.Quantizer(NEAREST))
    reference = stages.convert(prepared, stages.calibrate(prepared, [x], progress=False))
    return ReferencePool(captured, stages.Quantizer(NEAREST), reference, [x])


@pytest.mark.parametrize("name", LAYERS)
def test_a_group_alone_gives_the_results_of_a_reference_with_nothing_else_quantized(name):
    pool = pool_of(layered_network(), LAYERED_INPUT)
    group = next(one for one in groups_of(pool.base) if one.selector == name)
    (tensors,) = sample_calls(pool.captured, pool.batches)
    exact = ExactRun(pool.base, pool.captured, tensors)
    alone = pool.reference(stages.Quantizer(NEAREST.with_selection(only=name)))
    (found,) = exact.result_with(group, pool.base)
    assert torch.allclose(found, alone(*tensors), atol=1e-6)
    assert not torch.equal(found, exact.result[0])


def test_a_group_reads_shortcuts_and_is_read_through_data_movement():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Linear(16, 3)

        def forward(self, x):
            x = torch.relu(self.a(x))
            x = torch.relu(self.b(x) + x)
            return self.c(torch.max_pool2d(x, 2).flatten(1))

    x = torch.randn(4, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    pool = pool_of(nets.randomize(Net()), x)
    (tensors,) = sample_calls(pool.captured, pool.batches)
    exact = ExactRun(pool.base, pool.captured, tensors)
    groups = groups_of(pool.base)
    assert {"a", "b", "c"} <= {group.selector for group in groups}
    total = 0.0
    for group in groups:
        errors = ResultErrors()
        errors.add(exact.result, exact.result_with(group, pool.base))
        total += errors.relative
    whole = model_error(pool.captured, pool.base, [tensors])
    assert total == pytest.approx(whole, rel=1.0)
    assert whole > 0
