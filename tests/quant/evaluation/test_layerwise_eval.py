"""The walk over a graph's regions: its tracks are the float model and the reference model."""

import numpy as np
import pytest
import torch

from intaglio import numerics, stages
from intaglio.fxgraph.nodes import operands
from intaglio.quant.evaluation.layerwise_eval import CACHE, LayerwiseEvaluation
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from intaglio.quant.recipes.settings import Setting
from intaglio.signature import bind
from support import nets
from support.slow_params import slow_params


def all_stages(**setting):
    torch.manual_seed(0)
    model = nets.randomize(nets.Residual())
    batches = [torch.randn(n, 3, 12, 12) for n in (2, 3, 1)]
    quantizer = Quantizer(Recipe(default=Setting(**setting)))
    prepared = stages.prepare(stages.capture(model, batches[0]), quantizer)
    ranges = stages.calibrate(prepared, batches)
    return model, prepared, stages.convert(prepared, ranges), batches


def leaves(prepared, batches):
    return [bind(prepared.signature, (batch,), {}) for batch in batches]


def quantize_parameters(evaluation, region, reference):
    """Weight and bias of a region as the reference has them."""
    record, values = region.record, operands(region.anchor)
    if record.roles.weight is None:
        return
    by_value, module = evaluation.annotations.by_value, evaluation.module
    weight = values[record.roles.weight]
    q = reference.qparams[by_value[weight.name, "weight"].name]
    scales = np.array(q.scales, np.float32)
    exact = getattr(module, weight.target).numpy()
    quantized = numerics.quantize(exact, scales.reshape(-1, *[1] * (exact.ndim - 1)), 0, q.qmin, q.qmax)
    steps = quantized.astype(np.float32) * scales.reshape(-1, *[1] * (exact.ndim - 1))
    evaluation.weights[weight.name] = torch.from_numpy(steps)
    bias = by_value.get((region.anchor.name, "bias"))
    if bias is not None:
        x = reference.qparams[by_value[values[record.roles.x[0]].name, "activation"].name]
        whole = numerics.quantize_bias(getattr(module, values[record.roles.bias].target).numpy(), x.step, scales)
        unit = np.array(reference.qparams[bias.name].scales, np.float32)
        evaluation.biases[region.anchor.name] = torch.from_numpy(whole.astype(np.float32) * unit)


@pytest.mark.parametrize("shortcut", [8, *slow_params(16, reason="sums of 16 bits are computed in the same way")])
@pytest.mark.parametrize(
    "cache", [*slow_params(CACHE, reason="the largest cache; a smaller one and none are computed with"), 3000, 0]
)
def test_the_second_track_computes_the_reference_for_every_cache(cache, shortcut):
    _, prepared, reference, batches = all_stages(shortcut=shortcut)
    evaluation = LayerwiseEvaluation(prepared.annotations, leaves(prepared, batches), reference.qparams, cache=cache)
    for region in evaluation:
        quantize_parameters(evaluation, region, reference)
    for batch, (found,) in zip(batches, evaluation.results, strict=True):
        assert torch.equal(found, reference(batch))


def test_the_first_track_computes_the_float_model():
    model, prepared, reference, batches = all_stages()
    evaluation = LayerwiseEvaluation(prepared.annotations, leaves(prepared, batches), reference.qparams)
    outputs = {}
    for region in evaluation:
        outputs[region.root.name] = evaluation.unquantized_outputs(region, 1)[0]
        assert all(x.shape[0] == 3 for x in evaluation.unquantized_inputs(region, 1))
    last = outputs[evaluation.annotations.regions[-1].root.name]
    torch.testing.assert_close(last.flatten(), model(batches[1]).detach().flatten())


def test_no_values_are_stored_at_the_last_operator():
    _, prepared, reference, batches = all_stages()
    evaluation = LayerwiseEvaluation(prepared.annotations, leaves(prepared, batches), reference.qparams)
    assert len(list(evaluation)) == len(prepared.annotations.regions)
    assert all(not track.values for track in evaluation._tracks())


def test_a_site_fixed_during_calibration_is_quantized_from_then_on():
    _, prepared, reference, batches = all_stages()
    evaluation, calls = prepared.annotations, leaves(prepared, batches)
    late = LayerwiseEvaluation(evaluation, calls)
    for region in late:
        for value in (*region.activations(), region.root):
            if value.name in late.sites:
                name = late.sites[value.name].name
                late.set_qparams(name, reference.qparams[name])
        quantize_parameters(late, region, reference)
    for batch, (found,) in zip(batches, late.results, strict=True):
        assert torch.equal(found, reference(batch))
