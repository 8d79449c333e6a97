"""The comparison of segments with their references that all tests of define-by-run rest on."""

from dataclasses import replace

import torch
from torch import nn

from intaglio import stages
from support import nets
from support.eager_models import converted_on
from support.lowering import quantized
from support.segment_programs import CheckedProgram, ProgramChecks, same_bits


def test_every_call_of_a_converted_model_is_compared(segment_programs):
    model = nets.randomize(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    converted = converted_on(model, [(torch.randn(16, 8),)])
    before = segment_programs.calls
    for _ in range(3):
        converted(torch.randn(16, 8))
    assert segment_programs.calls == before + 3


def test_a_program_that_differs_from_its_reference_is_detected():
    """One weight of the reference is another integer than in the program."""
    x = torch.randn(16, 8)
    lowered = quantized(nets.randomize(nn.Linear(8, 4)), x)[1]
    (weight,) = (name for name, value in lowered.graph.constants.items() if value.shape == (4, 8))
    changed = lowered.graph.constants[weight].copy()
    changed[0, 0] = 127 if changed[0, 0] < 0 else -127
    other = replace(lowered, graph=replace(lowered.graph, constants={**lowered.graph.constants, weight: changed}))
    checks = ProgramChecks()
    checks.compile(lowered)(x)
    assert not checks.differing
    CheckedProgram(checks, stages.compile(lowered), other)(x)
    assert len(checks.differing) == 1


def test_same_bits_distinguishes_types_and_accepts_equal_nans():
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, torch.tensor([float("nan"), 2.0]))
    assert not same_bits(nan, nan.double())
