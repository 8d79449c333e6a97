"""Arguments, results and states of any structure, at every stage."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

import intaglio
from intaglio import eager, stages
from intaglio.errors import CaptureError
from support.nets import Body, randomize
from support.slow_params import slow_params_except


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclasses.dataclass
class Known:
    first: Tensor
    second: Tensor


@dataclasses.dataclass
class Unknown:
    first: Tensor
    second: Tensor


torch.export.register_dataclass(Known, serialized_type_name="test_call_structures.Known")


class Keywords(nn.Module):
    """Takes keyword arguments only; ``y`` is optional."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = layers(), layers()

    def forward(self, *, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.f(x) if y is None else self.f(x) + self.g(y)


class TakesTwo(nn.Module):
    """Takes two arguments by name or position."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = layers(), layers()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        first, second = self.f(x), self.g(y)
        return {"sum": first + second, "both": (first, second)}


class Counts(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.f = layers()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.f(x)


class Holds(nn.Module):
    """Holds an activation that a function behind it reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.held = layers(), None

    def forward(self, x: Tensor) -> Tensor:
        self.held = self.f(x)
        return self.held.relu()


class TakesOne(nn.Module):
    """Has one argument, from whose two tensors it computes."""

    def __init__(self, tensors: Callable[[Any], tuple[Tensor, Tensor]], result: Callable[..., Any]) -> None:
        super().__init__()
        self.f, self.g, self.tensors, self.result = layers(), layers(), tensors, result

    def forward(self, batch: Any) -> Any:
        first, second = self.tensors(batch)
        return self.result(self.f(first), self.g(second))


class Sequences(nn.Module):
    """A recurrent layer between linear layers, with packed sequences in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.recurrent = nn.Linear(8, 8), nn.LSTM(8, 6, batch_first=True)
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.first(x), lengths, batch_first=True, enforce_sorted=False)
        return self.last(pad_packed_sequence(self.recurrent(packed)[0], batch_first=True, total_length=5)[0])


class TakesPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.last = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: PackedSequence) -> Tensor:
        return self.last(self.recurrent(x)[1][0][-1])


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def rows(count: int) -> Tensor:
    return 2 * torch.rand(count, 8) - 1


def sequences(count: int) -> tuple[Tensor, Tensor]:
    return 2 * torch.rand(count, 5, 8) - 1, torch.randint(1, 6, (count,))


def packed(count: int) -> tuple[PackedSequence]:
    return (pack_padded_sequence(*sequences(count), batch_first=True, enforce_sorted=False),)


def attributes(batch: Any) -> tuple[Tensor, Tensor]:
    return batch.first, batch.second


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "dictionary of arguments": (
        TakesTwo,
        lambda n: {"y": rows(n), "x": rows(n)},
    ),
    "nested dictionary": (
        lambda: TakesOne(lambda batch: (batch["a"], batch["b"][0]), lambda x, y: [x, {"y": y}]),
        lambda n: ({"a": rows(n), "b": [rows(n), rows(n)]},),
    ),
    "list": (lambda: TakesOne(tuple, Pair), lambda n: ([rows(n), rows(n)],)),
    "keyword arguments": (Keywords, lambda n: {"x": rows(n), "y": rows(n)}),
    "keyword argument left out": (Keywords, lambda n: {"x": rows(n)}),
    "known dataclass": (lambda: TakesOne(attributes, Known), lambda n: (Known(rows(n), rows(n)),)),
    "unknown dataclass": (lambda: TakesOne(attributes, Unknown), lambda n: (Unknown(rows(n), rows(n)),)),
    "updated buffer": (Counts, lambda n: (rows(n),)),
    "held activation": (Holds, lambda n: (rows(n),)),
    "packed sequence inside": (Sequences, sequences),
    "packed sequence as argument": (TakesPacked, packed),
    "sequence of one step": (
        lambda: Body(lambda m, x: m.r(m.f(x))[0], f=layers(), r=nn.GRU(4, 4, batch_first=True)),
        lambda n: (rows(n)[:, None],),
    ),
}
IN_PARTS = {"unknown dataclass", "packed sequence inside", "packed sequence as argument"}
"""Cases that torch.export does not take. `quantize` quantizes parts of them."""
NOT_TRAINED = {
    "updated buffer": "in training only the buffers of batch norms may change",
    "sequence of one step": "a recurrent layer cannot be trained",
}
"""Cases that quantization-aware training refuses, with the reasons."""
NOT_DEFINED_BY_RUN = {"packed sequence inside", "packed sequence as argument"}
LIKE_OTHERS = ("dictionary of arguments", "list", "keyword argument left out", "known dataclass")
"""Cases whose calls are bound as those of other cases are."""


def names(without: Collection[str] = (), always: Collection[str] = CASES) -> list[Any]:
    """Return the names of cases as parameters, without some; those that are not in `always` are slow."""
    return slow_params_except(
        *(name for name in CASES if name in always and name not in (*LIKE_OTHERS, *without)),
        of=[name for name in CASES if name not in without],
        reason="its call is bound like those of other cases, and it is called in other tests",
    )


def model_and_data(name: str) -> tuple[nn.Module, list[Any], Any]:
    """A model, batches of 64 samples and one of a single sample, and a batch of another size."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make, batch = CASES[name]
        model = randomize(make()).eval()
        return model, [*(batch(64) for _ in range(4)), batch(1)], batch(3)


def call(model: Any, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def captured(model: nn.Module, batch: Any, **options: Any) -> stages.Captured:
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    return stages.capture(model, args, example_kwargs=kwargs, **options)


def tensors(value: Any) -> list[Tensor]:
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return pytree.tree_leaves(value)


def check_same(found: Any, exact: Any, tolerance: float = 0.1) -> None:
    """Check structure and classes of results, and that values are near those of the float model."""
    assert type(found) is type(exact)
    if not dataclasses.is_dataclass(exact):
        assert pytree.tree_structure(found) == pytree.tree_structure(exact)
    for one, other in zip(tensors(found), tensors(exact), strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@functools.cache
def quantized(name: str) -> Any:
    model, data, _ = model_and_data(name)
    return intaglio.quantize(model, data, recipe="int8_dynamic" if "step" in name else None, progress=False)


@pytest.mark.parametrize(
    "name", names(always=("unknown dataclass", "packed sequence as argument", "keyword arguments"))
)
def test_quantize_keeps_the_call(name):
    model, data, other = model_and_data(name)
    int8 = quantized(name)
    assert (type(int8).__name__ == "PartlyQuantizedModel") == (name in IN_PARTS)
    for batch in (data[0], data[-1], other):
        check_same(call(int8, batch), call(model, batch))


@pytest.mark.parametrize("name", names(IN_PARTS, always=("keyword arguments",)))
def test_compare_takes_the_batches_of_quantize(name):
    model, data, _ = model_and_data(name)
    comparison = intaglio.compare(model, quantized(name), data)
    assert min(comparison.results) > 15


@pytest.mark.parametrize("name", names(IN_PARTS))
def test_stages_take_the_batches_of_quantize(name):
    model, data, other = model_and_data(name)
    prepared = stages.equalize(stages.prepare(captured(model, data[0])), data)
    ranges = stages.calibrate(prepared, data, progress=False)
    reference = stages.convert(prepared, ranges, stages.correct(prepared, ranges, data))
    for batch in (data[-1], other):
        check_same(call(reference, batch), call(model, batch))


@pytest.mark.parametrize("name", sorted(IN_PARTS))
def test_capture_refuses_what_torch_export_does_not_take(name):
    model, data, _ = model_and_data(name)
    with pytest.raises(CaptureError) as error:
        captured(model, data[0])
    assert error.value.remedy


@pytest.mark.parametrize("name", names(IN_PARTS, always=("keyword arguments", *NOT_TRAINED)))
def test_training_takes_the_batches_of_quantize(name):
    model, data, other = model_and_data(name)
    training = captured(model.train(), data[0], train=True)
    if name in NOT_TRAINED:
        with pytest.raises(intaglio.errors.UnsupportedError, match=NOT_TRAINED[name]):
            stages.prepare(training, qat=True)
        return
    prepared = stages.prepare(training, qat=True)
    for batch in data:
        sum(tensor.sum() for tensor in tensors(call(prepared, batch))).backward()
    assert any(parameter.grad is not None for parameter in prepared.parameters())
    check_same(call(stages.convert(prepared.eval()), other), call(model.eval(), other))


@pytest.mark.parametrize("name", names(NOT_DEFINED_BY_RUN, always=("keyword arguments",)))
def test_define_by_run_models_take_the_batches_of_quantize(name):
    model, data, other = model_and_data(name)
    args, kwargs = ((), data[0]) if isinstance(data[0], dict) else (data[0], {})
    prepared = eager.prepare(model, args, example_kwargs=kwargs)
    for batch in data:
        call(prepared, batch)
    int8 = eager.convert(prepared)
    for batch in (data[-1], other):
        check_same(call(int8, batch), call(model, batch))


@pytest.mark.slow(reason="a search; its trials are quantized and called with keyword arguments above")
def test_search_takes_keyword_arguments():
    model, data, other = model_and_data("keyword arguments")

    def metric(candidate: Any) -> float:
        return -float((call(candidate, other) - call(model, other)).abs().max())

    found = intaglio.search(model, data, metric, max_drop=1.0, relative=False, progress=False)
    check_same(call(found.model, other), call(model, other))


def test_nested_tensors_inside_of_a_model_are_refused_with_a_remedy():
    def body(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return torch.nested.to_padded_tensor(m.f(torch.nested.nested_tensor([x, y], layout=torch.jagged)), 0.0)

    with pytest.raises(CaptureError, match="cannot trace the model") as error:
        intaglio.quantize(Body(body, f=layers()).eval(), [(rows(4), rows(3))], progress=False)
    assert "quantize the submodules" in error.value.remedy
