"""Define-by-run on models written in any Python: scalars, structures, containers, modules made in forward."""

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intaglio import eager
from support import nets
from support.eager_models import assert_like, assert_near, converted_on, integers, near, same, warnings_of
from support.nets import Body
from support.slow_params import slow_params, slow_params_except


def pictures(count: int = 4, batch: int = 4, channels: int = 3, size: int = 8, seed: int = 1) -> list[tuple[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.rand(batch, channels, size, size, generator=draw) * 2 - 1,) for _ in range(count)]


def rows(count: int = 3, *shape: int, seed: int = 1) -> list[tuple[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.rand(*(shape or (128, 8)), generator=draw) * 2 - 1,) for _ in range(count)]


def conv(inputs: int = 3, outputs: int = 4) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def check(model: nn.Module, calls: list[Any], others: list[Any], caplog: Any = None, **options: Any) -> nn.Module:
    """Prepared, fed, converted; near the float model on all of it, without a warning."""
    nets.randomize(model)
    converted = converted_on(model, calls, **options)
    assert_near(converted, model, [*calls, *others])
    if caplog is not None:
        assert not warnings_of(caplog)
    return converted


def quantized(converted: nn.Module, name: str) -> int:
    """How many operators of this name the references have."""
    return sum(f"aten.{name}." in entry for entry in integers(converted))


# -- B1: concatenation and integers ---------------------------------------------------------------------------------


@pytest.mark.case("frontends B1")
@pytest.mark.parametrize("container", [list, tuple])
def test_a_concatenation_may_have_float_and_int8_operands(container, caplog):
    """B1: list and tuple."""

    def body(m, x):
        return m.d(torch.cat(container([m.c(x), x, torch.special.expit(m.c(x))]), 1))

    check(Body(body, c=conv(), d=conv(11)), pictures(), pictures(batch=5, seed=2), caplog)


@pytest.mark.slow(reason="records operators that stay as they are")
@pytest.mark.case("frontends B1")
def test_integers_pass_add_mul_and_cat_untouched(caplog):
    """B1: int32 and int64, types kept."""

    def body(m, x, i, j):
        counted = torch.cat([i + i, i * 3], 0)
        return m.f(x), counted, (j + 1) * j, torch.cat((j, i.long())), j.add_(2)

    calls = [(x, torch.arange(6, dtype=torch.int32) - 2, torch.arange(5)) for (x,) in rows()]
    check(Body(body, f=nn.Linear(8, 4)), calls, [(x, i + 7, j * 3) for x, i, j in calls], caplog)


# -- B2: scalars ----------------------------------------------------------------------------------------------------


@pytest.mark.case("frontends B2")
def test_scalars_can_be_either_operand_out_of_place_and_in_place(caplog):
    """B2: adds and products with numbers, out of place and in place."""

    def body(m, x):
        y = 2 * (m.c(x) + 1)
        y = torch.add(y, 0.5, alpha=2) * 0.25
        y += 1
        y *= 2
        return m.d(3 - y)

    check(Body(body, c=conv(), d=conv(4)), pictures(), pictures(batch=1, seed=2), caplog)


# -- B3: functional operators ---------------------------------------------------------------------------------------


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


FUNCTIONAL = {
    "conv1d": (lambda m, x: F.conv1d(x, m.w, m.b), (4, 3, 3), (2, 3, 9)),
    "conv2d": (lambda m, x: F.conv2d(x, m.w, m.b, 1, 1, 1, 1), (4, 3, 3, 3), (2, 3, 8, 8)),
    "keywords": (lambda m, x: F.conv2d(input=x, weight=m.w, bias=m.b, stride=(2, 2)), (4, 3, 3, 3), (2, 3, 8, 8)),
    "no bias": (lambda m, x: torch.conv2d(x, m.w, padding="same"), (4, 3, 3, 3), (2, 3, 8, 8)),
    "conv3d": (lambda m, x: F.conv3d(x, m.w, m.b, padding=1), (4, 3, 3, 3, 3), (2, 3, 4, 4, 4)),
    "linear": (lambda m, x: F.linear(x, m.w), (4, 8), (32, 8)),
    "linear keywords": (lambda m, x: F.linear(x, bias=m.b, weight=m.w), (4, 8), (32, 8)),
}


