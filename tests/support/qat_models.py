"""Models prepared for training, and what holds of them however they were trained."""

import torch
from torch import nn

from intaglio import stages
from intaglio.quant.qat import PreparedQat


def trainable(model: nn.Module, x: torch.Tensor, quantizer=None) -> PreparedQat:
    return stages.prepare(stages.capture(model, x, train=True), quantizer, qat=True)


def assert_evaluates_alike(prepared: PreparedQat, *inputs: torch.Tensor) -> None:
    """In evaluation: the bits of the reference, and within one step of the int8 model."""
    was = prepared.training
    prepared.eval()
    with torch.no_grad():
        expected = prepared(*inputs)
    prepared.train(was)
    reference = stages.convert(prepared)
    assert torch.equal(reference(*inputs), expected)
    model = stages.compile(reference, isa="portable")
    steps = [q.step for name, q in reference.qparams.items() if q.axis is None and "weight" not in name]
    assert (model(*inputs) - expected).abs().max() <= max(steps, default=1e-5) * 1.001
