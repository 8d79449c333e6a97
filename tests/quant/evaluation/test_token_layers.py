"""Linear layers with scales per token have the bits of the reference arithmetic on the second track."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import intaglio
from intaglio import numerics, stages
from intaglio.quant.correct.operand_columns import OperandReader
from intaglio.quant.evaluation.token_layers import TokenWeight, token_layer
from intaglio.quant.precision.changed_run import ChangedRun


def drawn(shape: tuple[int, ...], seed: int, scale: float) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@given(
    st.integers(0, 5), st.integers(1, 70), st.integers(1, 9), st.integers(0, 99), st.sampled_from([1.0, 1e-35, 1e30])
)
def test_a_layer_has_the_bits_of_the_reference_arithmetic(rows, inputs, outputs, seed, scale):
    x, bias = drawn((rows, 3, inputs), seed, scale), drawn((outputs,), seed + 1, 1.0)
    make = torch.Generator().manual_seed(seed)
    weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, generator=make)
    scales = drawn((outputs,), seed + 2, 0.01).abs() + 1e-4
    quantized, steps = numerics.quantize_rows(x.numpy(), numerics.row_absmax(x.numpy()))
    products = (quantized.astype(np.int32) - 128) @ weight.numpy().astype(np.int32).T
    expected = numerics.dequantize_rows(products, steps, scales.numpy(), bias.numpy())
    assert np.array_equal(token_layer(x, TokenWeight(weight, scales), bias).numpy(), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_have_no_scale(value):
    rows = drawn((3, 8), 0, 1.0)
    rows[1, 2] = value
    found = token_layer(rows, TokenWeight(torch.ones(2, 8, dtype=torch.int8), torch.ones(1)))
    assert torch.equal(found.isfinite().all(1), torch.tensor([True, False, True]))
    assert not found[1].isfinite().any()


@pytest.mark.parametrize("bias", [False, True])
def test_corrections_evaluate_layers_as_kernels_compute_them(bias, monkeypatch):
    """The second layer reads what the kernels of the first return, whether or not it has a bias."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 40, bias=bias), nn.ReLU(), nn.Linear(40, 8, bias=bias)).eval()
    x = torch.randn(70, 96)
    recipe = intaglio.Recipe.of({"*": {"activations": "token", "weights_dtype": "s4", "equalize": 0.0}})
    prepared = stages.prepare(stages.capture(model, x), stages.Quantizer(recipe=recipe))
    seen, read = [], OperandReader.batches
    monkeypatch.setattr(
        OperandReader,
        "batches",
        lambda own, region, node: seen.append(own.evaluation.float_values(node, 0)) or read(own, region, node),
    )
    ranges = stages.calibrate(prepared, [x], progress=False)
    reference = stages.convert(prepared, ranges, stages.correct(prepared, ranges, [x]))
    inner = next(node for node in reference.module.graph.nodes if "relu" in str(node.target))
    (expected,) = ChangedRun(reference.module, [inner], {}).results([x])
    torch.testing.assert_close(seen[-1], expected, atol=1e-6, rtol=1e-6)