@pytest.mark.case("frontends B3")
@pytest.mark.parametrize(
    "case",
    slow_params_except("keywords", "linear keywords", of=FUNCTIONAL, reason="the same functions called otherwise"),
)
def test_functional_operators_with_parameters_are_quantized(case, caplog):
    """B3: positional and keyword arguments, defaults left out, with and without bias; weights per channel."""
    body, kernel, shape = FUNCTIONAL[case]
    model = Body(lambda m, x: F.relu(body(m, x)), w=weight(*kernel), b=weight(4))
    converted = check(model, rows(3, *shape), rows(2, 5, *shape[1:], seed=2), caplog)
    assert case == "conv3d" or any("quantize_per_channel" in name for name in integers(converted))


@pytest.mark.case("frontends B3")
def test_a_weight_computed_in_forward_stays_float(caplog):
    """B3: no crash; neighbours int8."""

    def body(m, x):
        y = m.f(x)
        return m.g(F.linear(y, m.w * y.abs().mean(), m.b))

    model = Body(body, f=nn.Linear(8, 8), g=nn.Linear(8, 8), w=weight(8, 8), b=weight(8))
    check(model, rows(), rows(2, 6, 8, seed=2), caplog)


# -- B4: operators between ------------------------------------------------------------------------------------------

BETWEEN = {
    "in place module": lambda m, y: m.silu(y),
    "std": lambda m, y: y * y.std() + y.std((2, 3), keepdim=True),
    "methods": lambda m, y: y.tanh().clamp(-0.5, 0.5).sub_(0.1),
    "in a list": lambda m, y: torch.stack([y, y.flip(1)]).mean(0),
    "einsum": lambda m, y: torch.einsum("nchw,ncij->nchw", y, y),
    "keywords": lambda m, y: torch.where(condition=y > 0, input=y, other=-y),
    "in place": lambda m, y: y.mul_(2).cumsum(1).tanh_(),
    "index": lambda m, y: y[:, [3, 1, 2, 0]] + y[..., :1],
    "set item": lambda m, y: zeroed(y),
    "interpolate": lambda m, y: F.interpolate(y, scale_factor=2, mode="bilinear"),
    "split": lambda m, y: torch.cat(y.chunk(2, 1)[::-1], 1) * torch.cat(y.split([1, 3], dim=1), 1),
    "max": lambda m, y: y - y.max(1, keepdim=True).values + y.sort(1)[0],
    "unbind": lambda m, y: torch.stack([a * b for a, b in zip(y.unbind(1), y, strict=False)], 1).mean(1, True) + y,
}


def zeroed(y: Tensor) -> Tensor:
    y[:, 0] = 0
    y[:, 1:2] *= 2
    return y


@pytest.mark.slow(reason="operators that stay float; one is between layers in other tests here")
@pytest.mark.case("frontends B4")
@pytest.mark.parametrize(
    ("batch", "names"),
    [
        (4, ("unbind",)),
        *slow_params(
            (5, ("in place module", "in a list", "keywords", "in place", "set item", "split")),
            (5, tuple(name for name in BETWEEN if name != "unbind")),
            reason="other operators that stay float",
        ),
    ],
    ids=["4", "5", "all"],
)
def test_float_operators_between_quantized_ones_match_the_reference(batch, names, caplog):
    """In place and not; tensors in lists and keywords. What iterates over the batch has a model with a fixed one."""

    def forward(m: nn.Module, x: Tensor) -> dict[str, Tensor]:
        return {
            name: last(BETWEEN[name](m, first(x))) for name, first, last in zip(names, m.first, m.last, strict=True)
        }

    first, last = (nn.ModuleList(layer() for _ in names) for layer in (conv, lambda: conv(4)))
    model = Body(forward, first=first, last=last, silu=nn.SiLU(inplace=True))
    check(model, pictures(batch=4 if batch == 4 else 32), pictures(batch=batch, seed=2), caplog)


# -- B5: outputs ----------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Result:
    logits: Tensor
    state: Any = None


