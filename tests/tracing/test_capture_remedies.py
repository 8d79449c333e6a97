"""Remedies of errors of `stages.capture` and of stages: each is provoked by a small model, then followed."""

import dataclasses
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.export import Dim

import intaglio
from intaglio import stages
from intaglio.errors import CaptureError, IntaglioError
from intaglio.tracing.loops import unroll_scans
from support import nets
from support.nets import Body

RENAME = "give the module, parameter or buffer another name"
NAMES = ('a"b', "a\\b", "a\nb", "a\rb", "a\0b", "a\udcffb")
"""Names that the code of a graph cannot contain."""
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def body(run, **modules: nn.Module) -> nn.Module:
    return nets.randomize(Body(run, l=nn.Linear(4, 4), **modules))


@functools.cache
def captured() -> stages.Captured:
    return stages.capture(nn.Linear(4, 4).eval(), X)


class Rows(nn.Module):
    """A buffer that every call changes, and another one that may share its memory."""

    def __init__(self, dtype: torch.dtype = torch.float32, share: bool = False, clone: bool = False) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.register_buffer("rows", torch.zeros(2, 4, dtype=dtype))
        if share:
            self.register_buffer("first", self.rows[:1].clone() if clone else self.rows[:1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.add_(1)
        return self.l(x) + self.rows.to(torch.float32)


class Copied(nn.Linear):
    """A layer that can be copied or not."""

    def __init__(self, allowed: bool) -> None:
        super().__init__(4, 4)
        self.allowed = allowed

    def __deepcopy__(self, memo):
        if not self.allowed:
            raise RuntimeError("there is only one of me")
        return Copied(True)


@dataclasses.dataclass
class Features:
    x: torch.Tensor


def registered() -> None:
    torch.export.register_dataclass(Features)
    stages.capture(body(lambda m, given: m.l(given.x)), (Features(X),))


def branch(m, x):
    return torch.cond(x.sum() > 0, lambda x: m.l(x), lambda x: x * 2, (x,))


def loop_in_loop(m, x):
    def inner(x):
        return torch.while_loop(lambda x: x.sum() < 10, lambda x: (x.abs() + 1,), (x,))[0]

    return torch.while_loop(lambda x: x.sum() < 100, lambda x: (m.l(inner(x)).abs() + 1,), (x,))[0]


def unrolled(m, x):
    for _ in range(2):
        x = m.l(x).abs() + 1
    return x


def scanned(m, x):
    def step(carry, row):
        found = torch.tanh(m.l(row) + carry)
        return found, found.clone()

    return scan(step, x[0], x, dim=0)[1]


def pickled(stage: object) -> object:
    return pickle.loads(pickle.dumps(stage))


def called(model: nn.Module) -> nn.Module:
    model(X)
    return model


def trainable() -> nn.Module:
    return stages.prepare(stages.capture(nn.Linear(4, 4), X, train=True), qat=True)


def trained(prepared: nn.Module) -> stages.Reference:
    prepared(X)
    return stages.convert(prepared)


def recipe_and_ranges(path):
    prepared = stages.prepare(captured())
    stages.calibrate(prepared, [X], progress=False).save(path / "ranges.json")
    intaglio.Recipe.of({"*": {"bits": 7}}).save(path / "recipe.toml")
    stages.convert(prepared, stages.Ranges.load(path / "ranges.json"))
    intaglio.Recipe.load(path / "recipe.toml")


MODELS = {
    "buffers that share memory": (
        lambda: stages.capture(Rows(share=True), X),
        "register_buffer(name, tensor.clone())",
        lambda: stages.capture(Rows(share=True, clone=True), X),
    ),
    "a buffer of bfloat16": (
        lambda: stages.capture(Rows(torch.bfloat16), X),
        "store it as float32 or as an integer type",
        lambda: [stages.capture(Rows(dtype), X) for dtype in (torch.float32, torch.int64)],
    ),
    "a branch of Python on values": (
        lambda: stages.capture(body(lambda m, x: m.l(x) if x.sum() > 0 else x), X),
        "quantize the submodules that do not depend on data one by one, or use intaglio.eager",
        lambda: stages.capture(body(lambda m, x: m.l(x) if x.sum() > 0 else x).l, X),
    ),
    "a branch of torch": (
        lambda: stages.capture(body(branch), X),
        "select with torch.where",
        lambda: stages.capture(body(lambda m, x: torch.where(x.sum() > 0, m.l(x), x * 2)), X),
    ),
    "a loop in a loop": (
        lambda: stages.capture(body(loop_in_loop), X),
        "write a Python loop with a fixed number of iterations",
        lambda: stages.capture(body(unrolled), X),
    ),
    "a class that PyTorch does not know": (
        lambda: stages.capture(body(lambda m, given: m.l(given.x)), (Features(X),)),
        "call torch.export.register_dataclass(YourClass) once before",
        registered,
    ),
    "dynamic shapes that do not fit": (
        lambda: stages.capture(nn.Linear(4, 4), X, dynamic_shapes={"input": {1: Dim("width")}}),
        "pass dynamic_shapes that fit the model",
        lambda: stages.capture(nn.Linear(4, 4), X, dynamic_shapes={"input": {0: Dim("batch")}}),
    ),
    "random numbers": (
        lambda: stages.capture(body(lambda m, x: m.l(x) + torch.rand(1)), X),
        "capture a part of the model that does not depend on data or on random numbers",
        lambda: stages.capture(body(lambda m, x: m.l(x) + torch.rand(1)).l, X),
    ),
    "arguments that do not fit": (
        lambda: stages.capture(body(lambda m, x, y: m.l(x) + y), X),
        "pass example_inputs as the tuple of arguments that forward takes",
        lambda: stages.capture(body(lambda m, x, y: m.l(x) + y), (X, X)),
    ),
    "a model that cannot be copied": (
        lambda: stages.capture(Copied(False), X),
        "make copy.deepcopy(model) work",
        lambda: stages.capture(Copied(True), X),
    ),
    "a function": (
        lambda: stages.capture(lambda x: x, X),
        "pass the float model, which is an nn.Module",
        lambda: stages.capture(nn.ReLU(), X),
    ),
    "a traced module": (
        lambda: stages.capture(torch.jit.trace(nn.Linear(4, 4), X), X),
        "quantize the nn.Module that it was made from",
        lambda: stages.capture(nn.Linear(4, 4), X),
    ),
    "weights that are not loaded": (
        lambda: stages.capture(nn.Linear(4, 4, device="meta"), X),
        "load the weights first",
        lambda: stages.capture(nn.Linear(4, 4, device="meta").to_empty(device="cpu"), X),
    ),
    "another stage": (
        lambda: stages.prepare(stages.prepare(captured())),
        "call capture(model, example_inputs), which returns one",
        lambda: stages.prepare(captured()),
    ),
    "a captured model as a float model": (
        lambda: stages.capture(captured(), X),
        "call prepare(captured)",
        lambda: stages.prepare(captured()),
    ),
    "a model that is prepared for training": (
        lambda: intaglio.quantize(trainable(), [X]),
        "call stages.convert(model), or quantize the float model it was made from",
        lambda: trained(trainable()),
    ),
    "a lazy layer": (
        lambda: intaglio.quantize(nn.Sequential(nn.LazyLinear(4)), [X]),
        "call the float model once with a batch",
        lambda: intaglio.quantize(called(nn.Sequential(nn.LazyLinear(4))), [X]),
    ),
    "a batch norm that averages over all batches": (
        lambda: stages.capture(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)), X, train=True),
        "set the attribute momentum of the batch norm to a number, such as 0.1",
        lambda: stages.capture(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.1)), X, train=True),
    ),
    "a prepared model as a float model": (
        lambda: stages.capture(stages.prepare(captured()), X),
        "call calibrate(prepared, data), then convert(prepared, ranges)",
        lambda: stages.convert(stages.prepare(captured()), stages.calibrate(stages.prepare(captured()), [X])),
    ),
    "an exported program": (
        lambda: stages.capture(torch.export.export(nn.Linear(4, 4), (X,)), X),
        "pass program.module()",
        lambda: stages.capture(torch.export.export(nn.Linear(4, 4), (X,)).module(), X),
    ),
    "strides of a tensor that is not row-major": (
        lambda: stages.capture(body(lambda m, x: m.l(x).t().as_strided((2, 2), (1, 2))), X),
        "call it on tensor.contiguous()",
        lambda: stages.capture(body(lambda m, x: m.l(x).t().contiguous().as_strided((2, 2), (1, 2))), X),
    ),
    "a stage with state as a module": (
        lambda: stages.capture(Rows(), X).as_module(),
        "call the stage itself",
        lambda: stages.capture(Rows(), X)(X),
    ),
}


