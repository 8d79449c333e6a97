"""References of changed recipes, which share calibration and corrections with the first one."""

import numpy as np
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.tune import ReferencePool
from support import nets
from support.layered import LAYERED_INPUT, layered_network
from support.lowering import ROUNDED
from support.nets import Body


def pool_of(model: nn.Module, x: torch.Tensor, quantizer: Quantizer) -> ReferencePool:
    captured = stages.capture(model, x)
    prepared = stages.prepare(captured, quantizer)
    ranges = stages.calibrate(prepared, [x], progress=False)
    reference = stages.convert(prepared, ranges, stages.correct(prepared, ranges, [x]))
    return ReferencePool(captured, quantizer, reference, [x])


def test_a_value_that_becomes_a_site_is_calibrated():
    """A rectifier in float lays open the sum in front of it, which is a site if results are quantized."""
    model = nets.randomize(Body(lambda m, x: m.d(torch.relu(m.c(x) + x)), c=nn.Conv2d(4, 4, 1), d=nn.Conv2d(4, 2, 1)))
    x = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    pool = pool_of(model, x, Quantizer(ROUNDED))
    found = pool.reference(pool.quantizer_leaving(("op:aten.relu",)))
    assert set(found.parameters.entries) - set(pool.base.parameters.entries) == {"#0/add.0"}
    assert intaglio.compare(pool.captured, found, [x]).results[0] > 30


def test_an_unchanged_recipe_gives_the_same_reference():
    pool = pool_of(layered_network(), LAYERED_INPUT, Quantizer())
    assert torch.equal(pool.reference(pool.quantizer)(LAYERED_INPUT), pool.base(LAYERED_INPUT))


def test_weights_of_another_datatype_are_corrected_once():
    pool = pool_of(layered_network(), LAYERED_INPUT, Quantizer())
    four = Quantizer(intaglio.Recipe.of({"b": {"weights_dtype": "s4"}}))
    first, second = pool.reference(four), pool.reference(four)
    ours, theirs = (one.parameters.corrected.quantized_weights["b.weight"] for one in (first, second))
    assert np.array_equal(ours, theirs)
    assert np.abs(ours).max() <= 8
    assert torch.equal(first(LAYERED_INPUT), second(LAYERED_INPUT))
    kept = pool.base.parameters.corrected.quantized_weights
    assert np.array_equal(first.parameters.corrected.quantized_weights["a.weight"], kept["a.weight"])