class Output(OrderedDict):
    """As transformers' `ModelOutput`: a dict whose entries are attributes too."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


@dataclasses.dataclass
class Named(Output):
    logits: Tensor = None
    hidden: Tensor = None


OUTPUTS = {
    "tuple": lambda y, z: (y, z),
    "list": lambda y, z: [y, z, 3],
    "dict": lambda y, z: {"y": y, "z": {"inner": (z, None)}, "name": "x"},
    "namedtuple": lambda y, z: Pair(y, Pair(z, y)),
    "nothing": lambda y, z: None,
    "nested": lambda y, z: ([y, (z, None)], {"a": [{"b": y.argmax(1)}]}),
    "same twice": lambda y, z: (y, y, z, y.view(-1)),
    "integers": lambda y, z: (y.argmax(1), z.shape[0], torch.arange(3), z > 0),
    "several": lambda y, z: {
        "nested": ([y, (z, None)], {"a": [{"b": y.argmax(1)}]}),
        "named": Pair(y, Pair(z, y)),
        "same twice": (y, y, z, y.view(-1)),
    },
}


@pytest.mark.case("frontends B5")
@pytest.mark.parametrize(
    "case",
    slow_params_except("several", "nothing", of=OUTPUTS, reason="one of the results holds all of these"),
)
def test_results_may_have_any_structure(case, caplog):
    """B5: integers and what is no tensor come out as they are."""
    make = OUTPUTS[case]
    model = Body(lambda m, x: make(m.f(x), torch.relu(m.g(x))), f=nn.Linear(8, 4), g=nn.Linear(8, 4))
    with torch.no_grad():
        nets.randomize(model).f.bias.copy_(torch.tensor([0.0, 9.0, -9.0, 0.0]))
    converted = converted_on(model, rows())
    compare = near if case != "integers" else lambda mine, its: None
    for call in rows(3, 6, 8, seed=2):
        assert_like(converted, model, call, compare)
    assert not warnings_of(caplog)


@pytest.mark.case("frontends B5")
@pytest.mark.parametrize("kind", [*slow_params(Result, reason="a class with names is opened in the same way"), Named])
def test_results_of_classes_that_pytorch_does_not_know(kind, caplog):
    """B5: a dataclass; a dict that is one, as transformers has it."""
    parts = {"f": nn.Linear(8, 8), "g": nn.Linear(8, 4)}
    model = nets.randomize(Body(lambda m, x: kind(m.g(torch.relu(m.f(x))), m.f(x)), **parts))
    prepared = eager.prepare(model, rows()[0])
    for running, compare in ((prepared, same), (eager.convert(fed(prepared, rows())), near)):
        (x,) = rows(1, 7, 8, seed=2)[0]
        with torch.no_grad():
            found, expected = running(x), model(x)
        assert type(found) is kind
        for field in dataclasses.fields(kind):
            mine, its = getattr(found, field.name), getattr(expected, field.name)
            assert type(mine) is Tensor
            compare(mine, its)
        if kind is Named:
            assert all(type(entry) is Tensor and entry is getattr(found, key) for key, entry in found.items())
    assert not warnings_of(caplog)


def fed(prepared: nn.Module, calls: list[Any]) -> nn.Module:
    for call in calls:
        prepared(*call)
    return prepared


class Child(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.f, self.make = nn.Linear(8, 8), make

    def forward(self, x: Tensor) -> Any:
        return self.make(torch.relu(self.f(x)))


CHILDREN = {
    "namedtuple": (lambda y: Pair(y, y * 2), lambda r: r.left + r.right),
    "dataclass": (lambda y: Result(y), lambda r: r.logits),
    "dict": (lambda y: {"a": y}, lambda r: r["a"]),
    "nothing": (lambda y: None, lambda r: 0),
}


@pytest.mark.case("frontends B5")
@pytest.mark.parametrize(
    "case",
    slow_params_except("nothing", of=CHILDREN, reason="a child's structure is taken apart as the model's"),
)
def test_submodules_may_return_any_structure(case, caplog):
    """B5: what a child returns, its parent takes apart."""
    make, take = CHILDREN[case]
    model = Body(lambda m, x: m.g(x + take(m.child(x))), child=Child(make), g=nn.Linear(8, 4))
    check(model, rows(), rows(2, 7, 8, seed=2), caplog)


# -- B6: containers -------------------------------------------------------------------------------------------------


class Iterating(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for child in self:
            found.append(child(found[-1]))
        assert len(found) == len(self) + 1
        return torch.cat(found, 1)


class Items(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for name, child in self.items():
            seen.append(name)
            x = child(x)
        assert seen == ["one", "two"] == list(self.keys())
        return x


CONTAINERS = {
    "sequential subclass": lambda: Iterating(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)),
    "module dict subclass": lambda: Items({"one": nn.Linear(8, 8), "two": nn.Linear(8, 4)}),
    "sequential": lambda: nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4))),
}


@pytest.mark.case("frontends B6")
@pytest.mark.parametrize("wrapped", [True, *slow_params(False, reason="a container at the top is one inside, too")])
@pytest.mark.parametrize(
    "case", slow_params_except("sequential", of=CONTAINERS, reason="a subclass iterates as the others here")
)
def test_containers_with_their_own_iteration_are_supported(case, wrapped, caplog):
    """B6: at the top and inside; iterating sees the user's children only."""
    model = CONTAINERS[case]()
    whole = Body(lambda m, x: m.c(x) * 1.5, c=model) if wrapped else model
    converted = check(whole, rows(), rows(2, 7, 8, seed=2), caplog)
    assert quantized(converted, "linear") == 2
    own = converted.c if wrapped else converted
    assert [name for name, _ in own.named_children()] == [name for name, _ in model.named_children()]
    assert converted.state_dict().keys() >= whole.state_dict().keys()


