"""What models write: their buffers, their inputs, values that are seen through views."""

import copy

import pytest
import torch
from torch import Tensor, nn

import intaglio
from intaglio import stages
from intaglio.errors import CaptureError
from support import nets
from support.lowering import quantized, sqnr
from support.nets import Body
from support.slow_params import slow_params, slow_params_except

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def conv(inputs: int = 3, outputs: int = 4) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


class Running(nn.Module):
    """Counts its calls and subtracts a running mean of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.c = conv()
        self.register_buffer("calls", torch.tensor(5))
        self.register_buffer("mean", torch.full((1, 4, 1, 1), 0.25))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        y = self.c(x)
        self.mean.mul_(0.5).add_(y.mean((0, 2, 3), keepdim=True) * 0.5)
        return y - self.mean, self.calls


class Cache(nn.Module):
    """Keeps the last rows it has seen, a new one in front, and returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.register_buffer("rows", torch.zeros(4, 6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.rows[1:] = self.rows[:-1].clone()
        self.rows[0] = self.a(x).mean(0)
        return self.rows


STATEFUL = {"a counter and a mean": (Running, X.shape), "a cache": (Cache, (3, 6))}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def twins(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    make, shape = STATEFUL[name]
    model = nets.randomize(make()).eval()
    return model, copy.deepcopy(model), torch.randn(shape)


@pytest.mark.parametrize("name", STATEFUL)
def test_buffers_a_model_changes_are_kept_from_call_to_call(name):
    model, twin, x = twins(name)
    captured = stages.capture(model, x)
    untouched = [torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True)]
    assert all(untouched)
    for step in range(3):
        torch.testing.assert_close(captured(x + step), twin(x + step))
    again = copy.deepcopy(captured)
    torch.testing.assert_close(again(x), model(x), msg="a copy starts as captured")


def test_results_that_are_state_are_not_overwritten_by_the_next_call():
    model, twin, x = twins("a cache")
    captured = stages.capture(model, x)
    first, wanted = captured(x), twin(x).clone()
    captured(x + 1)
    torch.testing.assert_close(first, wanted)
    first.zero_()
    twin(x + 1)
    torch.testing.assert_close(captured(x), twin(x), msg="nor does writing into a result reach the state")


@pytest.mark.parametrize(
    "name", slow_params_except("a counter and a mean", of=STATEFUL, reason="other buffers of the same file")
)
def test_int8_buffers_are_saved_and_loaded(name, tmp_path):
    model, twin, x = twins(name)
    _, lowered = quantized(model, x)
    made = stages.compile(lowered)
    path = tmp_path / "model.intaglio"
    made(x)
    made.save(path, example=(x,))
    made, loaded = stages.compile(lowered), intaglio.load(path)
    loaded.verify()
    for step in range(3):
        wanted = lowered(x + step / 10)
        torch.testing.assert_close(made(x + step / 10), wanted)  # the means are float parts
        torch.testing.assert_close(loaded(x + step / 10), wanted)
        exact, found = twin(x + step / 10), made.state0
        assert sqnr(*[t if isinstance(t, Tensor) else t[0] for t in (wanted, exact)]) > 20
        assert found.data_ptr() not in [t.data_ptr() for t in (wanted if isinstance(wanted, tuple) else (wanted,))]
    assert set(made.state_dict()) >= {f"state{index}" for index in range(len(list(model.buffers())))}
    made.profile(x, calls=2)


def test_calibration_changes_buffers_of_the_prepared_model_only():
    model, twin, x = twins("a counter and a mean")
    captured = stages.capture(model, x)
    prepared = stages.prepare(captured)
    reference = stages.convert(prepared, stages.calibrate(prepared, [x, x + 1]))
    assert prepared.state[0] == 7
    assert captured(x)[1] == reference(x)[1] == twin(x)[1] == 6


def test_state_of_an_element_type_without_numbers_is_refused():
    class Half(Running):
        def __init__(self) -> None:
            super().__init__()
            self.mean = self.mean.bfloat16()

    with pytest.raises(CaptureError, match=r"mean: the model changes this buffer .* torch\.bfloat16"):
        stages.capture(Half().eval(), X)


# ---- inputs and views


def crossed(m: nn.Module, x0: Tensor) -> tuple[Tensor, Tensor]:
    """A cross layer, Wang et al. 2017."""
    return x0 * m.w(x0) + x0, x0


@pytest.mark.case("backend 4")
def test_inputs_and_returned_inputs_have_the_same_bits_after_calls():
    """Case 4."""
    model, x = nets.randomize(Body(crossed, w=nn.Linear(6, 6))), torch.randn(5, 6)
    kept = x.clone()
    _, lowered = quantized(model, x)
    made = stages.compile(lowered)
    for stage in (stages.capture(model, x), lowered, made):
        found = stage(x)
        assert torch.equal(found[1], kept)
        stage(torch.zeros(5, 6))
        assert torch.equal(found[1], kept)
        assert torch.equal(x, kept)
    assert sqnr(made(x)[0], model(x)[0]) > 25


def swish(m: nn.Module, x: Tensor) -> Tensor:
    a = m.c(x)
    a.mul_(torch.sigmoid(a))
    return m.d(a)


def seen_through_a_view(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    a = m.c(x)
    c = a[:, 0]
    a.mul_(torch.sigmoid(a))
    c += 2
    return m.d(a), c


def written_twice(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    a = m.c(x)
    before = a + 0.5
    a[:, 1:3].clamp_(min=0)
    a.transpose(2, 3)[:, :, 0].zero_()
    return m.d(a), before


@pytest.mark.case("backend 20")
@pytest.mark.parametrize(
    "body",
    [
        swish,
        *slow_params(seen_through_a_view, written_twice, reason="other writes that the trace removes in the same way"),
    ],
    ids=lambda body: body.__name__,
)
def test_in_place_operators_compute_the_same_as_in_eager_mode(body):
    """Case 20."""
    model = nets.randomize(Body(body, c=conv(), d=conv(4)))
    captured = stages.capture(model, X)
    torch.testing.assert_close(captured(X), model(X))
    reference, lowered = quantized(model, X)
    pairs = [
        zip(*(t if isinstance(t, tuple) else (t,) for t in (stage(X), model(X))), strict=True)
        for stage in (reference, lowered, stages.compile(lowered))
    ]
    assert all(sqnr(a, b) > 25 for pair in pairs for a, b in pair)


@pytest.mark.slow(reason="quantizes a model with an island for its strides")
@pytest.mark.case("backend 21")
def test_an_operator_without_a_kernel_gets_strides_and_types_as_eager_has_them():
    """Case 21: a view made behind int8 convolutions, handed to a float part that asks for contiguous memory."""

    def body(m: nn.Module, x: Tensor) -> Tensor:
        y = torch.relu(m.c(x)) + m.e(x)
        return torch.linalg.matrix_norm(y.view(y.shape[0], 4, 64)) + torch.cumsum(y.flatten(1), 1)[:, -1]

    model = nets.randomize(Body(body, c=conv(), e=conv()))
    _, lowered = quantized(model, X)
    for stage in (lowered, stages.compile(lowered)):
        assert sqnr(stage(X), model(X)) > 20


@pytest.mark.case("backend 31")
def test_branches_on_data_are_refused_with_a_remedy():
    """Case 31."""
    for body in (lambda m, x: m.c(x) if x.mean() > 0 else -m.c(x), lambda m, x: m.c(x)[: int(x.sum())]):
        with pytest.raises(CaptureError) as raised:
            stages.capture(nets.randomize(Body(body, c=conv())), X)
        assert raised.value.remedy


@pytest.mark.case("backend 39")
def test_keywords_dictionaries_and_dropout_make_no_difference():
    """Case 39."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c, self.d, self.drop = conv(), conv(4), nn.Dropout(0.5)

        def forward(self, x=None, *, more=None):
            y = self.drop(self.c(x)) + more["left"]
            for _ in range(2):
                y = torch.relu(self.d(y))
            return {"y": y.view(y.size(0), -1)}

    model, left = nets.randomize(Net()), torch.randn(4, 4, 8, 8)
    plain = nets.randomize(Body(lambda m, x, left: m(x, more={"left": left})["y"], m=model))
    by_name = stages.capture(model, (), example_kwargs={"x": X, "more": {"left": left}})
    kinds = [
        [str(node.target) for node in c.module.graph.nodes if node.op == "call_function"]
        for c in (by_name, stages.capture(plain.m, (X,), example_kwargs={"more": {"left": left}}))
    ]
    assert kinds[0] == kinds[1]
    torch.testing.assert_close(by_name(x=X[:2], more={"left": left[:2]}), model(X[:2], more={"left": left[:2]}))
