"""Tensors that do not hold their elements in dense memory are an error of intaglio, wherever they are given."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor

import intaglio
from intaglio import eager, stages
from intaglio.calibration import DatasetManager
from intaglio.errors import IntaglioError
from support.lowering import sqnr
from support.nets import randomize

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def resized(size: int) -> Tensor:
    x = X.clone()
    x.untyped_storage().resize_(size)
    return x


UNREADABLE = {
    "freed": lambda: resized(0),
    "short": lambda: resized(X.nbytes - 4),
    "fake": lambda: FakeTensorMode().from_tensor(X),
    "masked": lambda: masked_tensor(X, X > 0),
    "meta": lambda: X.to("meta"),
}
NOT_DENSE = {
    "sparse": lambda: X.to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([X[:2], X[:3]]),
    "jagged": lambda: torch.nested.nested_tensor([X[:2], X[:3]], layout=torch.jagged),
}


class Stages(NamedTuple):
    net: nn.Module
    captured: stages.Captured
    ranges: stages.Ranges
    reference: stages.Reference
    lowered: stages.Lowered

    def prepared(self) -> stages.Prepared:
        return stages.prepare(self.captured)


@pytest.fixture(scope="module")
def made() -> Stages:
    net = randomize(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)))
    captured = stages.capture(net, X)
    prepared = stages.prepare(captured)
    ranges = stages.calibrate(prepared, [X])
    reference = stages.convert(prepared, ranges)
    return Stages(net, captured, ranges, reference, stages.requantize(reference))


DENSE_ONLY = {
    "capture": lambda made, x: stages.capture(made.net, x),
    "captured": lambda made, x: made.captured(x),
    "prepared": lambda made, x: made.prepared()(x),
    "trained": lambda made, x: stages.prepare(stages.capture(made.net, X, train=True), qat=True)(x),
    "reference": lambda made, x: made.reference(x),
    "reference as a module": lambda made, x: made.reference.as_module()(x),
    "lowered": lambda made, x: made.lowered(x),
    "quantize, second batch": lambda made, x: intaglio.quantize(made.net, [X, x], progress=False),
    "quantize, iterator": lambda made, x: intaglio.quantize(made.net, iter([X, x]), progress=False),
    "calibrate": lambda made, x: stages.calibrate(made.prepared(), [X, x]),
    "calibrate with a function": lambda made, x: stages.calibrate(made.prepared(), lambda model: model(x)),
    "equalize": lambda made, x: stages.equalize(made.prepared(), [x]),
    "correct": lambda made, x: stages.correct(made.prepared(), made.ranges, [x]),
    "compare": lambda made, x: intaglio.compare(made.net, made.reference, [x]),
    "data set": lambda made, x: DatasetManager(x),
    "data set of columns": lambda made, x: DatasetManager({"input": x}),
    "image": lambda made, x: intaglio.Image(0.5, 0.5).normalize(x),
}
"""Calls that take dense tensors only."""


@pytest.mark.parametrize("kind", [*UNREADABLE, *NOT_DENSE])
@pytest.mark.parametrize("way", DENSE_ONLY)
def test_stages_refuse_tensors_that_are_not_dense_memory(made, way, kind):
    given = {**UNREADABLE, **NOT_DENSE}[kind]()
    with pytest.raises(IntaglioError):
        DENSE_ONLY[way](made, given)


@pytest.mark.parametrize("kind", UNREADABLE)
def test_quantize_refuses_a_first_batch_without_memory(made, kind):
    with pytest.raises(IntaglioError, match=r"memory|meta"):
        intaglio.quantize(made.net, [UNREADABLE[kind]()], progress=False)


@pytest.mark.parametrize("kind", ["nested", "jagged"])
def test_quantize_says_that_no_part_takes_nested_tensors(made, kind):
    with pytest.raises(IntaglioError, match="it is a nested tensor"):
        intaglio.quantize(made.net, [NOT_DENSE[kind]()], progress=False)


def test_quantize_leaves_a_layer_that_reads_a_sparse_tensor_in_float(made):
    found = intaglio.quantize(made.net, [X.to_sparse()], progress=False)
    assert "its layout is torch.sparse_coo" in str(found.coverage)


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("converted", [False, True])
def test_eager_models_refuse_tensors_without_memory(made, kind, converted):
    with pytest.raises(IntaglioError, match=r"memory|meta"):
        eager.prepare(made.net, UNREADABLE[kind]())
    model = eager.prepare(made.net, X)
    model(X)
    model = eager.convert(model) if converted else model
    with pytest.raises(IntaglioError, match=r"memory|meta"):
        model(UNREADABLE[kind]())


@pytest.mark.parametrize("kind", NOT_DENSE)
@pytest.mark.parametrize("converted", [False, True])
def test_eager_models_run_other_layouts_in_float(made, kind, converted):
    model = eager.prepare(made.net, X)
    model(X)
    model = eager.convert(model) if converted else model
    given, exact = NOT_DENSE[kind](), made.net(NOT_DENSE[kind]())
    result = model(given)
    if kind == "sparse":  # the first layer runs in float, and the others read a dense tensor
        assert sqnr(result, exact) > 30
    else:
        assert all(torch.equal(a, b) for a, b in zip(result.unbind(), exact.unbind(), strict=True))


def test_negated_views_have_the_values_that_they_show(made):
    negated, plain = torch._neg_view(X), -X
    assert torch.equal(made.reference(negated), made.reference(plain))
    assert torch.equal(made.lowered(negated), made.lowered(plain))
    found, expected = (stages.calibrate(made.prepared(), [x]) for x in (negated, plain))
    assert found.to_json() == expected.to_json()


class Conjugate(nn.Module):
    """An island that returns a negated view, which the program behind it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.fft.rfft(x).conj().imag)


def test_negated_results_of_islands_are_read_as_they_are_shown():
    model = randomize(Conjugate())
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))
    quantized = intaglio.quantize(model, [x], progress=False)
    assert sqnr(quantized(x), model(x)) > 30