@pytest.mark.slow(reason="containers are called in the same way above")
@pytest.mark.case("frontends B6")
def test_a_module_list_in_a_loop(caplog):
    """B6: the list itself is never called; a layer called on its own is int8 too."""

    def body(m, x):
        for layer in m.layers:
            x = torch.relu(layer(x))
        return m.layers[0](x) + len(m.layers)

    model = Body(body, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(3)))
    converted = check(model, rows(), rows(2, 7, 8, seed=2), caplog)
    assert quantized(converted, "linear") == 4
    with torch.no_grad():
        near(converted.layers[0](rows()[0][0]), model.layers[0](rows()[0][0]))


# -- B7: leaf classes -----------------------------------------------------------------------------------------------


class Shielded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), Child(lambda y: y + 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


@pytest.mark.slow(reason="calibrates for one option; test_nothing_silent.py has leaf classes")
@pytest.mark.case("frontends B7")
def test_classes_that_the_user_names_stay_float_with_all_in_them(caplog):
    """B7: neighbours are int8, and know their names."""
    model = Body(lambda m, x: m.g(m.s(m.f(x))), f=nn.Linear(8, 8), s=Shielded(), g=nn.Linear(8, 4))
    converted = check(model, rows(), rows(2, 7, 8, seed=2), caplog, leaf_classes=(Shielded,))
    assert quantized(converted, "linear") == 2
    segments = eager.session_of(converted).segments
    sites = {site for segment in segments if segment.reference for site in segment.reference.qparams}
    assert {site[:2] for site in sites} >= {"f#", "g#"}
    assert not any(site.startswith("s") for site in sites)
    assert not hasattr(converted.s.inner, "_auto_quant_state")


# -- B8: what is not to be quantized --------------------------------------------------------------------------------


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3


class Quiet(nn.BatchNorm2d):
    pass


@pytest.mark.slow(reason="five layers; subclasses of containers are tested above")
@pytest.mark.case("frontends B8")
def test_subclasses_of_pytorch_modules_are_supported(caplog):
    """B8: one with a forward of its own stays float; one without is what it inherits."""
    parts = {"c": conv(), "q": Quiet(4), "s": Scaled(256, 8), "g": nn.Linear(8, 4)}
    model = Body(lambda m, x: m.g(m.s(m.q(m.c(x)).flatten(1))), **parts)
    converted = check(model, pictures(), pictures(batch=5, seed=2), caplog)
    assert (quantized(converted, "linear"), quantized(converted, "conv2d")) == (1, 1)


@pytest.mark.slow(reason="a module that forward creates, which is called like its function")
@pytest.mark.case("frontends B8")
def test_a_module_created_in_forward_is_supported(caplog):
    """B8: its operators are its caller's."""
    model = Body(lambda m, x: m.g(nn.Softmax(dim=1)(m.f(x))), f=nn.Linear(8, 8), g=nn.Linear(8, 4))
    check(model, rows(), rows(2, 7, 8, seed=2), caplog)


@pytest.mark.slow(reason="captures an LSTM; the work of one is counted in test_nothing_silent.py")
@pytest.mark.case("frontends B8")
def test_an_embedding_and_an_lstm_run_beside_a_linear_layer(caplog):
    """B8: integers as inputs; tuples as outputs."""

    def body(m, ids):
        y, (h, c) = m.rnn(m.e(ids))
        return m.f(y), h, m.f(c)

    model = Body(body, e=nn.Embedding(20, 8), rnn=nn.LSTM(8, 8, batch_first=True), f=nn.Linear(8, 4))
    draw = torch.Generator().manual_seed(1)
    calls = [(torch.randint(0, 20, (2, 5), generator=draw),) for _ in range(3)]
    check(model, calls, [(torch.randint(0, 20, (4, 5), generator=draw),)], caplog)


@pytest.mark.case("frontends B10")
def test_torchscript_inside_stays_float(caplog):
    """B10: a scripted and a traced submodule."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    traced = torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.Tanh()).eval(), torch.randn(2, 8))
    model = Body(lambda m, x: m.g(m.t(m.s(m.f(x)))), f=nn.Linear(8, 8), s=scripted, t=traced, g=nn.Linear(8, 4))
    converted = check(model, rows(), rows(2, 7, 8, seed=2), caplog)
    assert quantized(converted, "linear") == 2


# -- A7, A11, A13 ---------------------------------------------------------------------------------------------------


@pytest.mark.slow(reason="two calibrations; scales made per call are those of exported models")
@pytest.mark.case("frontends A11")
def test_dynamic_linear_layers_do_not_depend_on_calibration():
    """A11: every row has its own scale."""
    model = nets.randomize(Body(lambda m, x: m.f(x) + m.g(x), f=nn.Linear(8, 8), g=nn.Linear(8, 8)))
    (x,) = rows(1, 7, 8, seed=2)[0]
    small, large = (converted_on(model, [(y * k,) for (y,) in rows()], "int8_dynamic") for k in (1e-3, 1e3))
    assert torch.equal(small(x), large(x))
    near(small(x), model(x).detach())
    assert torch.equal(small(x)[:1], small(x[:1]))


@pytest.mark.case("frontends A13")
def test_a_module_called_twice_has_parameters_for_each_call(caplog):
    """A13: of very different ranges; the weight is there once."""
    model = Body(lambda m, x: m.c(m.c(x) * 100) / 100, c=conv(3, 3))
    converted = check(model, pictures(), pictures(batch=4, seed=2), caplog)
    (segment,) = eager.session_of(converted).segments
    scales = {site: q.scale for site, q in segment.reference.qparams.items() if site.startswith("c")}
    assert any("c@1" in site or "c#1" in site for site in scales), scales


@pytest.mark.slow(reason="four sizes of images; every model here runs on another batch")
@pytest.mark.case("frontends A14")
def test_batches_of_other_sizes_match_the_reference(caplog):
    """A14, A20: batch 1 to record, any after."""
    model = Body(lambda m, x: m.g(m.d(torch.relu(m.c(x))).mean((2, 3))), c=conv(), d=conv(4), g=nn.Linear(4, 4))
    others = [*pictures(1, batch=7, seed=2), *pictures(1, batch=1, seed=3), *pictures(1, batch=2, size=10, seed=4)]
    check(model, [*pictures(batch=1), *pictures(1, size=12)], others, caplog)


# -- models of users ------------------------------------------------------------------------------------------------


@pytest.mark.slow(reason="another operator that divides a tensor")
def test_elements_of_unbound_rows_can_be_selected(caplog):
    """As a detection head reads its boxes: an element of a row that is itself taken from a tensor."""

    def body(m, x):
        a, b = m.f(x).view(-1, 2, 4).unbind(1)
        return m.g(torch.stack([a[:, 0], a[:, 1], b[:, 2], b[:, 3]], 1))

    check(Body(body, f=nn.Linear(8, 8), g=nn.Linear(4, 4)), rows(), rows(1, seed=2), caplog)


@pytest.mark.slow(reason="one constant of a recurrent cell; cells have tests in ops")
def test_a_recurrent_cell_may_read_a_constant_of_the_code(caplog):
    """What a quantized operator reads is a constant of the graph: the embedding of a number in the code."""

    def body(m, x):
        return m.g(m.c(m.e(torch.tensor([1])), x))

    model = Body(body, e=nn.Embedding(5, 8), c=nn.GRUCell(8, 8), g=nn.Linear(8, 4))
    check(model, rows(8, 1, 8), rows(1, 1, 8), caplog)


class CachedDecoder(nn.Module):
    """A decoder whose later calls attend to the keys and values of earlier ones."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(30, 16), nn.Linear(16, 30)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids, past=None):
        x = self.embed(ids)
        batch, length, _ = x.shape
        q, k, v = (part(x).view(batch, length, 2, 8).transpose(1, 2) for part in (self.query, self.key, self.value))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        return self.out(y.transpose(1, 2).reshape(batch, length, 16)), (k, v)


def decoded(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """Logits of the last token of a prompt, and of every token behind it, computed one by one with a cache."""
    (first, past), logits = model(ids[:, :5]), []
    for index in range(5, ids.shape[1]):
        logits.append(first[:, -1])
        first, past = model(ids[:, index : index + 1], past)
    return [*logits, first[:, -1]]


@pytest.mark.slow(reason="decodes step by step; a cache is updated like in the float model in test_inplace.py")
def test_decoders_with_a_cache_decode_after_conversion():
    torch.manual_seed(0)
    model, ids = CachedDecoder().eval(), torch.randint(0, 30, (4, 9))
    prepared = eager.prepare(model, ids)
    decoded(prepared, ids)
    decoded(prepared, ids.flip(0, 1))
    converted = eager.convert(prepared)
    near(torch.stack(decoded(converted, ids)), torch.stack(decoded(model, ids)))