LONG = ("a branch of torch", "a loop in a loop", "a buffer of bfloat16", "a stage with state as a module")
"""Cases in which torch compiles, or a model is quantized, which takes seconds."""


@pytest.mark.parametrize(
    ("wrong", "remedy", "right"),
    [
        pytest.param(
            *case,
            id=name,
            marks=[
                pytest.mark.slow(reason="torch compiles, or a model is quantized; other remedies are followed always")
            ]
            * (name in LONG),
        )
        for name, case in MODELS.items()
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_following_the_remedy_of_a_capture_error_removes_it(wrong, remedy, right):
    with pytest.raises(IntaglioError) as raised:
        wrong()
    assert remedy in raised.value.remedy
    right()


@pytest.mark.slow(reason="torch compiles scans; the limit and its error are tested with other scans")
def test_a_scan_of_fewer_steps_is_captured(monkeypatch):
    monkeypatch.setattr(unroll_scans, "MAX_UNROLLED_OPERATORS", 30)
    with pytest.raises(IntaglioError) as raised:
        stages.capture(body(scanned), torch.randn(20, 4))
    assert "scan over fewer steps per call" in raised.value.remedy
    stages.capture(body(scanned), torch.randn(2, 4))


def test_recipe_and_ranges_are_saved_instead_of_a_stage(tmp_path):
    with pytest.raises(IntaglioError) as raised:
        pickled(stages.prepare(captured()))
    assert raised.value.remedy.startswith("call recipe.save(path) and ranges.save(path)")
    recipe_and_ranges(tmp_path)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_that_graphs_cannot_contain_are_refused(name):
    model = nn.Sequential()
    model.add_module(name, nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=r"torch\.fx cannot write a graph with this name") as raised:
        stages.capture(model.eval(), X)
    assert (raised.value.where, raised.value.remedy) == (repr(name), RENAME)
    renamed = nn.Sequential()
    renamed.add_module("a'; \t*/ b", model[0])
    assert torch.equal(stages.capture(renamed.eval(), X)(X), model(X))


class Enlarged(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.c, self.factor = nn.Conv2d(3, 3, 1), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(self.c(x), scale_factor=self.factor)


def test_sizes_that_are_no_multiples_of_free_sizes_are_refused():
    x, free = torch.randn(2, 3, 8, 8), dict.fromkeys((0, 2, 3), Dim.AUTO)
    named = {0: Dim.AUTO, 2: Dim("rows"), 3: Dim("columns")}
    with pytest.raises(CaptureError, match=r"the dimension 1\.5.* is not supported") as raised:
        stages.capture(Enlarged(1.5).eval(), x, dynamic_shapes={"x": named})
    assert raised.value.remedy == (
        "leave the free size that it is computed from out of dynamic_shapes, so that the size of the example is fixed, "
        "or use whole scale factors"
    )
    fixed = stages.capture(Enlarged(1.5).eval(), x, dynamic_shapes={"x": {0: Dim.AUTO}})
    assert fixed(torch.randn(3, 3, 8, 8)).shape == (3, 3, 12, 12)
    whole = stages.capture(Enlarged(2.0).eval(), x, dynamic_shapes={"x": free})
    assert whole(torch.randn(3, 3, 9, 7)).shape == (3, 3, 18, 14)


class Trainer(nn.Module):
    """A network with a method that trains it, as the class YOLO of Ultralytics has."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)

    def train(self, data=None, **options):
        raise AssertionError("a training begins")


ENTRIES = {
    "quantize": lambda model: intaglio.quantize(model, [X], progress=False),
    "capture": lambda model: stages.capture(model, X),
    "eager": lambda model: intaglio.eager.prepare(model, X),
    "search": lambda model: intaglio.search(model, [X], evaluate=lambda m: 1.0),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_no_training_begins(name):
    with pytest.raises(CaptureError, match=r"train\(data=None, \*\*options\), does not set the mode") as raised:
        ENTRIES[name](Trainer())
    assert raised.value.remedy == "pass the network in it, such as model.network, and put the result in its place"


def test_the_quantized_network_takes_the_place_of_the_float_network():
    model, exact = Trainer(), Trainer()
    exact.network = model.network
    model.network = intaglio.quantize(model.network, [X], progress=False)
    assert (model(X) - exact(X)).abs().max() < 0.1


class OwnWeight(nn.Linear):
    def train(self, data):
        raise AssertionError("a training begins")


class Renamed(OwnWeight):
    train, fit = nn.Linear.train, OwnWeight.train


def test_a_layer_with_another_train_method_is_captured_under_another_name_of_it():
    with pytest.raises(CaptureError) as raised:
        stages.capture(OwnWeight(4, 4), X)
    assert raised.value.remedy == "give the method another name"
    stages.capture(Renamed(4, 4), X)


class CausalWithPadding(nn.Module):
    """Adds up earlier tokens if a mask hides some of them, and all tokens otherwise, as the text encoder of AIMv2."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, attention_mask):
        x = self.layer(x)
        if torch.compiler.is_exporting() or not attention_mask.all():
            return (x * attention_mask[..., None]).cumsum(1)
        return x.sum(1, keepdim=True).expand(-1, x.shape[1], -1)


def test_a_mask_of_ones_that_the_model_skips_is_named_as_the_cause():
    model, x = CausalWithPadding().eval(), torch.randn(3, 6, 4)
    ones = torch.ones(3, 6, dtype=torch.long)
    with pytest.raises(CaptureError, match="attention_mask that hides a position of every sample"):
        stages.capture(model, (x, ones))
    ones[:, -1] = 0
    graph = stages.capture(model, (x, ones))
    assert torch.equal(graph(x, ones), model(x, ones))


class Exported(nn.Module):
    """Computes something else while it is exported, beside an infinity that is the same."""

    def forward(self, x):
        added = 0.25 if torch.compiler.is_exporting() else 0.0
        return torch.cat([x + added, torch.full_like(x, -torch.inf)], 1)


def test_the_difference_does_not_count_equal_infinities():
    with pytest.raises(CaptureError, match=r"a result differs from that of the model by 0\.25"):
        stages.capture(Exported(), torch.randn(2, 3))
