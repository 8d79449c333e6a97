"""Products with Hadamard matrices run in programs, with the bits of the reference on every instruction set."""

import numpy as np
import pytest
import torch
from torch import nn

from intaglio import numerics
from intaglio.ir import Graph, Op, TensorType
from intaglio.ir.types import F32
from intaglio.ops.direct.hadamard_blocks import check_hadamard
from intaglio.quant.rotation.online_rotation import hadamard_operator
from support.lowering import quantized
from support.matmul_library import BEST_ISA_PARAMS
from support.nets import Body, randomize
from support.programs import assert_bits_compiled_and_loaded

X = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(0))


def products(m, x):
    """Products of dense rows, of rows in transposed heads, and of columns that are transposed to rows."""
    h, multiply = m.a(x), hadamard_operator().hadamard
    heads = h.unflatten(-1, (4, 16)).transpose(1, 2)
    columns = h[:, :4].transpose(1, 2)
    return m.b(multiply(h, 64)), multiply(heads, 16), multiply(columns, 4), multiply(h, 2), multiply(h * 1e30, 32)


@pytest.fixture(scope="module")
def lowered():
    model = randomize(Body(products, a=nn.Linear(12, 64), b=nn.Linear(64, 5)))
    return quantized(model, X)[1]


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_programs_have_the_bits_of_the_interpreter(isa, lowered, tmp_path):
    assert_bits_compiled_and_loaded(lowered, isa, (X, X[:1]), tmp_path)


def test_the_pytorch_operator_has_the_bits_of_the_reference():
    x = torch.randn(2, 3, 24)
    assert np.array_equal(hadamard_operator().hadamard(x, 8).numpy(), numerics.hadamard(x.numpy(), 8))


@pytest.mark.parametrize("size", [1, 3, 16, 2048])
def test_blocks_that_kernels_do_not_support_are_refused(size):
    kind = TensorType((2, 24), F32)
    op = Op("hadamard", ("x",), ("y",), {"size": size, "axis": 1})
    with pytest.raises(ValueError, match=r"%y: hadamard of f32\[2, 24\]"):
        check_hadamard(op, Graph(("x",), ("y",), {"x": kind, "y": kind}, (op,)))


@pytest.mark.parametrize("shape", [(1, 8), (8,), (3, 8), (8, 3)])
def test_the_operand_stays_as_it_is(shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for given in (x, np.asfortranarray(x)):
        before = given.copy()
        numerics.hadamard(given, 1 if shape[-1] == 3 else 8)
        assert np.array_equal(given, before)
