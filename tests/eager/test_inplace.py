"""In-place operators where others look at the same memory: results, arguments and buffers are the float model's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from intaglio import eager
from support import nets
from support.eager_models import assert_like, converted_on, near, prepared_on, same, warnings_of
from support.nets import Body
from support.slow_params import slow_params, slow_params_except


def rows(count: int = 3, batch: int = 64, seed: int = 1) -> list[tuple[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.rand(batch, 8, generator=draw) * 2 - 1,) for _ in range(count)]


def view_and_base(m: Any, x: Tensor) -> Any:
    y = m.f(x)
    z = y.view(-1, 2, 4)
    y.add_(1)
    return m.g(z.flatten(1)), z, y


def item_and_base(m: Any, x: Tensor) -> Any:
    y = m.f(x)
    first = y[0]
    y.mul_(2)
    first += 3
    return m.g(y), first


def views_of_a_dead_base(m: Any, x: Tensor) -> Any:
    left, right = m.f(x).chunk(2, 1)
    whole = torch.cat([left, right], 1)
    left.zero_()
    return m.g(torch.cat([left, right], 1)), whole, left, right


def sibling_views(m: Any, x: Tensor) -> Any:
    y = m.f(x)
    a, b = y.t(), y[:, 1:5]
    b.relu_()
    return a, m.g(y), b


def the_argument(m: Any, x: Tensor) -> Any:
    y = m.f(x)
    x.add_(1)
    return y, m.g(x)


def a_view_of_the_argument(m: Any, x: Tensor) -> Any:
    y = m.f(x)
    x[:, 0] = 5
    x.view(-1)[:8].neg_()
    return y, m.g(x)


def out_argument(m: Any, x: Tensor) -> Any:
    y = m.f(x)
    kept, z = y * 1, torch.empty_like(y)
    found = torch.add(y, 1, out=z)
    assert found is z
    assert torch.mul(y, 2, out=y) is y
    return m.g(z), y, kept


def set_item(m: Any, x: Tensor) -> Any:
    y = m.f(x)
    kept = y + 0.5
    y[:, 0] = 0
    y[1:, 1:3] = kept[1:, 1:3]
    y[y > 1] = 1
    return m.g(y), kept


def in_place_twice(m: Any, x: Tensor) -> Any:
    y = m.f(x)
    before = torch.tanh(y)
    assert y.relu_() is y
    after = m.g(y)
    y.add_(before)
    return after, y, before


def data(m: Any, x: Tensor) -> Any:
    y = m.f(x)
    z = torch.tanh(y)
    y.data.mul_(0.5)
    return m.g(y), z


def view_by_keyword(m: Any, x: Tensor) -> Any:
    y = m.f(x)
    z = torch.transpose(input=y, dim0=0, dim1=1)
    y.add_(1)
    return m.g(y), z


def views_of_several(m: Any, x: Tensor) -> Any:
    y, z = m.f(x), m.f(x + 1)
    a, b = torch.broadcast_tensors(z[:, :1], y)
    y.mul_(2)
    z.neg_()
    return m.g(b), a


def view_of_a_list(m: Any, x: Tensor) -> Any:
    y = m.f(x)
    other, a = torch.atleast_3d([torch.tanh(y), y])
    a.add_(1)
    return m.g(y), a, other


def shape_in_place(m: Any, x: Tensor) -> Any:
    y = m.f(x)
    y.unsqueeze_(0)
    assert y.shape == (1, *x.shape)
    z = m.g(y)
    assert y.squeeze_(0) is y
    y.t_()
    assert y.shape == x.shape[::-1]
    return z, y, m.g(y.t())


def shape_in_place_beside_a_view(m: Any, x: Tensor) -> Any:
    y = m.f(x)
    first = y[0]
    y.t_()
    y.add_(1)
    assert y.shape == x.shape[::-1]
    return first, y, m.g(y.t())


def size_in_place(m: Any, x: Tensor) -> Any:
    y = m.f(x)
    y.resize_(len(x) // 2, 16)
    return m.g(y.view(-1, 8)), y


BODIES = [
    view_by_keyword,
    views_of_several,
    view_of_a_list,
    shape_in_place,
    view_and_base,
    item_and_base,
    views_of_a_dead_base,
    sibling_views,
    the_argument,
    a_view_of_the_argument,
    out_argument,
    set_item,
    in_place_twice,
    data,
]


@pytest.mark.parametrize(
    "body",
    slow_params_except(view_of_a_list, out_argument, of=BODIES, reason="other views that are written in the same ways"),
    ids=lambda body: body.__name__,
)
def test_in_place_updates_are_visible_where_the_float_model_shows_them(body, caplog):
    model = nets.randomize(Body(body, f=nn.Linear(8, 8), g=nn.Linear(8, 4)))
    converted = converted_on(model, rows())
    known = warnings_of(caplog)
    assert all("stays in float" in text for text in known), "only of what torch.export cannot trace"
    for call in (*rows(), *rows(1, batch=200, seed=2)):
        assert_like(converted, model, call, near)
    assert warnings_of(caplog) == known


@pytest.mark.parametrize(
    "body",
    [*slow_params(shape_in_place_beside_a_view, reason="a view beside the value that changes"), size_in_place],
    ids=lambda body: body.__name__,
)
def test_shapes_that_no_recording_can_change_are_changed(body, caplog):
    model = nets.randomize(Body(body, f=nn.Linear(8, 8), g=nn.Linear(8, 4)))
    converted = converted_on(model, rows())
    for call in rows():
        assert_like(converted, model, call, near)
    assert not warnings_of(caplog)


class Cache(nn.Module):
    """A buffer written in place at a place that counts up, one that is read only, and a state kept as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("cache", torch.zeros(4, 8))
        self.register_buffer("shift", torch.ones(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.state = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.f(x + self.shift))
        self.cache[int(self.calls) % 4] = y.mean(0)
        self.calls += 1
        self.state = y.tanh() if self.state is None else (self.state + y.tanh()) / 2
        return self.g(y + self.cache.sum(0) / 4 + self.state.mean(0))


def test_key_value_caches_are_updated_like_in_the_float_model(caplog):
    model = nets.randomize(Cache())
    converted = converted_on(model, rows(6))
    for call in rows(5, seed=2):
        assert_like(converted, model, call, near)
        near(converted.cache, model.cache)
        assert type(converted.state) is not Tensor or not converted.state.requires_grad
        near(converted.state * 1, model.state)
        assert converted.calls == model.calls
    assert not warnings_of(caplog)


def test_preparing_leaves_buffers_and_attributes_as_they_were():
    model = nets.randomize(Cache())
    prepared = eager.prepare(model, rows()[0])
    assert prepared.state is None
    assert prepared.calls == 0
    assert not prepared.cache.any()
    assert model.calls == 0


@pytest.mark.slow(reason="converts a model with a branch; views are written above")
def test_a_branch_that_calibration_has_not_seen_writes_to_a_view_of_a_deferred_value():
    def body(m, x, write):
        y = m.f(x)
        z = y[:, :4]
        if write:
            y.add_(1)
        return m.g(torch.relu(y)), z

    model = nets.randomize(Body(body, f=nn.Linear(8, 8), g=nn.Linear(8, 4)))
    prepared = prepared_on(model, [(x, False) for (x,) in rows()])
    converted = eager.convert(prepared)
    for write in (False, True):
        assert_like(converted, model, (*rows()[0], write), near)
        assert_like(prepared, model, (*rows()[0], write), same)
