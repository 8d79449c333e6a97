"""Calls of a quantized model by tracers and transforms of PyTorch, and with tensors that hold no data."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.masked import masked_tensor

import intaglio
from intaglio.errors import InputError
from support.int8_models import assert_same
from support.nets import randomize

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


class WithoutMemory(Tensor):
    """A wrapper subclass, which has a shape and an element type only."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, strides=like.stride())

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError("no operator may be called on this tensor")


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)
        self.register_buffer("calls", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) + self.calls


@pytest.fixture(scope="module")
def model():
    net = randomize(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)))
    return intaglio.quantize(net, [X], progress=False)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_model_as_one_operator(model, mode):
    graph = make_fx(model, tracing_mode=mode)(X)
    assert [node.target for node in graph.graph.nodes].count(torch.ops.intaglio.call.default) == 1
    assert_same(graph(X), model(X))


def test_fake_tensors_give_fake_results_of_the_right_shape(model):
    with FakeTensorMode() as mode:
        result = model(mode.from_tensor(X))
    assert (result.shape, result.dtype) == (model(X).shape, torch.float32)


def test_torch_jit_trace_is_refused(model):
    with pytest.raises(InputError, match=r"torch\.jit\.trace cannot record its program"):
        torch.jit.trace(model, X)


def test_make_fx_refuses_a_model_that_updates_buffers():
    counting = intaglio.quantize(randomize(Counter()), [X], progress=False)
    with pytest.raises(InputError, match="updates buffers"):
        make_fx(counting)(X)


def freed(x: Tensor) -> Tensor:
    x.untyped_storage().resize_(0)
    return x


def shortened(x: Tensor) -> Tensor:
    x.untyped_storage().resize_(x.nbytes - 4)
    return x


def strided_past_its_end(x: Tensor) -> Tensor:
    wide = torch.zeros(8, 32)
    view = wide[:, :16]
    wide.untyped_storage().resize_(wide.nbytes - 80)
    return view


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Accessing the data pointer:DeprecationWarning")
@pytest.mark.parametrize(
    "damaged",
    [
        freed,
        shortened,
        strided_past_its_end,
        WithoutMemory,
        lambda x: masked_tensor(x, x > 0),
        lambda x: FakeTensorMode().from_tensor(x),
    ],
    ids=["freed", "shortened", "strided past its end", "wrapper", "masked", "fake"],
)
def test_a_tensor_without_its_memory_is_an_error(model, damaged):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = damaged(X.clone())
        with pytest.raises(InputError, match="memory"):
            model(given)


@pytest.mark.parametrize(
    "transform",
    [
        lambda model: torch.func.functionalize(model)(X),
        lambda model: torch.vmap(model)(X[None]),
        lambda model: torch.func.grad(lambda x: model(x).sum())(X),
        lambda model: torch.func.jvp(model, (X,), (X,)),
    ],
    ids=["functionalize", "vmap", "grad", "jvp"],
)
def test_transforms_of_torch_func_are_an_error(model, transform):
    with pytest.raises(InputError, match=r"call the model outside of torch\.func"):
        transform(model)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_is_an_error(model):
    with pytest.raises(InputError, match="nested tensor"):
        model(torch.nested.nested_tensor([X, X]))


def test_expanded_and_overlapping_inputs_are_read_as_they_are(model):
    assert_same(model(X[:1].expand(8, 16)), model(X[:1].repeat(8, 1)))
    assert_same(model(X[2:6]), model(X[2:6].clone()))
